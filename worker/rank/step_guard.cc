#include "worker/rank/step_guard.h"

namespace octavo {

GuardDecision StepGuard::Decide(const PassVerdict& verdict, bool retried) {
  if (!verdict.nonfinite) {
    retried_ += retried ? 1 : 0;
    in_a_row_ = 0;
    return {.action = StepAction::kApply};
  }
  if (!retried && verdict.plan_has_fp8) {
    GuardDecision decision{.action = StepAction::kRetry};
    if (verdict.site_known) {
      decision.bf16_layers = {verdict.layer};
    }
    return decision;
  }
  ++skipped_;
  ++in_a_row_;
  return {.action = in_a_row_ >= max_skips_ ? StepAction::kFail : StepAction::kSkip};
}

}  // namespace octavo
