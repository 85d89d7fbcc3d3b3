#include "cli/explain_story.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/str.h"
#include "cli/explain_groups.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

// Shares of kShortStorySentences; what each leaves out is one sentence.
constexpr std::size_t kAttemptsTold = 2, kOperatorPlansTold = 3, kDecisionsTold = 5;
constexpr std::size_t kWarningsTold = 2, kSitesTold = 2, kMismatchesTold = 1;
constexpr std::size_t kPolicyWordsTold = 3;  // in one sentence

std::string Sentence(std::string text) {
  if (!text.empty() && text.back() != '.') {
    text += '.';
  }
  return text;
}

std::string Times(std::int64_t n, const char* what) {
  return StrCat(n, " ", what, n == 1 ? "" : "s");
}

// "at step 5", "between steps 5 and 90".
std::string When(std::int64_t first, std::int64_t last) {
  return first == last ? StrCat("at step ", first) : StrCat("between steps ", first, " and ", last);
}

// "Layer 2", "Layers 0, 2-3".
std::string LayersText(const std::set<std::int32_t>& layers) {
  std::string text = layers.size() == 1 ? "Layer" : "Layers";
  for (auto at = layers.begin(); at != layers.end();) {
    const std::int32_t first = *at;
    std::int32_t last = first;
    while (++at != layers.end() && *at == last + 1) {
      last = *at;
    }
    StrAppend(&text, text.back() == 's' || text.back() == 'r' ? " " : ", ", first);
    if (last != first) {
      StrAppend(&text, "-", last);
    }
  }
  return text;
}

std::string StateSentence(const v1::Job& job) {
  const v1::JobProgress& p = job.progress();
  std::string text = StrCat(BareName(job.name()), " is ", v1::JobState_Name(job.state()));
  if (p.step() > 0) {
    StrAppend(&text, " at step ", p.step(), " of ", p.total_steps(), ", loss ",
              LossText(p.first_loss()), " at first and ", LossText(p.loss()), " now");
  }
  if (!job.pending().sentence().empty()) {
    StrAppend(&text, "; it waits because ", job.pending().sentence());
  } else if (!job.message().empty()) {
    StrAppend(&text, ": ", job.message());
  }
  return Sentence(text);
}

std::string AttemptSentence(const v1::JobSpec& spec, const v1::Attempt& attempt) {
  std::string text = StrCat("Attempt ", attempt.number());
  if (attempt.loaded_checkpoint_step() > 0) {
    StrAppend(&text, " continued from the checkpoint of step ", attempt.loaded_checkpoint_step());
  } else if (attempt.first_step() == 0 && attempt.last_step() == 0) {
    StrAppend(&text, " has not begun to train");  // or ended before it had its weights
  } else if (!spec.checkpoint().start_from().empty()) {
    StrAppend(&text, " began with the weights of ", spec.checkpoint().start_from());
  } else {
    StrAppend(&text, " began with fresh weights");
  }
  if (attempt.first_step() > 0 || attempt.last_step() > 0) {
    StrAppend(&text, " and reached step ", attempt.last_step());
  }
  if (!attempt.end_reason().empty()) {
    StrAppend(&text, "; it ended because ", attempt.end_reason());
  }
  return Sentence(text);
}

std::string PlanSentence(const v1::PrecisionPlan& plan) {
  std::string who = "the job's specification";
  if (plan.author() == v1::PLAN_AUTHOR_OPERATOR) {
    who = StrCat("operator ", plan.author_name());
  } else if (plan.author() == v1::PLAN_AUTHOR_POLICY) {
    who = "the policy";
  }
  std::string text = StrCat("Plan version ", plan.version(), " comes from ", who);
  StrAppend(&text, plan.applied_step() > 0
                       ? StrCat(", all ranks run it from step ", plan.applied_step())
                       : std::string(", ranks have not applied it"));
  if (!plan.reason().empty()) {
    StrAppend(&text, ": ", plan.reason());
  }
  return Sentence(text);
}

