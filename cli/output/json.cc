#include "cli/output/json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/timestamp.pb.h>

#include <charconv>
#include <cmath>
#include <map>

#include "base/check.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::string Escaped(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (byte < 0x20 || byte == 0x7F) {
          char escape[8];
          std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(byte));
          out += escape;
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

template <class T>
std::string Shortest(T value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  OCTAVO_CHECK(error == std::errc());
  return std::string(text, end);
}

}  // namespace

void JsonWriter::NewLine() {
  if (indent_ > 0) {
    out_ += '\n';
    out_.append(levels_.size() * static_cast<std::size_t>(indent_), ' ');
  }
}

void JsonWriter::BeforeValue() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (levels_.empty()) {
    return;
  }
  OCTAVO_CHECK(levels_.back().is_array, "a value of an object needs a key");
  if (!levels_.back().empty) {
    out_ += indent_ > 0 ? "," : ", ";
  }
  levels_.back().empty = false;
  NewLine();
}

JsonWriter& JsonWriter::BeginObject() {
  BeforeValue();
  out_ += '{';
  levels_.push_back({.is_array = false});
  return *this;
}

JsonWriter& JsonWriter::BeginArray() {
  BeforeValue();
  out_ += '[';
  levels_.push_back({.is_array = true});
  return *this;
}

JsonWriter& JsonWriter::EndObject() {
  OCTAVO_CHECK(!levels_.empty() && !levels_.back().is_array && !after_key_);
  const bool empty = levels_.back().empty;
  levels_.pop_back();
  if (!empty) {
    NewLine();
  }
  out_ += '}';
  return *this;
}

JsonWriter& JsonWriter::EndArray() {
  OCTAVO_CHECK(!levels_.empty() && levels_.back().is_array);
  const bool empty = levels_.back().empty;
  levels_.pop_back();
  if (!empty) {
    NewLine();
  }
  out_ += ']';
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  OCTAVO_CHECK(!levels_.empty() && !levels_.back().is_array && !after_key_);
  if (!levels_.back().empty) {
    out_ += indent_ > 0 ? "," : ", ";
  }
  levels_.back().empty = false;
  NewLine();
  out_ += Escaped(key);
  out_ += ": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::String(std::string_view value) {
  BeforeValue();
  out_ += Escaped(ValidUtf8(value));
  return *this;
}
JsonWriter& JsonWriter::Int(std::int64_t value) {
  BeforeValue();
  out_ += std::to_string(value);
  return *this;
}
JsonWriter& JsonWriter::Uint(std::uint64_t value) {
  BeforeValue();
  out_ += std::to_string(value);
  return *this;
}
JsonWriter& JsonWriter::Double(double value) {
  BeforeValue();
  out_ += std::isfinite(value) ? Shortest(value) : "null";
  return *this;
}
JsonWriter& JsonWriter::Float(float value) {
  BeforeValue();
  out_ += std::isfinite(value) ? Shortest(value) : "null";
  return *this;
}
JsonWriter& JsonWriter::Bool(bool value) {
  BeforeValue();
  out_ += value ? "true" : "false";
  return *this;
}
JsonWriter& JsonWriter::Null() {
  BeforeValue();
  out_ += "null";
  return *this;
}

JsonWriter& JsonWriter::Proto(const Message& message) {
  if (message.GetDescriptor()->full_name() == "google.protobuf.Timestamp") {
    return String(Rfc3339(static_cast<const google::protobuf::Timestamp&>(message)));
  }
  BeginObject();
  const auto& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    Field(message, *type.field(i));
  }
  return EndObject();
}

void JsonWriter::Field(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  if (field.is_map()) {
    // Only maps of text to text are part of the contract.
    std::map<std::string, std::string> sorted;
    for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
      const Message& entry = reflection.GetRepeatedMessage(message, &field, i);
      sorted[entry.GetReflection()->GetString(entry, field.message_type()->map_key())] =
          entry.GetReflection()->GetString(entry, field.message_type()->map_value());
    }
    Key(field.name()).BeginObject();
    for (const auto& [key, value] : sorted) {
      Key(key).String(value);
    }
    EndObject();
    return;
  }
  if (field.is_repeated()) {
    Key(field.name()).BeginArray();
    for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        Proto(reflection.GetRepeatedMessage(message, &field, i));
      } else {
        Scalar(message, field, i);
      }
    }
    EndArray();
    return;
  }
  if (field.has_presence() && !reflection.HasField(message, &field)) {
    return;
  }
  Key(field.name());
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    Proto(reflection.GetMessage(message, &field));
  } else {
    Scalar(message, field, -1);
  }
}

void JsonWriter::Scalar(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& r = *message.GetReflection();
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      Int(one ? r.GetInt32(message, &field) : r.GetRepeatedInt32(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_INT64:
      Int(one ? r.GetInt64(message, &field) : r.GetRepeatedInt64(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_UINT32:
      Uint(one ? r.GetUInt32(message, &field) : r.GetRepeatedUInt32(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_UINT64: {
      const std::uint64_t value =
          one ? r.GetUInt64(message, &field) : r.GetRepeatedUInt64(message, &field, index);
      if (field.type() == FieldDescriptor::TYPE_FIXED64) {
        String(HexHash(value));
      } else {
        Uint(value);
      }
      return;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      Double(one ? r.GetDouble(message, &field) : r.GetRepeatedDouble(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_FLOAT:
      Float(one ? r.GetFloat(message, &field) : r.GetRepeatedFloat(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      Bool(one ? r.GetBool(message, &field) : r.GetRepeatedBool(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int number =
          one ? r.GetEnumValue(message, &field) : r.GetRepeatedEnumValue(message, &field, index);
      const auto* value = field.enum_type()->FindValueByNumber(number);
      // A number that only a newer controller knows still reads as text.
      String(value != nullptr ? value->name() : "UNKNOWN_" + std::to_string(number));
      return;
    }
    case FieldDescriptor::CPPTYPE_STRING:
      String(one ? r.GetString(message, &field) : r.GetRepeatedString(message, &field, index));
      return;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      Proto(one ? r.GetMessage(message, &field) : r.GetRepeatedMessage(message, &field, index));
      return;
  }
}

std::string JsonWriter::Take() {
  OCTAVO_CHECK(levels_.empty() && !after_key_, "a JSON object or array was left open");
  return std::move(out_);
}

std::string ToJson(const Message& message) { return JsonWriter().Proto(message).Take() + "\n"; }
std::string ToJsonLine(const Message& message) {
  return JsonWriter(0).Proto(message).Take() + "\n";
}

}  // namespace octavo
