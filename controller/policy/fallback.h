// The precision policy: falls back by evidence, returns by evidence, never flaps without bound.
//
// Pure: (config, state, plan, observation) → decisions and a next plan. The core feeds it step
// reports, snapshots, operator overrides and starts; it stores nothing and knows no clock but steps.
//
//   healthy ──signal──► fallback (next rung of the ladder; hold doubles with each relapse)
//      ▲                   │ hold over, and `healthy_snapshots` good shadow snapshots
//      └───────────────────┘            └─ max_flaps relapses ─► pinned (alert; never returns)
//
// Scope of an answer: the (layer, op) that shows the signal; the whole layer once half of its FP8 ops
// do; the job for a loss spike. Transpose-flushed values move that op's weight gradient to BF16
// first. An operator's override is never undone: its sites leave the policy's hands. (NUMERICS 11)
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "controller/policy/signals.h"
#include "proto/precision/health.h"
#include "proto/precision/plan.h"

namespace octavo {

enum class Direction : std::uint8_t { kFallback, kRestore, kChoose, kPin };
std::string_view Name(Direction direction);

struct PolicyDecision {
  Direction direction = Direction::kFallback;
  OpSite site;
  Signal signal = Signal::kNonfinite;  // cause (of the original fall, for a return)
  double value = 0, threshold = 0;
  std::int64_t step = 0;
  std::int64_t plan_before = 0, plan_after = 0;
  Recipe before, after;
  std::string reason;  // a sentence with the numbers
};

struct PolicyOutput {
  std::vector<PolicyDecision> decisions;
  std::vector<std::string> alerts;  // sentences; nothing changed
  bool changed = false;
  PrecisionPlan plan;               // version + 1 when changed
  bool family_changed = false;      // some site's recipe kind changed: checkpoint first
};

struct SiteState {
  enum class Status : std::uint8_t { kHealthy, kFallback, kPinned };
  Status status = Status::kHealthy;
  Recipe original;               // to return to
  Signal cause = Signal::kNonfinite;
  std::int64_t since_step = 0;   // step of the fall
  std::int64_t hold_steps = 0;
  std::int32_t flaps = 0;        // falls after the first
  std::int32_t good_shadows = 0;
  bool fell_once = false;
};

struct PolicyState {
  SignalWindows windows;
  std::map<OpSite, SiteState> sites;
  std::set<OpSite> operator_sites;  // in the operator's hands
  std::deque<double> losses;        // newest last, at most kLossWindow
  std::int64_t grace_until = 0;     // after start, resume: no decision, non-finite values excepted
  // After a switch the switched sites alone are left in peace: a busy layer must not blind the policy
  // to the others.
  std::set<OpSite> switching;                   // changed by a plan that ranks have not applied yet
  std::map<OpSite, std::int64_t> site_grace_until;
  std::int64_t awaited_version = 0; // snapshots of older plans are not judged
  std::int64_t next_choice_step = 0;
  // auto: evidence per (site, tensor, candidate) since the last choice, plain sums.
  std::map<std::tuple<OpSite, Tensor, RecipeKind>, TensorHealth> evidence;
};

// Start or resume of an attempt at `step`: windows empty, grace begins.
void PolicyOnStart(const PolicyConfig& config, PolicyState& state, std::int64_t step);
// All ranks run `version` from `step` on: grace begins for the sites it switched.
void PolicyOnApplied(const PolicyConfig& config, PolicyState& state, std::int64_t version,
                     std::int64_t step);
// An operator set these sites; they leave the policy's hands (release = back into them).
void PolicyOnOperator(PolicyState& state, const std::vector<OpSite>& sites, bool release);

PolicyOutput PolicyOnStep(const PolicyConfig& config, PolicyState& state, const PrecisionPlan& plan,
                          const StepHealth& step);
PolicyOutput PolicyOnSnapshot(const PolicyConfig& config, PolicyState& state,
                              const PrecisionPlan& plan, const HealthSnapshot& snapshot);

}  // namespace octavo