std::vector<v1::PrecisionPlan> OldestFirst(std::vector<v1::PrecisionPlan> plans) {
  std::sort(plans.begin(), plans.end(),
            [](const auto& a, const auto& b) { return a.version() < b.version(); });
  return plans;
}

std::optional<std::string> RetrySentence(const v1::JobProgress& progress) {
  if (progress.retried_steps() + progress.skipped_steps() == 0) {
    return std::nullopt;
  }
  return StrCat(Times(progress.retried_steps(), "step"),
                " had non-finite values and ran again in bf16; ", progress.skipped_steps(),
                progress.skipped_steps() == 1 ? " was skipped." : " were skipped.");
}

// ---------------------------------------------------------------- similar things together

std::string DecisionSentence(const DecisionGroup& g) {
  std::string text = LayersText(g.layers);
  StrAppend(&text, " ", g.op, g.fell ? " fell from " : " went from ", g.before, " to ", g.after);
  if (g.count > 1) {
    StrAppend(&text, " ", Times(g.count, "time"));
  }
  StrAppend(&text, " ",
            g.last > 0 ? When(g.first, g.last) : "in a plan that ranks have not applied");
  if (!g.signal.empty()) {
    StrAppend(&text, ", because of ", g.signal, " in its ", g.tensor);
    char numbers[64];
    std::snprintf(numbers, sizeof(numbers), "%.4g (limit %.4g)", g.worst, g.limit);
    StrAppend(&text, ", ", g.count > 1 ? "worst " : "", numbers,
              g.layers.size() > 1 ? StrCat(" at layer ", g.worst_layer) : std::string());
  } else if (g.fell) {
    StrAppend(&text, ", with the other ops of its layer or job");
  }
  return Sentence(text);
}

// The first `told` sentences, then one that counts the others.
void AddSome(std::vector<std::string> sentences, std::size_t told, const char* what,
             std::vector<std::string>* out) {
  const std::size_t left = sentences.size() - std::min(sentences.size(), told);
  if (left > 0) {
    sentences.resize(told);
    sentences.push_back(
        StrCat("And ", left, " more about ", what, "; octavo explain --all tells everything."));
  }
  out->insert(out->end(), sentences.begin(), sentences.end());
}

void AddAttempts(const v1::Job& job, std::vector<std::string>* out) {
  const auto& attempts = job.attempts();
  if (attempts.size() <= static_cast<int>(kAttemptsTold)) {
    for (const v1::Attempt& attempt : attempts) {
      out->push_back(AttemptSentence(job.spec(), attempt));
    }
    return;
  }
  std::map<std::string, int> classes;
  for (int i = 0; i + 1 < attempts.size(); ++i) {
    ++classes[v1::FailureClass_Name(attempts[i].end_class())];
  }
  std::string list;
  for (const auto& [name, count] : classes) {
    StrAppend(&list, list.empty() ? "" : ", ", name, " ", count);
  }
  out->push_back(
      StrCat("There were ", attempts.size(), " attempts; the earlier ones ended by ", list, "."));
  out->push_back(AttemptSentence(job.spec(), attempts[attempts.size() - 1]));
}

void AddPlans(const std::vector<v1::PrecisionPlan>& plans, std::vector<std::string>* out) {
  std::vector<std::string> operators;
  std::int64_t by_policy = 0;
  for (const v1::PrecisionPlan& plan : plans) {
    if (plan.author() == v1::PLAN_AUTHOR_OPERATOR) {
      operators.push_back(PlanSentence(plan));
    } else if (plan.author() == v1::PLAN_AUTHOR_POLICY) {
      ++by_policy;
    } else {
      out->push_back(PlanSentence(plan));
    }
  }
  if (operators.size() > kOperatorPlansTold) {
    const std::size_t left = operators.size() - kOperatorPlansTold;
    out->push_back(StrCat("Operators made ", operators.size(),
                          " plan versions; these are the last ", kOperatorPlansTold, "."));
    operators.erase(operators.begin(), operators.begin() + static_cast<std::ptrdiff_t>(left));
  }
  out->insert(out->end(), operators.begin(), operators.end());
  const std::vector<DecisionGroup> groups = Decisions(plans);
  std::vector<std::string> sentences;
  for (const DecisionGroup& group : groups) {
    sentences.push_back(DecisionSentence(group));
  }
  if (by_policy > 1) {
    out->push_back(StrCat("The policy made ", by_policy, " plan versions:"));
  }
  AddSome(std::move(sentences), kDecisionsTold, "its decisions", out);
}

