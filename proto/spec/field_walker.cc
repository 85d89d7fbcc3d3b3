#include "proto/spec/field_walker.h"

#include <google/protobuf/descriptor.h>

#include <charconv>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/str.h"

namespace octavo {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::string Join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

bool IsMessage(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
}

// Recipes have defaults by kind (proto/precision), not by field.
bool IsRecipe(const Descriptor& type) { return type.full_name() == "octavo.v1.Recipe"; }

std::string Number(double value) {
  char text[40];
  if (value == std::floor(value) && std::fabs(value) < 1e15) {
    std::snprintf(text, sizeof(text), "%.0f", value);
  } else {
    std::snprintf(text, sizeof(text), "%g", value);
  }
  return text;
}

// `parameters.kind` may be omitted: it is the base recipe's.
bool IsRequired(const FieldDescriptor& field, const std::string& path) {
  return RuleOf(field).required() && !EndsWith(path, "precision.parameters.kind");
}

std::string TypeText(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
      return "an integer";
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return "an integer of 0 or more";
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "a number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      std::vector<std::string> names;
      for (int i = 0; i < field.message_type()->field_count(); ++i) {
        names.push_back(field.message_type()->field(i)->name());
      }
      return "a map with the keys " + StrJoin(names, ", ");
    }
    default:
      return "text";
  }
}

std::string FoundText(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kNull:
      return "nothing";
    case YamlNode::Kind::kSequence:
      return "a list";
    case YamlNode::Kind::kMap:
      return "a map";
    case YamlNode::Kind::kScalar:
      break;
  }
  const bool numeric = !node.quoted && ParseDouble(node.text).has_value();
  return numeric ? node.text : Quoted(node.text);
}

std::vector<std::string> OneOf(const v1::FieldRule& rule) {
  std::vector<std::string> words;
  for (const std::string& word : rule.one_of()) {
    if (!word.empty()) {
      words.push_back(word);
    }
  }
  return words;
}

// The YAML reader -------------------------------------------------------------------------------

class YamlReader {
 public:
  explicit YamlReader(SpecFindings& findings) : findings_(findings) {}

