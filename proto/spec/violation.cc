#include "proto/spec/violation.h"

#include <algorithm>
#include <cstdio>

#include "base/str.h"

namespace octavo {
namespace {

constexpr std::size_t kShownMax = 80;

}  // namespace

std::string SpecViolation::Text(std::string_view file_name) const {
  std::string text;
  if (!file_name.empty()) {
    StrAppend(&text, file_name, ":");
    if (mark.line > 0) {
      StrAppend(&text, mark.line, ":", mark.column, ":");
    }
    text += " ";
  }
  if (!field.empty()) {
    StrAppend(&text, field, ": ");
  }
  if (!found.empty()) {
    StrAppend(&text, "found ", found, message.empty() ? "" : "; ");
  }
  return text + message;
}

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : text.substr(0, kShownMax)) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\x%02x", static_cast<unsigned>(c) & 0xFFu);
      out += escape;
    } else {
      out += c;
    }
  }
  if (text.size() > kShownMax) {
    // Half of a multi-byte character at the cut would make the message invalid UTF-8.
    while (!out.empty() && !IsValidUtf8(out)) {
      out.pop_back();
    }
    out += "…";
  }
  return out + "\"";
}

std::optional<std::string> NearestWord(std::string_view found,
                                       const std::vector<std::string>& candidates) {
  constexpr std::size_t kPrefixBytesMin = 5;  // shorter beginnings fit too many words
  const int limit = std::clamp(static_cast<int>(found.size() + 2) / 3, 1, 3);
  std::optional<std::string> best;
  int best_score = 2 * limit + 1;
  for (const std::string& candidate : candidates) {
    int score = 2 * EditDistance(found, candidate);
    if (found.size() >= kPrefixBytesMin && candidate.size() > found.size()) {
      // Half an edit for being cut short, so that a whole word wins a tie.
      score = std::min(score, 2 * EditDistance(found, candidate.substr(0, found.size())) + 1);
    }
    if (score < best_score) {
      best_score = score;
      best = candidate;
    }
  }
  return best;
}

std::string Suggestion(std::string_view found, const std::vector<std::string>& candidates) {
  const std::optional<std::string> near = NearestWord(found, candidates);
  return near.has_value() ? "; did you mean " + Quoted(*near) + "?" : std::string();
}

YamlMark SpecFindings::Find(const std::string& field) const {
  std::string at = field;
  while (true) {
    const auto found = marks_.find(at);
    if (found != marks_.end()) {
      return found->second;
    }
    const std::size_t cut = at.find_last_of(".[");
    if (cut == std::string::npos) {
      const auto root = marks_.find("");
      return root == marks_.end() ? YamlMark{} : root->second;
    }
    at.resize(cut);
  }
}

void SpecFindings::Add(const std::string& field, std::string found, std::string message) {
  AddAt(Find(field), field, std::move(found), std::move(message));
}

void SpecFindings::AddAt(YamlMark mark, const std::string& field, std::string found,
                         std::string message) {
  bad_.insert(field);
  violations_.push_back({field, std::move(found), std::move(message), mark});
}

bool SpecFindings::IsSound(const std::string& field) const {
  const auto inside = bad_.lower_bound(field);
  if (inside != bad_.end() && StartsWith(*inside, field) &&
      (inside->size() == field.size() || (*inside)[field.size()] == '.' ||
       (*inside)[field.size()] == '[')) {
    return false;
  }
  // A parent that could not be read leaves its children unset.
  for (std::size_t cut = field.find_last_of(".["); cut != std::string::npos;
       cut = cut == 0 ? std::string::npos : field.find_last_of(".[", cut - 1)) {
    if (bad_.count(field.substr(0, cut)) > 0) {
      return false;
    }
  }
  return true;
}

}  // namespace octavo
