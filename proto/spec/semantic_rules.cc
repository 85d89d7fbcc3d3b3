#include "proto/spec/semantic_rules.h"

#include <set>
#include <string>
#include <vector>

#include "base/str.h"

namespace octavo {
namespace {

constexpr int kLabelsMax = 32;
constexpr std::size_t kWordBytesMax = 63;
constexpr std::size_t kPathBytesMax = 4096;
constexpr std::int64_t kMicrobatchTokensMax = std::int64_t{1} << 31;

bool IsWord(std::string_view text, std::string_view extra) {
  if (text.empty() || text.size() > kWordBytesMax) {
    return false;
  }
  for (char c : text) {
    const bool alnum = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!alnum && extra.find(c) == std::string_view::npos) {
      return false;
    }
  }
  return true;
}

bool IsJobName(std::string_view name) {
  if (name.empty() || name.size() > kWordBytesMax || name.front() == '-' || name.back() == '-') {
    return false;
  }
  for (char c : name) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-')) {
      return false;
    }
  }
  return true;
}

// "1, 2, 4": the divisors of n, up to eight of them.
std::string Divisors(std::int64_t n) {
  std::vector<std::string> found;
  for (std::int64_t d = 1; d <= n && found.size() < 9; ++d) {
    if (n % d == 0) {
      found.push_back(found.size() == 8 ? "…" : std::to_string(d));
    }
  }
  return StrJoin(found, ", ");
}

void CheckPath(const std::string& field, const std::string& path, SpecFindings& findings) {
  if (path.empty() || !findings.IsSound(field)) {
    return;
  }
  if (path.size() > kPathBytesMax) {
    findings.Add(field, StrCat(path.size(), " bytes"), StrCat("valid: at most ", kPathBytesMax));
    return;
  }
  for (char c : path) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      findings.Add(field, Quoted(path), "valid: a path without control characters");
      return;
    }
  }
  if (path.front() != '/') {
    findings.Add(field, Quoted(path),
                 "valid: an absolute path, the same on every worker (a worker does not run in your "
                 "folder)");
  }
}

// Layer lists: each in 0..layers-1, none twice.
template <class List>
void CheckLayerList(const std::string& field, const List& list, std::int32_t layers,
                    SpecFindings& findings) {
  std::set<std::int32_t> seen;
  for (int i = 0; i < list.size(); ++i) {
    const std::string item = StrCat(field, "[", i, "]");
    const std::int32_t layer = list.Get(i);
    if (layer < 0 || layer >= layers) {
      findings.Add(item, std::to_string(layer),
                   StrCat("valid: 0 to ", layers - 1, " (model.layers is ", layers, ")"));
    } else if (!seen.insert(layer).second) {
      findings.Add(item, std::to_string(layer), "the layer stands twice; valid: each once");
    }
  }
}

bool Sound(const SpecFindings& findings, std::initializer_list<const char*> fields) {
  for (const char* field : fields) {
    if (!findings.IsSound(field)) {
      return false;
    }
  }
  return true;
}

void CheckRouter(const v1::MoeSpec& moe, SpecFindings& findings) {
  const v1::RouterSpec& router = moe.router();
  // On the wire the router can be absent, and then nothing was said about its fields.
  if (!Sound(findings, {"model.moe.num_experts", "model.moe.router.n_group"}) ||
      router.n_group() < 1) {
    return;
  }
  if (moe.num_experts() % router.n_group() != 0) {
    findings.Add("model.moe.router.n_group", std::to_string(router.n_group()),
                 StrCat("does not divide model.moe.num_experts (", moe.num_experts(),
                        "); valid: ", Divisors(moe.num_experts())));
    return;
  }
  if (!findings.IsSound("model.moe.router.topk_group")) {
    return;
  }
  if (router.topk_group() > router.n_group()) {
    findings.Add("model.moe.router.topk_group", std::to_string(router.topk_group()),
                 StrCat("valid: 1 to n_group (", router.n_group(), ")"));
    return;
  }
  const std::int64_t per_group = moe.num_experts() / router.n_group();
  if (findings.IsSound("model.moe.experts_per_token") && router.n_group() > 1 &&
      moe.experts_per_token() <= moe.num_experts() &&
      router.topk_group() * per_group < moe.experts_per_token()) {
    findings.Add(
        "model.moe.router.topk_group", std::to_string(router.topk_group()),
        StrCat("gives ", router.topk_group() * per_group, " experts to choose from (", per_group,
               " a group), fewer than "
               "experts_per_token (",
               moe.experts_per_token(), "); valid: ",
               (moe.experts_per_token() + per_group - 1) / per_group, " to ", router.n_group()));
  }
}

