#include "worker/checkpoint/manifest.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

using nlohmann::json;

// Shortest text that reads back to the same float.
std::string Exact(float value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end);
}

json ModelToJson(const ModelConfig& m) {
  json out = json::object();
  for (const NamedValue& field : DescribeModel(m)) {
    out[field.name] = field.value;
  }
  return out;
}

// Fields are stored as the text of DescribeModel; each is read back by its type.
class ModelReader {
 public:
  explicit ModelReader(const json& object) : object_(object) {}
  bool ok() const { return ok_; }

  template <class T>
  void Int(const char* name, T* out) {
    const auto value = ParseInt64(Text(name));
    ok_ = ok_ && value.has_value();
    *out = static_cast<T>(value.value_or(0));
  }
  void Float(const char* name, float* out) {
    const std::string text = Text(name);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
    ok_ = ok_ && error == std::errc() && end == text.data() + text.size();
  }
  std::string Text(const char* name) {
    const auto it = object_.find(name);
    if (it == object_.end() || !it->is_string()) {
      ok_ = false;
      return {};
    }
    return it->get<std::string>();
  }

 private:
  const json& object_;
  bool ok_ = true;
};

bool ModelFromJson(const json& object, ModelConfig* m) {
  if (!object.is_object()) {
    return false;
  }
  ModelReader in(object);
  int family = 0, score = 0, scope = 0, qk_norm = 0, tied = 0, normalize = 0;
  in.Int("family", &family);
  in.Int("layers", &m->layers);
  in.Int("hidden", &m->hidden);
  in.Int("heads", &m->heads);
  in.Int("kv_heads", &m->kv_heads);
  in.Int("head_dim", &m->head_dim);
  in.Int("qk_norm", &qk_norm);
  in.Int("vocab", &m->vocab);
  in.Float("rope_theta", &m->rope_theta);
  in.Float("norm_eps", &m->norm_eps);
  in.Int("tied_embeddings", &tied);
  in.Float("init_std", &m->init_std);
  in.Int("experts", &m->experts);
  in.Int("experts_per_token", &m->experts_per_token);
  in.Int("expert_hidden", &m->expert_hidden);
  in.Int("shared_experts", &m->shared_experts);
  in.Int("shared_expert_hidden", &m->shared_expert_hidden);
  in.Int("dense_hidden", &m->dense_hidden);
  in.Int("router.score", &score);
  in.Int("router.normalize_topk", &normalize);
  in.Float("router.routed_scaling_factor", &m->router.routed_scaling_factor);
  in.Int("router.n_group", &m->router.n_group);
  in.Int("router.topk_group", &m->router.topk_group);
  in.Int("router.aux_scope", &scope);
  in.Float("router.aux_coefficient", &m->router.aux_coefficient);
  in.Float("router.bias_update_rate", &m->router.bias_update_rate);
  in.Float("router.z_coefficient", &m->router.z_coefficient);
  const std::string dense = in.Text("dense_layers");
  if (!dense.empty()) {
    for (const std::string& part : StrSplit(dense, ',')) {
      const auto layer = ParseInt64(part);
      if (!layer) {
        return false;
      }
      m->dense_layers.push_back(static_cast<std::int32_t>(*layer));
    }
  }
  m->family = static_cast<ModelFamily>(family);
  m->qk_norm = qk_norm != 0;
  m->tied_embeddings = tied != 0;
  m->router.score = static_cast<RouterScore>(score);
  m->router.normalize_topk = normalize != 0;
  m->router.aux_scope = static_cast<AuxLossScope>(scope);
  return in.ok();
}

// A field that must exist with the type of T; absent or of another type: the manifest is damaged.
template <class T>
bool Take(const json& object, const char* name, T* out) {
  const auto it = object.find(name);
  if (it == object.end()) {
    return false;
  }
  if constexpr (std::is_same_v<T, std::string>) {
    if (!it->is_string()) {
      return false;
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    if (it->is_null()) {  // JSON has no NaN
      *out = std::nan("");
      return true;
    }
    if (!it->is_number()) {
      return false;
    }
  } else if (!it->is_number_integer()) {
    return false;
  }
  *out = it->get<T>();
  return true;
}

}  // namespace

