#include "cli/output/table.h"

#include <algorithm>

#include "base/check.h"
#include "cli/output/text.h"

namespace octavo {

void Table::AddRow(std::vector<std::string> cells) {
  OCTAVO_CHECK_EQ(cells.size(), columns_.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    cells[i] = Printable(cells[i]);
    if (i + 1 < cells.size()) {
      cells[i] = Truncated(cells[i], columns_[i].width_max);
    }
  }
  rows_.push_back(std::move(cells));
}

std::string Table::Render() const {
  std::vector<int> widths;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    int width = DisplayWidth(columns_[i].title);
    for (const auto& row : rows_) {
      width = std::max(width, DisplayWidth(row[i]));
    }
    widths.push_back(width);
  }
  std::string out;
  const auto add = [&](const auto& text_of) {
    std::string line;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const std::string& text = text_of(i);
      const auto pad = static_cast<std::size_t>(widths[i] - DisplayWidth(text));
      line += i == 0 ? "" : "  ";
      line += columns_[i].align == Align::kRight ? std::string(pad, ' ') + text
                                                 : text + std::string(pad, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  add([&](std::size_t i) -> const std::string& { return columns_[i].title; });
  for (const auto& row : rows_) {
    add([&](std::size_t i) -> const std::string& { return row[i]; });
  }
  return out;
}

void KeyValues::Add(std::string key, std::string value) {
  if (!value.empty()) {
    lines_.emplace_back(std::move(key), Printable(value));
  }
}

std::string KeyValues::Render(int indent) const {
  int width = 0;
  for (const auto& line : lines_) {
    width = std::max(width, DisplayWidth(line.first));
  }
  std::string out;
  for (const auto& [key, value] : lines_) {
    out += std::string(static_cast<std::size_t>(indent), ' ') + key + ":";
    out += std::string(static_cast<std::size_t>(width - DisplayWidth(key)) + 2, ' ');
    out += value + "\n";
  }
  return out;
}

}  // namespace octavo