void CheckMoe(const v1::MoeSpec& moe, SpecFindings& findings) {
  if (Sound(findings, {"model.moe.num_experts", "model.moe.experts_per_token"}) &&
      moe.experts_per_token() > moe.num_experts()) {
    findings.Add("model.moe.experts_per_token", std::to_string(moe.experts_per_token()),
                 StrCat("valid: 1 to num_experts (", moe.num_experts(), ")"));
  }
  if (Sound(findings, {"model.moe.shared_experts", "model.moe.shared_expert_hidden"}) &&
      moe.shared_experts() == 0 && moe.shared_expert_hidden() != 0) {
    findings.Add("model.moe.shared_expert_hidden", std::to_string(moe.shared_expert_hidden()),
                 "has no meaning without shared experts; valid: leave it out, or set "
                 "shared_experts");
  }
  CheckRouter(moe, findings);
}

}  // namespace

void CheckIdentity(const v1::JobSpec& spec, SpecFindings& findings) {
  if (findings.IsSound("name") && !IsJobName(spec.name())) {
    findings.Add("name", Quoted(spec.name()),
                 "valid: 1 to 63 lower-case letters, digits and '-', not beginning or ending in "
                 "'-'");
  }
  if (findings.IsSound("owner") && !spec.owner().empty() && !IsWord(spec.owner(), "._@-")) {
    findings.Add("owner", Quoted(spec.owner()), "valid: 1 to 63 letters, digits and . _ @ -");
  }
  if (spec.labels_size() > kLabelsMax) {
    findings.Add("labels", StrCat(spec.labels_size(), " labels"),
                 StrCat("valid: at most ", kLabelsMax));
  }
  for (const auto& [key, value] : spec.labels()) {
    const std::string field = "labels." + key;
    if (!IsWord(key, "._/-")) {
      findings.Add(field, Quoted(key), "valid as a key: 1 to 63 letters, digits and . _ / -");
    } else if (!value.empty() && !IsWord(value, "._/:@ -")) {
      findings.Add(field, Quoted(value), "valid: up to 63 letters, digits and . _ / : @ - space");
    }
  }
  CheckPath("data.path", spec.data().path(), findings);
  CheckPath("data.validation_path", spec.data().validation_path(), findings);
  CheckPath("checkpoint.path", spec.checkpoint().path(), findings);
  CheckPath("checkpoint.start_from", spec.checkpoint().start_from(), findings);
  if (Sound(findings, {"checkpoint.start_from", "checkpoint.start_state"}) &&
      spec.checkpoint().start_state() == "all" && spec.checkpoint().start_from().empty()) {
    findings.Add("checkpoint.start_state", Quoted(spec.checkpoint().start_state()),
                 "has no meaning without checkpoint.start_from; valid: name one, or leave it out");
  }
  if (Sound(findings, {"data.path", "checkpoint.path"}) && !spec.data().path().empty() &&
      spec.data().path() == spec.checkpoint().path()) {
    findings.Add("checkpoint.path", Quoted(spec.checkpoint().path()),
                 "is the dataset's path too; valid: a folder of its own");
  }
}

void CheckModel(const v1::JobSpec& spec, SpecFindings& findings) {
  if (!spec.has_model()) {
    return;
  }
  const v1::ModelSpec& model = spec.model();
  if (Sound(findings, {"model.heads", "model.kv_heads"}) && model.kv_heads() > 0 &&
      model.heads() % model.kv_heads() != 0) {
    findings.Add("model.kv_heads", std::to_string(model.kv_heads()),
                 StrCat("does not divide model.heads (", model.heads(),
                        "); valid: ", Divisors(model.heads())));
  }
  if (Sound(findings, {"model.heads", "model.hidden", "model.head_dim"})) {
    if (model.head_dim() == 0) {
      findings.Add("model.heads", std::to_string(model.heads()),
                   StrCat("does not divide model.hidden (", model.hidden(),
                          "), so there is no default for model.head_dim; set it, or choose one "
                          "of ",
                          Divisors(model.hidden())));
    } else if (model.head_dim() % 2 != 0) {
      findings.Add("model.head_dim", std::to_string(model.head_dim()),
                   StrCat("rotary embedding turns pairs; valid: an even number, e.g. ",
                          model.head_dim() + 1));
    }
  }
  if (findings.IsSound("model.layers")) {
    CheckLayerList("model.dense_layers", model.dense_layers(), model.layers(), findings);
  }
  if (Sound(findings, {"model.dense_hidden", "model.dense_layers"})) {
    if (model.dense_layers_size() > 0 && model.dense_hidden() == 0) {
      findings.Add("model.dense_hidden", "", "missing; model.dense_layers needs it");
    } else if (model.dense_layers_size() == 0 && model.dense_hidden() != 0) {
      findings.Add("model.dense_hidden", std::to_string(model.dense_hidden()),
                   "has no meaning without dense layers; valid: leave it out, or set "
                   "model.dense_layers");
    }
  }
  if (model.has_moe() && findings.IsSound("model.moe.router") &&
      findings.IsSound("model.moe.num_experts")) {
    CheckMoe(model.moe(), findings);
  } else if (model.has_moe()) {
    CheckRouter(model.moe(), findings);
  }
}