  void ReadMessage(const YamlNode& node, const std::string& path, Message* message) {
    if (node.kind == YamlNode::Kind::kNull) {
      return;  // `restart:` with nothing below: all defaults
    }
    if (node.kind != YamlNode::Kind::kMap) {
      std::vector<std::string> names;
      for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
        names.push_back(message->GetDescriptor()->field(i)->name());
      }
      findings_.AddAt(node.mark, path, FoundText(node),
                      "valid: a map with the keys " + StrJoin(names, ", "));
      return;
    }
    const Descriptor& type = *message->GetDescriptor();
    for (const YamlEntry& entry : node.entries) {
      const FieldDescriptor* field = type.FindFieldByName(entry.key);
      if (field == nullptr) {
        UnknownKey(entry, path, type);
        continue;
      }
      const std::string field_path = Join(path, entry.key);
      findings_.Locate(field_path, entry.value.kind == YamlNode::Kind::kScalar ? entry.value.mark
                                                                               : entry.key_mark);
      ReadField(entry, *field, field_path, message);
    }
  }

 private:
  void UnknownKey(const YamlEntry& entry, const std::string& path, const Descriptor& type) {
    std::vector<std::string> names;
    for (int i = 0; i < type.field_count(); ++i) {
      names.push_back(type.field(i)->name());
    }
    // The field that was meant is not also missing.
    if (const std::optional<std::string> meant = NearestWord(entry.key, names)) {
      if (!findings_.WasGiven(Join(path, *meant))) {
        findings_.Excuse(Join(path, *meant));
      }
    }
    findings_.AddAt(entry.key_mark, Join(path, entry.key), "an unknown key",
                    "valid: " + StrJoin(names, ", ") + Suggestion(entry.key, names));
  }

  void ReadField(const YamlEntry& entry, const FieldDescriptor& field, const std::string& path,
                 Message* message) {
    const YamlNode& node = entry.value;
    const v1::FieldRule& rule = RuleOf(field);
    if (!rule.refused().empty()) {
      if (node.kind != YamlNode::Kind::kScalar || node.text != rule.default_value()) {
        findings_.AddAt(entry.key_mark, path, FoundText(node), rule.refused());
        return;
      }
    }
    if (field.is_map()) {
      ReadMap(node, field, path, message);
    } else if (field.is_repeated()) {
      ReadList(node, field, path, message);
    } else if (IsMessage(field)) {
      Message* child = message->GetReflection()->MutableMessage(message, &field);
      ReadChild(node, path, child);
    } else {
      ReadScalar(node, field, path, message);
    }
  }

  // A recipe may be written as its name alone: `recipe: bf16`.
  void ReadChild(const YamlNode& node, const std::string& path, Message* child) {
    const FieldDescriptor* kind = child->GetDescriptor()->FindFieldByName("kind");
    if (node.kind == YamlNode::Kind::kScalar && kind != nullptr && RuleOf(*kind).required()) {
      findings_.Locate(Join(path, "kind"), node.mark);
      ReadScalar(node, *kind, Join(path, "kind"), child);
      return;
    }
    ReadMessage(node, path, child);
  }

  void ReadScalar(const YamlNode& node, const FieldDescriptor& field, const std::string& path,
                  Message* message) {
    if (node.kind == YamlNode::Kind::kScalar && SetScalar(field, node.text, node.quoted, message)) {
      return;
    }
    findings_.AddAt(node.mark, path, FoundText(node), WrongType(node, field));
  }

  std::string WrongType(const YamlNode& node, const FieldDescriptor& field) {
    std::string text = "valid: " + ValidText(field);
    if (node.kind != YamlNode::Kind::kScalar) {
      return text;
    }
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      std::string lower = node.text;
      for (char& c : lower) {
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      }
      if (lower == "yes" || lower == "on" || lower == "true" || lower == "1") {
        return text + "; did you mean true?";
      }
      if (lower == "no" || lower == "off" || lower == "false" || lower == "0") {
        return text + "; did you mean false?";
      }
    } else if (node.quoted && ParseDouble(node.text).has_value()) {
      return text + "; did you mean " + node.text + " without quotes?";
    }
    return text;
  }

  void ReadList(const YamlNode& node, const FieldDescriptor& field, const std::string& path,
                Message* message) {
    if (node.kind == YamlNode::Kind::kNull) {
      return;
    }
    if (node.kind != YamlNode::Kind::kSequence) {
      findings_.AddAt(
          node.mark, path, FoundText(node),
          StrCat("valid: a list of ", IsMessage(field) ? "maps" : ValidText(field),
                 node.kind == YamlNode::Kind::kScalar ? StrCat("; did you mean [", node.text, "]?")
                                                      : std::string()));
      return;
    }
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const YamlNode& item = node.items[i];
      const std::string item_path = StrCat(path, "[", i, "]");
      findings_.Locate(item_path, item.mark);
      if (IsMessage(field)) {
        ReadChild(item, item_path, message->GetReflection()->AddMessage(message, &field));
      } else if (item.kind != YamlNode::Kind::kScalar || !AddScalar(field, item, message)) {
        findings_.AddAt(item.mark, item_path, FoundText(item), "valid: " + ValidText(field));
      }
    }
  }

  static bool AddScalar(const FieldDescriptor& field, const YamlNode& item, Message* message) {
    const Reflection& reflection = *message->GetReflection();
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      reflection.AddString(message, &field, item.text);
      return true;
    }
    OCTAVO_CHECK(field.cpp_type() == FieldDescriptor::CPPTYPE_INT32,
                 "lists of this type are not part of the specification");
    const std::optional<std::int64_t> value = ParseInt64(item.text);
    if (item.quoted || !value.has_value() || *value != static_cast<std::int32_t>(*value)) {
      return false;
    }
    reflection.AddInt32(message, &field, static_cast<std::int32_t>(*value));
    return true;
  }

  void ReadMap(const YamlNode& node, const FieldDescriptor& field, const std::string& path,
               Message* message) {
    if (node.kind == YamlNode::Kind::kNull) {
      return;
    }
    if (node.kind != YamlNode::Kind::kMap) {
      findings_.AddAt(node.mark, path, FoundText(node), "valid: a map of text to text");
      return;
    }
    const FieldDescriptor* key = field.message_type()->map_key();
    const FieldDescriptor* value = field.message_type()->map_value();
    for (const YamlEntry& entry : node.entries) {
      const std::string item_path = Join(path, entry.key);
      findings_.Locate(item_path, entry.value.mark);
      if (entry.value.kind != YamlNode::Kind::kScalar) {
        findings_.AddAt(entry.value.mark, item_path, FoundText(entry.value), "valid: text");
        continue;
      }
      Message* item = message->GetReflection()->AddMessage(message, &field);
      item->GetReflection()->SetString(item, key, entry.key);
      item->GetReflection()->SetString(item, value, entry.value.text);
    }
  }

  SpecFindings& findings_;
};

