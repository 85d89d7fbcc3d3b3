// Which rank process is meant: every message to and from a rank carries these three (fencing).
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "base/str.h"
#include "octavo/internal/v1/worker_service.pb.h"

namespace octavo {

namespace iv1 = internal::v1;  // the private half of the wire contract

struct RankKey {
  std::string job_uid;
  std::int32_t attempt = 0;
  std::int32_t rank = 0;

  auto operator<=>(const RankKey&) const = default;
  std::string DebugString() const { return StrCat(job_uid, "/", attempt, "/", rank); }
};

// Any wire message with job_uid, attempt and rank fields.
template <class Message>
RankKey KeyOf(const Message& message) {
  return {.job_uid = message.job_uid(), .attempt = message.attempt(), .rank = message.rank()};
}

}  // namespace octavo