// Operators' words about the policy: the newest ones, in their order, so that the last one holds.
void AddPolicyWords(const std::vector<v1::JobEvent>& events, std::vector<std::string>* out) {
  std::vector<std::string> words;
  for (const v1::JobEvent& event : events) {
    if (event.kind() == "POLICY") {
      words.push_back(event.message());
    }
  }
  if (words.empty()) {
    return;
  }
  const std::size_t all = words.size();
  std::string text = "Operators about the policy";
  if (all > kPolicyWordsTold) {
    words.erase(words.begin(), words.end() - static_cast<std::ptrdiff_t>(kPolicyWordsTold));
    StrAppend(&text, " (the last ", kPolicyWordsTold, " of ", all, ")");
  }
  out->push_back(Sentence(StrCat(text, ": ", StrJoin(words, "; then "))));
}

void AddWarnings(const std::vector<v1::JobEvent>& events, std::vector<std::string>* out) {
  std::vector<std::string> sentences;
  for (const WarningGroup& g : Warnings(events)) {
    std::string text =
        g.first > 0 && g.count == 1 ? StrCat("At step ", g.first, ": ", g.text) : g.text;
    if (g.count > 1) {
      StrAppend(&text, " (", g.count, " such",
                g.last > 0 ? StrCat(" ", When(g.first, g.last)) : std::string(), ")");
    }
    sentences.push_back(Sentence(text));
  }
  AddSome(std::move(sentences), kWarningsTold, "warnings", out);
}

void AddSites(const v1::JobPrecision& precision, std::vector<std::string>* out) {
  // Ops of equal layers are one sentence.
  std::map<std::tuple<std::string, std::string, std::string, std::string>, std::set<std::int32_t>>
      by_op;
  for (const v1::PolicySite& site : precision.sites()) {
    by_op[{site.status(), site.original(), site.cause(), site.op()}].insert(site.layer());
  }
  std::map<std::tuple<std::string, std::string, std::string, std::set<std::int32_t>>,
           std::vector<std::string>>
      groups;
  for (const auto& [key, layers] : by_op) {
    const auto& [status, original, cause, op] = key;
    groups[{status, original, cause, layers}].push_back(op);
  }
  std::vector<std::string> sentences;
  for (const auto& [key, ops] : groups) {
    const auto& [status, original, cause, layers] = key;
    const std::string where = StrCat(LayersText(layers), " ", StrJoin(ops, ", "));
    const bool one = layers.size() * ops.size() == 1;
    if (status == "operator") {
      sentences.push_back(StrCat(where, one ? " is" : " are",
                                 " in an operator's hands; the policy ", "leaves ",
                                 one ? "it" : "them", " alone."));
    } else if (status == "pinned" && original.empty()) {
      sentences.push_back(StrCat(where, one ? " is" : " are", " pinned by an operator; the policy ",
                                 "leaves ", one ? "it" : "them", " alone."));
    } else if (status == "pinned") {
      sentences.push_back(StrCat(where, one ? " is" : " are", " pinned after too many falls from ",
                                 original, ", last because of ", cause, "; an operator decides."));
    } else {
      sentences.push_back(StrCat(where, one ? " is" : " are", " held, fallen from ", original,
                                 " because of ", cause, "; ", one ? "it returns" : "they return",
                                 " on good shadow statistics."));
    }
  }
  AddSome(std::move(sentences), kSitesTold, "what is held", out);
}

