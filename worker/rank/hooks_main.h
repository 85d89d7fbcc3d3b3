// Which hooks octavo-rank trains with. The product has none (hooks_main.cc); octavo-rank-test, which
// only tests build, links tests/support/inject/inject.cc instead.
#pragma once

#include "octavo/internal/v1/rank_service.pb.h"
#include "worker/rank/training.h"

namespace octavo {

TrainingHooks HooksOf(const internal::v1::RankAssignment& assignment);

}  // namespace octavo
