// Columns of text for people: a header, rows, two spaces between, no trailing spaces.
//
//   Table table({{"JOB"}, {"STEP", Align::kRight}});
//   table.AddRow({"jobs/a", "12"});
//   out << table.Render();
#pragma once

#include <string>
#include <vector>

namespace octavo {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
  int width_max = 60;  // longer cells are cut with "…"; the last column never is
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // REQUIRES: as many cells as columns. Cells are made printable.
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }

  std::string Render() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "key:   value" lines with values in one column.
class KeyValues {
 public:
  void Add(std::string key, std::string value);  // an empty value is left out
  std::string Render(int indent = 0) const;

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

}  // namespace octavo