std::vector<NamedValue> DescribeModel(const ModelConfig& m) {
  std::vector<NamedValue> out;
  const auto add = [&out](const char* name, auto value) {
    if constexpr (std::is_same_v<decltype(value), float>) {
      out.push_back({name, Exact(value)});
    } else {
      out.push_back({name, StrCat(static_cast<std::int64_t>(value))});
    }
  };
  add("family", static_cast<int>(m.family));
  add("layers", m.layers);
  add("hidden", m.hidden);
  add("heads", m.heads);
  add("kv_heads", m.kv_heads);
  add("head_dim", m.head_dim);
  add("qk_norm", m.qk_norm ? 1 : 0);
  add("vocab", m.vocab);
  add("rope_theta", m.rope_theta);
  add("norm_eps", m.norm_eps);
  add("tied_embeddings", m.tied_embeddings ? 1 : 0);
  add("init_std", m.init_std);
  add("experts", m.experts);
  add("experts_per_token", m.experts_per_token);
  add("expert_hidden", m.expert_hidden);
  add("shared_experts", m.shared_experts);
  add("shared_expert_hidden", m.shared_expert_hidden);
  add("dense_hidden", m.dense_hidden);
  out.push_back({"dense_layers", StrJoin(m.dense_layers, ",")});
  add("router.score", static_cast<int>(m.router.score));
  add("router.normalize_topk", m.router.normalize_topk ? 1 : 0);
  add("router.routed_scaling_factor", m.router.routed_scaling_factor);
  add("router.n_group", m.router.n_group);
  add("router.topk_group", m.router.topk_group);
  add("router.aux_scope", static_cast<int>(m.router.aux_scope));
  add("router.aux_coefficient", m.router.aux_coefficient);
  add("router.bias_update_rate", m.router.bias_update_rate);
  add("router.z_coefficient", m.router.z_coefficient);
  return out;
}

absl::Status CompareModels(const ModelConfig& saved, const ModelConfig& wanted) {
  const std::vector<NamedValue> before = DescribeModel(saved), after = DescribeModel(wanted);
  std::vector<std::string> differences;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i].value != after[i].value) {
      differences.push_back(StrCat("model.", before[i].name, " is ", before[i].value,
                                   " in the checkpoint and ", after[i].value, " in the job"));
    }
  }
  if (differences.empty()) {
    return absl::OkStatus();
  }
  return FailedPreconditionError(
      StrCat("the checkpoint is of another model: ", StrJoin(differences, "; "),
             ". Use the same model or another checkpoint.path"));
}

absl::Status CompareArchitectures(const ModelConfig& saved, const ModelConfig& wanted) {
  ModelConfig same = saved;
  same.init_std = wanted.init_std;
  same.router.aux_scope = wanted.router.aux_scope;
  same.router.aux_coefficient = wanted.router.aux_coefficient;
  same.router.z_coefficient = wanted.router.z_coefficient;
  if (saved.router.bias_update_rate == 0 || wanted.router.bias_update_rate != 0) {
    same.router.bias_update_rate = wanted.router.bias_update_rate;  // else a bias would be dropped
  }
  return CompareModels(same, wanted);
}

std::string SerializeManifest(const Manifest& manifest) {
  const TrainState& s = manifest.state;
  json shards = json::array();
  for (const ShardFile& shard : manifest.shards) {
    shards.push_back({{"file", shard.file}, {"bytes", shard.bytes}, {"crc32c", shard.crc32c}});
  }
  json out = {
      {"format", "octavo-checkpoint"},
      {"version", kManifestVersion},
      {"job_uid", manifest.job_uid},
      {"job_name", manifest.job_name},
      {"attempt", manifest.attempt},
      {"world_size", manifest.world_size},
      {"expert_parallel", manifest.expert_parallel},
      {"moment_dtype", std::string(manifest.moment_dtype == DType::kF32 ? "F32" : "BF16")},
      {"precision_state_version", manifest.precision_state_version},
      {"created_unix_micros", manifest.created_unix_micros},
      {"model", ModelToJson(manifest.model)},
      {"step", s.step},
      {"adam_t", s.adam_t},
      {"tokens", s.tokens},
      {"data_position", s.data_position},
      {"seed", s.seed},
      {"plan_version", s.plan_version},
      {"plan_hash", s.plan_hash},
      {"retried_steps", s.retried_steps},
      {"skipped_steps", s.skipped_steps},
      {"skips_in_a_row", s.skips_in_a_row},
      {"first_loss", s.first_loss},
      {"losses", s.losses},
      {"blas_core", s.blas_core},
      {"shards", shards},
  };
  if (manifest.sequence_length > 0) {
    out["sequence_length"] = manifest.sequence_length;
  }
  const auto put = [&out](const char* name, const std::optional<DatasetIdentity>& d) {
    if (d.has_value()) {
      out[name] = {{"format", d->format}, {"tokens", d->tokens}, {"fingerprint", d->fingerprint}};
    }
  };
  put("dataset", manifest.dataset);
  put("validation_dataset", manifest.validation);
  const std::string body = out.dump();
  out["crc32c"] = Crc32c(body.data(), body.size());
  return out.dump(1) + "\n";
}

