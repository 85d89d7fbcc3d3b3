// One line about bytes done, redrawn on a terminal; silent elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cli/session.h"

namespace octavo {

class ByteProgress {
 public:
  // `verb` stands before the numbers.
  ByteProgress(Session& session, std::string verb);
  // Empty when nothing is to be shown. Valid while this object lives.
  std::function<void(std::int64_t done, std::int64_t total)> callback();
  // Removes the line.
  void Finish();

 private:
  Session& session_;
  const std::string verb_;
  const bool shown_;
  std::int64_t drawn_permille_ = -1;
};

}  // namespace octavo
