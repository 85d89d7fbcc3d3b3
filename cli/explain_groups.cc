#include "cli/explain_groups.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "base/str.h"
#include "proto/convert/precision.h"

namespace octavo {
namespace {

// What a plan of the policy says of one site: "layer 1 fc1 input: amax_jump 12 > 10 …".
struct Cause {
  std::string tensor, signal;
  double value = 0, limit = 0;
};
Cause CauseOf(const std::string& reason, const OpSite& site) {
  const std::string start = StrCat("layer ", site.layer, " ", Name(site.op), " ");
  const std::size_t at = reason.find(start);
  if (at == std::string::npos) {
    return {};
  }
  const std::string rest = reason.substr(at + start.size(), 120);
  const std::vector<std::string> words = StrSplit(rest, ' ');  // tensor: signal value < limit
  if (words.size() < 5 || !EndsWith(words[0], ":")) {
    return {};
  }
  return {.tensor = words[0].substr(0, words[0].size() - 1),
          .signal = words[1],
          .value = std::atof(words[2].c_str()),
          .limit = std::atof(words[4].c_str())};
}

// How far a value lies beyond its limit, on whichever side it is (amax: either; SQNR: below, and it
// can be negative).
double Beyond(double value, double limit) {
  if (limit <= 0) {
    return value;  // a count of non-finite elements
  }
  return value <= 0 ? std::numeric_limits<double>::max() : std::max(value / limit, limit / value);
}

// The text without its numbers: equal for warnings that differ in them alone.
std::string WithoutNumbers(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool digit = (c >= '0' && c <= '9') || (c == '.' && !out.empty() && out.back() == '#');
    if (!digit) {
      out += c;
    } else if (out.empty() || out.back() != '#') {
      out += '#';
    }
  }
  return out;
}

}  // namespace

bool IsTold(const v1::JobEvent& event) {
  return event.kind() == "WARNING" || event.kind() == "POLICY";
}

std::vector<DecisionGroup> Decisions(const std::vector<v1::PrecisionPlan>& plans) {
  std::map<std::tuple<std::string, std::string, std::string, std::string, std::string>,
           DecisionGroup>
      groups;
  for (std::size_t i = 1; i < plans.size(); ++i) {
    if (plans[i].author() != v1::PLAN_AUTHOR_POLICY) {
      continue;
    }
    const absl::StatusOr<PrecisionPlan> before = PlanFromWire(plans[i - 1]);
    const absl::StatusOr<PrecisionPlan> after = PlanFromWire(plans[i]);
    if (!before.ok() || !after.ok()) {
      continue;
    }
    for (const PlanChange& change : Diff(*before, *after)) {
      // A return is told by its good shadows, not by a signal.
      const bool fell = change.before.is_fp8();
      const Cause cause = fell ? CauseOf(plans[i].reason(), change.site) : Cause{};
      const std::string op(Name(change.site.op)), from(Name(change.before.kind));
      std::string to(Name(change.after.kind));
      if (to == from) {
        to += change.after.wgrad == WgradPrecision::kBf16 ? " with weight gradients in bf16"
                                                          : " with other parameters";
      }
      DecisionGroup& g = groups[{op, cause.tensor, cause.signal, from, to}];
      const std::int64_t step = plans[i].applied_step();
      if (g.count++ == 0) {
        g = {.op = op,
             .tensor = cause.tensor,
             .signal = cause.signal,
             .before = from,
             .after = to,
             .fell = fell,
             .layers = {},
             .count = 1,
             .worst = cause.value,
             .limit = cause.limit,
             .worst_layer = change.site.layer};
      }
      g.layers.insert(change.site.layer);
      if (step > 0) {  // 0: ranks have not applied it
        g.first = g.first == 0 ? step : std::min(g.first, step);
        g.last = std::max(g.last, step);
      }
      if (Beyond(cause.value, cause.limit) > Beyond(g.worst, g.limit)) {
        g.worst = cause.value;
        g.limit = cause.limit;
        g.worst_layer = change.site.layer;
      }
    }
  }
  std::vector<DecisionGroup> out;
  for (auto& [key, group] : groups) {
    out.push_back(std::move(group));
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const auto& a, const auto& b) { return a.count > b.count; });
  return out;
}

std::vector<WarningGroup> Warnings(const std::vector<v1::JobEvent>& events) {
  std::vector<WarningGroup> groups;
  std::map<std::string, std::size_t> known;
  for (const v1::JobEvent& event : events) {
    if (event.kind() != "WARNING") {
      continue;
    }
    const auto [at, fresh] = known.emplace(WithoutNumbers(event.message()), groups.size());
    if (fresh) {
      groups.push_back({.text = event.message(), .first = event.step()});
    }
    WarningGroup& group = groups[at->second];
    ++group.count;
    group.last = event.step();
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.count > b.count; });
  return groups;
}

}  // namespace octavo