void CheckParallel(const v1::JobSpec& spec, SpecFindings& findings) {
  const v1::ParallelSpec& parallel = spec.parallel();
  const std::int32_t experts = spec.model().moe().num_experts();
  if (Sound(findings, {"parallel.ranks", "parallel.expert_parallel", "model.moe.num_experts"}) &&
      experts > 0 && parallel.expert_parallel() > 0) {
    const std::int32_t size = parallel.expert_parallel();
    std::vector<std::int32_t> valid;
    for (std::int32_t d = 1; d <= parallel.ranks() && valid.size() < 8; ++d) {
      if (parallel.ranks() % d == 0 && experts % d == 0) {
        valid.push_back(d);
      }
    }
    const bool divides_ranks = parallel.ranks() % size == 0;
    if (!divides_ranks || experts % size != 0) {
      findings.Add("parallel.expert_parallel", std::to_string(size),
                   StrCat("does not divide ",
                          divides_ranks ? StrCat("model.moe.num_experts (", experts, ")")
                                        : StrCat("parallel.ranks (", parallel.ranks(), ")"),
                          "; valid: ", StrJoin(valid, ", ")));
    }
  }
  if (!spec.has_train() || parallel.ranks() < 1 ||
      !Sound(findings, {"parallel.ranks", "train.global_batch", "train.microbatch"})) {
    return;
  }
  const v1::TrainSpec& train = spec.train();
  const std::int64_t ranks = parallel.ranks();
  const std::int64_t unit = ranks * std::max(train.microbatch(), 1);
  if (train.global_batch() % unit != 0) {
    const std::int64_t below = train.global_batch() / unit * unit;
    const std::string product =
        train.microbatch() > 0
            ? StrCat("ranks · microbatch (", ranks, " · ", train.microbatch(), " = ", unit, ")")
            : StrCat("ranks (", ranks, ")");
    findings.Add("train.global_batch", std::to_string(train.global_batch()),
                 StrCat("is not a multiple of ", product, "; next valid: ",
                        below > 0 ? StrCat(below, " or ") : std::string(), below + unit));
    return;
  }
  if (findings.IsSound("train.sequence_length")) {
    const std::int64_t tokens =
        static_cast<std::int64_t>(train.sequence_length()) * std::max(train.microbatch(), 1);
    if (tokens >= kMicrobatchTokensMax) {
      findings.Add(
          "train.microbatch", std::to_string(train.microbatch()),
          StrCat("gives ", tokens, " tokens in one pass; valid: below ", kMicrobatchTokensMax));
    }
  }
}

void CheckTraining(const v1::JobSpec& spec, SpecFindings& findings) {
  if (!spec.has_train()) {
    return;
  }
  const v1::TrainSpec& train = spec.train();
  const v1::ScheduleSpec& schedule = train.schedule();
  if (Sound(findings, {"train.steps", "train.schedule.warmup_steps"}) &&
      schedule.warmup_steps() >= train.steps() && schedule.warmup_steps() > 0) {
    findings.Add("train.schedule.warmup_steps", std::to_string(schedule.warmup_steps()),
                 StrCat("valid: below train.steps (", train.steps(), ")"));
  } else if (Sound(findings, {"train.steps", "train.schedule"})) {
    if (schedule.kind() == "wsd" &&
        schedule.decay_steps() > train.steps() - schedule.warmup_steps()) {
      findings.Add("train.schedule.decay_steps", std::to_string(schedule.decay_steps()),
                   StrCat("valid: at most train.steps - warmup_steps (",
                          train.steps() - schedule.warmup_steps(), ")"));
    }
    if (schedule.kind() != "wsd" && schedule.decay_steps() != 0) {
      findings.Add("train.schedule.decay_steps", std::to_string(schedule.decay_steps()),
                   StrCat("has no meaning for schedule ", schedule.kind(),
                          "; valid: leave it out, or kind: wsd"));
    }
  }
  if (Sound(findings, {"train.schedule.lr", "train.schedule.min_lr"}) &&
      schedule.min_lr() > schedule.lr()) {
    findings.Add("train.schedule.min_lr", StrCat(schedule.min_lr()),
                 StrCat("is above the peak lr (", schedule.lr(), "); valid: 0 to ", schedule.lr()));
  }
  if (findings.IsSound("model.layers") && spec.has_model()) {
    CheckLayerList("train.recompute_layers", train.recompute_layers(), spec.model().layers(),
                   findings);
  }
  if (Sound(findings, {"train.recompute", "train.recompute_layers"}) &&
      train.recompute_layers_size() > 0 && train.recompute() != "full") {
    findings.Add("train.recompute_layers", "",
                 "has no meaning with recompute: none; valid: leave "
                 "it out, or recompute: full");
  }
  if (Sound(findings, {"train.validation.interval_steps", "data.validation_fraction",
                       "data.validation_path"}) &&
      train.validation().interval_steps() > 0 && spec.data().validation_path().empty() &&
      spec.data().validation_fraction() == 0) {
    findings.Add("data.validation_fraction", "0",
                 "leaves no data for train.validation; valid: above 0, or set validation_path, or "
                 "interval_steps: 0");
  }
}

}  // namespace octavo