// Rules -----------------------------------------------------------------------------------------

void CheckNumber(double value, double min, double max, std::string found,
                 const FieldDescriptor& field, const std::string& path, SpecFindings& findings) {
  const v1::FieldRule& rule = RuleOf(field);
  if (!rule.refused().empty()) {
    const std::optional<double> only = ParseDouble(rule.default_value());
    if (value != only.value_or(0) && value != 0) {
      findings.Add(path, std::move(found), rule.refused());
    }
    return;
  }
  if (IsRequired(field, path) && value == 0 && min > 0 && !findings.WasGiven(path)) {
    findings.Add(path, "",
                 "missing; it is required (" + rule.help() + "); valid: " + ValidText(field));
    return;
  }
  // Written so that NaN is out of range.
  if (!(value >= min && value <= max) || !std::isfinite(value)) {
    findings.Add(path, std::move(found), "valid: " + ValidText(field));
  }
}

void CheckText(const std::string& value, const FieldDescriptor& field, const std::string& path,
               SpecFindings& findings) {
  const v1::FieldRule& rule = RuleOf(field);
  if (!rule.refused().empty()) {
    if (!value.empty() && value != rule.default_value()) {
      findings.Add(path, Quoted(value), rule.refused());
    }
    return;
  }
  if (value.empty() && IsRequired(field, path)) {
    findings.Add(path, findings.WasGiven(path) ? "\"\"" : "",
                 findings.WasGiven(path)
                     ? "it is required; valid: " + ValidText(field) +
                           (rule.one_of().empty() ? " that is not empty" : "")
                     : "missing; it is required (" + rule.help() + ")" +
                           (rule.one_of().empty() ? "" : "; valid: " + ValidText(field)));
    return;
  }
  if (value.empty() || rule.one_of().empty()) {
    return;
  }
  const std::vector<std::string> words = OneOf(rule);
  for (const std::string& word : words) {
    if (word == value) {
      return;
    }
  }
  const bool nvfp4 = StartsWith(value, "nvfp4") || StartsWith(value, "NVFP4");
  findings.Add(path, Quoted(value),
               (nvfp4 ? "NVFP4 is not supported; valid: " : "valid: ") + StrJoin(words, ", ") +
                   Suggestion(value, words));
}

void CheckScalar(const Message& message, const FieldDescriptor& field, const std::string& path,
                 SpecFindings& findings) {
  const Reflection& reflection = *message.GetReflection();
  const v1::FieldRule& rule = RuleOf(field);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double min = rule.has_min() ? rule.min() : -kInfinity;
  const double max = rule.has_max() ? rule.max() : kInfinity;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const std::int32_t value = reflection.GetInt32(message, &field);
      CheckNumber(value, min, max, std::to_string(value), field, path, findings);
      break;
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const std::int64_t value = reflection.GetInt64(message, &field);
      CheckNumber(static_cast<double>(value), min, max, std::to_string(value), field, path,
                  findings);
      break;
    }
    case FieldDescriptor::CPPTYPE_FLOAT: {
      // Bounds as floats too: 1e-12 written in a file is below the double 1e-12 once it is a float.
      const float value = reflection.GetFloat(message, &field);
      CheckNumber(value, static_cast<float>(min), static_cast<float>(max), Number(value), field,
                  path, findings);
      break;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const double value = reflection.GetDouble(message, &field);
      CheckNumber(value, min, max, Number(value), field, path, findings);
      break;
    }
    case FieldDescriptor::CPPTYPE_STRING:
      CheckText(reflection.GetString(message, &field), field, path, findings);
      break;
    default:
      break;
  }
}

void CheckMessage(const Message& message, const std::string& path, SpecFindings& findings) {
  const Descriptor& type = *message.GetDescriptor();
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const std::string field_path = Join(path, field.name());
    if (field.is_map()) {
      continue;
    }
    if (field.is_repeated()) {
      for (int j = 0; j < reflection.FieldSize(message, &field); ++j) {
        const std::string item_path = StrCat(field_path, "[", j, "]");
        if (IsMessage(field)) {
          CheckMessage(reflection.GetRepeatedMessage(message, &field, j), item_path, findings);
        } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING &&
                   findings.IsSound(item_path)) {
          CheckText(reflection.GetRepeatedString(message, &field, j), field, item_path, findings);
        }
      }
      continue;
    }
    if (IsMessage(field)) {
      if (reflection.HasField(message, &field)) {
        CheckMessage(reflection.GetMessage(message, &field), field_path, findings);
      } else if (IsRequired(field, field_path) && findings.IsSound(field_path)) {
        findings.Add(
            field_path, "",
            "missing; it is required (" + RuleOf(field).help() + "); valid: " + TypeText(field));
      }
      continue;
    }
    // A sparse recipe is valid: zero then means the kind's default.
    const bool sparse = IsRecipe(type) && field.name() != "kind" &&
                        !reflection.HasField(message, &field) && !findings.WasGiven(field_path);
    if (findings.IsSound(field_path) && !sparse) {
      CheckScalar(message, field, field_path, findings);
    }
  }
}

