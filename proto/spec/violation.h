// One thing that is wrong with a job's specification, where it stands and what would be right.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "proto/spec/yaml_source.h"

namespace octavo {

struct SpecViolation {
  std::string field;    // "precision.overrides[2].recipe.kind"; empty: the whole file
  std::string found;    // as shown, e.g. "\"fp8_blok\"" or "12"; may be empty
  std::string message;  // what is valid, and a suggestion
  YamlMark mark;        // {0, 0}: the spec did not come from a file

  // "job.yaml:14:9: precision.overrides[2].recipe.kind: found "fp8_blok"; valid: …". Parts that are
  // not known are left out.
  std::string Text(std::string_view file_name) const;
};

// "\"text\"" with control characters escaped, cut after 80 bytes.
std::string Quoted(std::string_view text);

// "; did you mean \"x\"?" for the candidate the author most likely meant, or "". Beginnings count:
// "fp8_blok" is nearer to "fp8_blockwise" than to "fp8_flow".
std::string Suggestion(std::string_view found, const std::vector<std::string>& candidates);
std::optional<std::string> NearestWord(std::string_view found,
                                       const std::vector<std::string>& candidates);

// Collects violations while a spec is read and checked, and knows where every field stood.
class SpecFindings {
 public:
  // Where the value of `field` stands.
  void Locate(const std::string& field, YamlMark mark) { marks_[field] = mark; }
  bool WasGiven(const std::string& field) const { return marks_.count(field) > 0; }
  bool HasLocations() const { return !marks_.empty(); }
  // The mark of the field, or of the nearest enclosing one that was given.
  YamlMark Find(const std::string& field) const;

  void Add(const std::string& field, std::string found, std::string message);
  void AddAt(YamlMark mark, const std::string& field, std::string found, std::string message);

  // The field is accounted for by another message (a misspelt key): it gets none of its own.
  void Excuse(const std::string& field) { bad_.insert(field); }

  // No violation names this field or one inside it: its value may take part in further checks.
  bool IsSound(const std::string& field) const;

  std::vector<SpecViolation>& violations() { return violations_; }

 private:
  std::map<std::string, YamlMark> marks_;
  std::set<std::string> bad_;
  std::vector<SpecViolation> violations_;
};

}  // namespace octavo
