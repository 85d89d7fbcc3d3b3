// YAML text as a tree that remembers where everything stood, and refuses what yaml-cpp lets pass.
//
//   YamlDocument doc = ParseYaml(text);
//   for (const YamlProblem& p : doc.problems) …          // 3:1: duplicate key "steps" …
//   doc.root.Find("model")                               // nullptr when absent
//
// yaml-cpp accepts duplicate keys silently (the first one wins), several documents and unbounded
// aliases; here each is a problem with line and column. Scalars stay text: the reader of the field
// knows its type, so YAML 1.1's `yes` and `0x10` never change meaning on the way. Bounds:
// kMaxSpecBytes of text, kYamlDepthMax levels, kYamlNodesMax nodes after expanding aliases.
// Nothing throws out of here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace octavo {

inline constexpr int kYamlDepthMax = 32;
inline constexpr int kYamlNodesMax = 20000;

struct YamlMark {
  int line = 0;    // 1-based; 0: unknown
  int column = 0;  // 1-based
};

struct YamlEntry;

struct YamlNode {
  enum class Kind { kNull, kScalar, kSequence, kMap };

  Kind kind = Kind::kNull;
  YamlMark mark;
  std::string text;                // kScalar
  bool quoted = false;             // kScalar: written in quotes, so never a number or bool
  std::vector<YamlNode> items;     // kSequence
  std::vector<YamlEntry> entries;  // kMap, in order, keys unique

  const YamlNode* Find(std::string_view key) const;
};

struct YamlEntry {
  std::string key;
  YamlMark key_mark;
  YamlNode value;
};

struct YamlProblem {
  YamlMark mark;
  std::string message;
};

struct YamlDocument {
  YamlNode root;
  std::vector<YamlProblem> problems;
  bool is_complete = false;  // the whole text was read; `root` is what the author meant
};

YamlDocument ParseYaml(std::string_view text);

// UTF-8 without surrogates, overlong forms or NUL.
bool IsValidUtf8(std::string_view text);

}  // namespace octavo