void FillMessage(Message* message, const std::string& path,
                 const std::function<bool(const std::string&)>& was_given) {
  const Descriptor& type = *message->GetDescriptor();
  const Reflection& reflection = *message->GetReflection();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const std::string field_path = Join(path, field.name());
    const v1::FieldRule& rule = RuleOf(field);
    if (field.is_map()) {
      continue;
    }
    if (field.is_repeated()) {
      for (int j = 0; IsMessage(field) && j < reflection.FieldSize(*message, &field); ++j) {
        FillMessage(reflection.MutableRepeatedMessage(message, &field, j),
                    StrCat(field_path, "[", j, "]"), was_given);
      }
      continue;
    }
    if (IsMessage(field)) {
      // Recipes have defaults by kind (proto/precision), so their absence stays visible.
      if (!IsRecipe(*field.message_type()) &&
          (reflection.HasField(*message, &field) || !rule.required())) {
        FillMessage(reflection.MutableMessage(message, &field), field_path, was_given);
      }
      continue;
    }
    if (!rule.default_value().empty() && !reflection.HasField(*message, &field) &&
        !was_given(field_path)) {
      OCTAVO_CHECK(SetScalar(field, rule.default_value(), false, message),
                   "the default of %s is not of its type", field.full_name().c_str());
    }
  }
}

}  // namespace

const v1::FieldRule& RuleOf(const FieldDescriptor& field) {
  return field.options().GetExtension(v1::rule);
}

void ReadYaml(const YamlNode& node, Message* message, SpecFindings& findings) {
  YamlReader(findings).ReadMessage(node, "", message);
}

void FillDefaults(Message* message, const std::function<bool(const std::string&)>& was_given) {
  FillMessage(message, "", was_given);
}

void CheckRules(const Message& message, SpecFindings& findings) {
  CheckMessage(message, "", findings);
}

std::string ValidText(const FieldDescriptor& field) {
  const v1::FieldRule& rule = RuleOf(field);
  if (rule.one_of_size() > 0) {
    return StrJoin(OneOf(rule), ", ");
  }
  const std::string type = TypeText(field);
  if (rule.has_min() && rule.has_max()) {
    return StrCat(type, ", ", Number(rule.min()), " to ", Number(rule.max()));
  }
  if (rule.has_min()) {
    return StrCat(type, ", at least ", Number(rule.min()));
  }
  return type;
}

bool SetScalar(const FieldDescriptor& field, const std::string& text, bool quoted,
               Message* message) {
  const Reflection& reflection = *message->GetReflection();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    reflection.SetString(message, &field, text);
    return true;
  }
  if (quoted) {
    return false;
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const std::optional<std::int64_t> value = ParseInt64(text);
      if (!value.has_value() || *value != static_cast<std::int32_t>(*value)) {
        return false;
      }
      reflection.SetInt32(message, &field, static_cast<std::int32_t>(*value));
      return true;
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const std::optional<std::int64_t> value = ParseInt64(text);
      if (!value.has_value()) {
        return false;
      }
      reflection.SetInt64(message, &field, *value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      std::uint64_t value = 0;
      const char* end = text.data() + text.size();
      const auto [rest, error] = std::from_chars(text.data(), end, value);
      if (text.empty() || error != std::errc() || rest != end) {
        return false;
      }
      reflection.SetUInt64(message, &field, value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_FLOAT: {
      const std::optional<double> value = ParseDouble(text);
      if (!value.has_value() || !std::isfinite(static_cast<float>(*value))) {
        return false;
      }
      reflection.SetFloat(message, &field, static_cast<float>(*value));
      return true;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const std::optional<double> value = ParseDouble(text);
      if (!value.has_value()) {
        return false;
      }
      reflection.SetDouble(message, &field, *value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      if (text != "true" && text != "false") {
        return false;
      }
      reflection.SetBool(message, &field, text == "true");
      return true;
    default:
      return false;
  }
}

}  // namespace octavo
