#include "proto/spec/yaml_source.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <cstdint>
#include <map>
#include <sstream>

#include "base/str.h"
#include "proto/limits.h"

namespace octavo {
namespace {

YamlMark ToMark(const YAML::Mark& mark) {
  return mark.is_null() ? YamlMark{} : YamlMark{mark.line + 1, mark.column + 1};
}

// Ends the parse from inside a callback; caught in ParseYaml.
struct GiveUp {};

// Builds the tree from yaml-cpp's events (its own Node hides duplicate keys).
class TreeBuilder final : public YAML::EventHandler {
 public:
  explicit TreeBuilder(YamlDocument* document) : document_(document) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) {
      Fail(ToMark(mark), "a second YAML document begins here; valid is one document in a file");
    }
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    YamlNode node;
    node.mark = ToMark(mark);
    Finish(std::move(node), anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      Fail(ToMark(mark), "an alias stands inside the value that it refers to");
    }
    Count(found->second.nodes, ToMark(mark));
    YamlNode copy = found->second.node;
    copy.mark = ToMark(mark);
    Add(std::move(copy), found->second.nodes);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node;
    node.kind = YamlNode::Kind::kScalar;
    node.mark = ToMark(mark);
    node.text = value;
    node.quoted = tag == "!";
    if (tag != "!" && tag != "?" && !tag.empty()) {
      Problem(node.mark, StrCat("the tag ", tag, " is not supported; write plain values"));
    }
    Finish(std::move(node), anchor);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(YamlNode::Kind::kSequence, mark, anchor);
  }
  void OnSequenceEnd() override { Close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(YamlNode::Kind::kMap, mark, anchor);
  }
  void OnMapEnd() override { Close(); }

 private:
  struct Frame {
    YamlNode node;
    YAML::anchor_t anchor = 0;
    int nodes = 1;  // in this subtree, itself included
    bool has_key = false;
    bool skip_value = false;  // of a duplicate or unusable key
    std::string key;
    YamlMark key_mark;
  };
  struct Anchored {
    YamlNode node;
    int nodes = 1;
  };

  void Problem(YamlMark mark, std::string message) {
    document_->problems.push_back({mark, std::move(message)});
  }
  [[noreturn]] void Fail(YamlMark mark, std::string message) {
    Problem(mark, std::move(message));
    throw GiveUp();
  }

  void Count(int nodes, YamlMark mark) {
    nodes_ += nodes;
    if (nodes_ > kYamlNodesMax) {
      Fail(mark,
           StrCat("more than ", kYamlNodesMax, " values (aliases count each time they are used)"));
    }
  }

  void Open(YamlNode::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor) {
    Count(1, ToMark(mark));
    if (static_cast<int>(stack_.size()) >= kYamlDepthMax) {
      Fail(ToMark(mark), StrCat("nested deeper than ", kYamlDepthMax, " levels"));
    }
    Frame frame;
    frame.node.kind = kind;
    frame.node.mark = ToMark(mark);
    frame.anchor = anchor;
    stack_.push_back(std::move(frame));
  }

  void Close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    if (frame.anchor != 0) {
      anchors_[frame.anchor] = {frame.node, frame.nodes};
    }
    Add(std::move(frame.node), frame.nodes);
  }

  void Finish(YamlNode node, YAML::anchor_t anchor) {
    Count(1, node.mark);
    if (anchor != 0) {
      anchors_[anchor] = {node, 1};
    }
    Add(std::move(node), 1);
  }

  void Add(YamlNode node, int nodes) {
    if (stack_.empty()) {
      document_->root = std::move(node);
      return;
    }
    Frame& parent = stack_.back();
    parent.nodes += nodes;
    if (parent.node.kind == YamlNode::Kind::kSequence) {
      parent.node.items.push_back(std::move(node));
      return;
    }
    if (!parent.has_key) {
      TakeKey(parent, node);
      return;
    }
    parent.has_key = false;
    if (!parent.skip_value) {
      parent.node.entries.push_back({parent.key, parent.key_mark, std::move(node)});
    }
  }

  void TakeKey(Frame& parent, const YamlNode& node) {
    parent.has_key = true;
    parent.key = node.text;
    parent.key_mark = node.mark;
    parent.skip_value = false;
    if (node.kind != YamlNode::Kind::kScalar) {
      Problem(node.mark, "a key must be plain text");
      parent.skip_value = true;
      return;
    }
    for (const YamlEntry& entry : parent.node.entries) {
      if (entry.key == node.text) {
        Problem(node.mark, StrCat("duplicate key \"", node.text, "\"; it stands first at ",
                                  entry.key_mark.line, ":", entry.key_mark.column,
                                  ", and each key may stand once"));
        parent.skip_value = true;
        return;
      }
    }
  }

  YamlDocument* document_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, Anchored> anchors_;
  int documents_ = 0;
  int nodes_ = 0;
};

}  // namespace

const YamlNode* YamlNode::Find(std::string_view key) const {
  for (const YamlEntry& entry : entries) {
    if (entry.key == key) {
      return &entry.value;
    }
  }
  return nullptr;
}

YamlDocument ParseYaml(std::string_view text) {
  YamlDocument document;
  if (text.size() > static_cast<std::size_t>(kMaxSpecBytes)) {
    document.problems.push_back(
        {{}, StrCat("the file has ", text.size(), " bytes; valid is at most ", kMaxSpecBytes)});
    return document;
  }
  if (!IsValidUtf8(text)) {
    document.problems.push_back({{}, "the file is not UTF-8 text"});
    return document;
  }
  TreeBuilder builder(&document);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
    document.is_complete = true;
  } catch (const GiveUp&) {
    // The problem is in the document already.
  } catch (const YAML::Exception& error) {
    document.problems.push_back({ToMark(error.mark), StrCat("not valid YAML: ", error.msg)});
  } catch (const std::exception& error) {
    document.problems.push_back({{}, StrCat("not valid YAML: ", error.what())});
  }
  if (document.is_complete && document.problems.empty() &&
      document.root.kind == YamlNode::Kind::kNull) {
    document.problems.push_back({{}, "the file is empty"});
  }
  return document;
}

bool IsValidUtf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead == 0) {
      return false;
    }
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const int length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || i + static_cast<std::size_t>(length) > text.size()) {
      return false;
    }
    std::uint32_t code = lead & (0x7Fu >> length);
    for (int j = 1; j < length; ++j) {
      const auto next = static_cast<unsigned char>(text[i + static_cast<std::size_t>(j)]);
      if ((next & 0xC0) != 0x80) {
        return false;
      }
      code = (code << 6) | (next & 0x3Fu);
    }
    const std::uint32_t smallest = length == 2 ? 0x80 : length == 3 ? 0x800 : 0x10000;
    if (code < smallest || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) {
      return false;
    }
    i += static_cast<std::size_t>(length);
  }
  return true;
}

}  // namespace octavo
