#include "worker/rank/hooks_main.h"

namespace octavo {

TrainingHooks HooksOf(const internal::v1::RankAssignment&) { return {}; }

}  // namespace octavo