absl::StatusOr<Manifest> ParseManifest(std::string_view text, const std::string& path) {
  const auto damaged = [&path](std::string_view what) {
    return DataLossError(StrCat(path, ": ", what));
  };
  json in = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  std::string format;
  if (!in.is_object() || !Take(in, "format", &format) || format != "octavo-checkpoint") {
    return damaged("not a checkpoint manifest (cut or damaged)");
  }
  std::int32_t version = 0;
  if (!Take(in, "version", &version) || version != kManifestVersion) {
    return UnsupportedError(
        StrCat(path, ": manifest version ", version, "; this program reads ", kManifestVersion));
  }
  std::uint32_t crc = 0;
  if (!Take(in, "crc32c", &crc)) {
    return damaged("no checksum");
  }
  in.erase("crc32c");
  const std::string body = in.dump();
  if (Crc32c(body.data(), body.size()) != crc) {
    return damaged("damaged (checksum)");
  }
  Manifest m;
  TrainState& s = m.state;
  std::string moments;
  bool ok = Take(in, "job_uid", &m.job_uid) && Take(in, "job_name", &m.job_name) &&
            Take(in, "attempt", &m.attempt) && Take(in, "world_size", &m.world_size) &&
            Take(in, "expert_parallel", &m.expert_parallel) && Take(in, "moment_dtype", &moments) &&
            Take(in, "precision_state_version", &m.precision_state_version) &&
            Take(in, "created_unix_micros", &m.created_unix_micros) && Take(in, "step", &s.step) &&
            Take(in, "adam_t", &s.adam_t) && Take(in, "tokens", &s.tokens) &&
            Take(in, "data_position", &s.data_position) && Take(in, "seed", &s.seed) &&
            Take(in, "plan_version", &s.plan_version) && Take(in, "plan_hash", &s.plan_hash) &&
            Take(in, "retried_steps", &s.retried_steps) &&
            Take(in, "skipped_steps", &s.skipped_steps) &&
            Take(in, "skips_in_a_row", &s.skips_in_a_row) &&
            Take(in, "first_loss", &s.first_loss) && Take(in, "blas_core", &s.blas_core);
  ok = ok && in.contains("model") && ModelFromJson(in["model"], &m.model) &&
       in.contains("losses") && in["losses"].is_array() && in.contains("shards") &&
       in["shards"].is_array();
  if (!ok) {
    return damaged("a field is missing or has another type");
  }
  // Checkpoints of older programs do not have it.
  if (in.contains("sequence_length") &&
      (!Take(in, "sequence_length", &m.sequence_length) || m.sequence_length < 0)) {
    return damaged("sequence_length is malformed");
  }
  const auto take_dataset = [&in](const char* name, std::optional<DatasetIdentity>* to) {
    const auto dataset = in.find(name);
    if (dataset == in.end()) {
      return true;
    }
    DatasetIdentity& d = to->emplace();
    return dataset->is_object() && Take(*dataset, "format", &d.format) &&
           Take(*dataset, "tokens", &d.tokens) && Take(*dataset, "fingerprint", &d.fingerprint);
  };
  if (!take_dataset("dataset", &m.dataset) || !take_dataset("validation_dataset", &m.validation)) {
    return damaged("the entry `dataset` or `validation_dataset` is malformed");
  }
  m.moment_dtype = moments == "BF16" ? DType::kBF16 : DType::kF32;
  for (const json& loss : in["losses"]) {
    s.losses.push_back(loss.is_number() ? loss.get<double>() : std::nan(""));
  }
  for (const json& item : in["shards"]) {
    ShardFile shard;
    if (!item.is_object() || !Take(item, "file", &shard.file) ||
        !Take(item, "bytes", &shard.bytes) || !Take(item, "crc32c", &shard.crc32c) ||
        shard.file.find('/') != std::string::npos) {
      return damaged("an entry of `shards` is malformed");
    }
    m.shards.push_back(std::move(shard));
  }
  if (m.precision_state_version > kPrecisionStateVersion) {
    return UnsupportedError(StrCat(path, ": precision state version ", m.precision_state_version,
                                   "; this program reads up to ", kPrecisionStateVersion));
  }
  return m;
}

}  // namespace octavo
