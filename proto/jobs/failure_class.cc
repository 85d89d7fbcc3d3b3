#include "proto/jobs/failure_class.h"

namespace octavo {
namespace {

// What the controller or a user decides is neither a failure nor a reason to spend the budget.
constexpr bool DecisionsAreNotFailures() {
  for (FailureClass decision :
       {FailureClass::kNone, FailureClass::kPreempted, FailureClass::kSuspendedByUser,
        FailureClass::kDrained, FailureClass::kCancelledByUser}) {
    if (CountsTowardsRestartMax(decision)) {
      return false;
    }
  }
  return true;
}
static_assert(DecisionsAreNotFailures());
static_assert(static_cast<std::size_t>(FailureClass::kNoProgress) + 1 == kFailureClassCount);
static_assert(!Retryable(FailureClass::kSpecRejected) && !Retryable(FailureClass::kNoProgress));

}  // namespace

std::optional<FailureClass> ParseFailureClass(std::string_view text) {
  for (std::size_t i = 0; i < kFailureClassCount; ++i) {
    if (kFailureClassFacts[i].name == text) {
      return static_cast<FailureClass>(i);
    }
  }
  return std::nullopt;
}

}  // namespace octavo
