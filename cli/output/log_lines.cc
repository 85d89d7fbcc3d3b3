#include "cli/output/log_lines.h"

namespace octavo {

void LogLines::Add(const Source& source, std::string_view text) {
  std::string& open = open_[source];
  while (true) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      open += text;
      return;
    }
    open += text.substr(0, end);
    sink_(source, open);
    open.clear();
    text.remove_prefix(end + 1);
  }
}

void LogLines::Flush() {
  for (auto& [source, text] : open_) {
    if (!text.empty()) {
      sink_(source, text);
      text.clear();
    }
  }
}

}  // namespace octavo
