// Time as the core sees it: an argument of every event, never a clock.
#pragma once

#include <cstdint>

namespace octavo {

struct Now {
  std::int64_t mono_micros = 0;  // waits and leases
  std::int64_t unix_micros = 0;  // records
};

}  // namespace octavo