std::string MismatchSentence(const v1::EffectivePrecision::Mismatch& m) {
  return StrCat("Layer ", m.layer(), " ", m.op(), " was planned in ", m.planned(), " and ",
                m.count(), " of its products ran in ", m.executed(), ": ", Sentence(m.reason()));
}

void AddMismatches(const v1::JobPrecision& precision, std::vector<std::string>* out) {
  const auto& all = precision.effective().mismatches();
  if (all.size() <= static_cast<int>(kMismatchesTold)) {
    for (const auto& mismatch : all) {
      out->push_back(MismatchSentence(mismatch));
    }
    return;
  }
  std::int64_t count = 0;
  std::set<std::string> reasons;
  for (const auto& mismatch : all) {
    count += mismatch.count();
    reasons.insert(mismatch.reason());
  }
  out->push_back(Sentence(StrCat(count, " products of ", all.size(),
                                 " ops ran otherwise than planned: ", StrJoin(reasons, "; "))));
}

constexpr char kPolicyOff[] = "The policy is off: nothing falls back or returns by itself.";

}  // namespace

std::vector<std::string> ShortStory(const StoryInput& input) {
  std::vector<std::string> out = {StateSentence(input.job)};
  AddAttempts(input.job, &out);
  AddPlans(OldestFirst(input.plans), &out);
  if (std::optional<std::string> retries = RetrySentence(input.job.progress())) {
    out.push_back(*std::move(retries));
  }
  AddPolicyWords(input.events, &out);
  AddWarnings(input.events, &out);
  if (!input.precision.policy_enabled()) {
    out.push_back(kPolicyOff);
  }
  AddSites(input.precision, &out);
  AddMismatches(input.precision, &out);
  return out;
}

std::vector<std::string> FullStory(const StoryInput& input) {
  std::vector<std::string> out = {StateSentence(input.job)};
  for (const v1::Attempt& attempt : input.job.attempts()) {
    out.push_back(AttemptSentence(input.job.spec(), attempt));
  }
  for (const v1::PrecisionPlan& plan : OldestFirst(input.plans)) {
    out.push_back(PlanSentence(plan));
  }
  if (std::optional<std::string> retries = RetrySentence(input.job.progress())) {
    out.push_back(*std::move(retries));
  }
  for (const v1::JobEvent& event : input.events) {
    if (IsTold(event)) {
      out.push_back(Sentence(event.step() > 0
                                 ? StrCat("At step ", event.step(), ": ", event.message())
                                 : event.message()));
    }
  }
  if (!input.precision.policy_enabled()) {
    out.push_back(kPolicyOff);
  }
  for (const v1::PolicySite& site : input.precision.sites()) {
    const std::string where = StrCat("Layer ", site.layer(), " ", site.op());
    if (site.status() == "operator") {
      out.push_back(StrCat(where, " is in an operator's hands; the policy leaves it alone."));
    } else if (site.status() == "pinned" && site.original().empty()) {
      out.push_back(StrCat(where, " is pinned by an operator; the policy leaves it alone."));
    } else if (site.status() == "pinned") {
      out.push_back(StrCat(where, " fell from ", site.original(), " ",
                           Times(site.relapses() + 1, "time"), ", last because of ", site.cause(),
                           ", and stays until an operator decides."));
    } else {
      out.push_back(StrCat(where, " fell from ", site.original(), " at step ", site.since_step(),
                           " because of ", site.cause(), "; it returns after ", site.hold_steps(),
                           " steps at the earliest, when its shadow statistics are good."));
    }
  }
  for (const auto& mismatch : input.precision.effective().mismatches()) {
    out.push_back(MismatchSentence(mismatch));
  }
  return out;
}

}  // namespace octavo
