#include "cli/output/progress.h"

#include <algorithm>
#include <ostream>

#include "base/str.h"

namespace octavo {

ByteProgress::ByteProgress(Session& session, std::string verb)
    : session_(session), verb_(std::move(verb)), shown_(session.is_terminal && !session.json()) {}

std::function<void(std::int64_t done, std::int64_t total)> ByteProgress::callback() {
  if (!shown_) {
    return {};
  }
  return [this](std::int64_t done, std::int64_t total) {
    const std::int64_t permille = done * 1000 / std::max<std::int64_t>(total, 1);
    if (permille != drawn_permille_) {
      drawn_permille_ = permille;
      session_.err() << "\r\x1b[K" << verb_ << " " << HumanBytes(static_cast<double>(done))
                     << " of " << HumanBytes(static_cast<double>(total)) << std::flush;
    }
  };
}

void ByteProgress::Finish() {
  if (shown_) {
    session_.err() << "\r\x1b[K" << std::flush;
  }
}

}  // namespace octavo
