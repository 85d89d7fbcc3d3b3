// JSON for scripts: stable key order, numbers as numbers.
//
// protobuf's own JSON prints 64-bit integers as text ("step": "12") and leaves zeros out, which
// breaks `jq '.step > 10'`. Here every scalar field of a message appears, in the order of the
// .proto file; messages that are unset and empty `optional` fields are left out; enumerations are
// names, timestamps RFC 3339, map keys sorted, a number that is not finite is null. A fixed64 is a
// hash and printed as hexadecimal text (no JSON reader keeps 64 bits).
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <string_view>
#include <vector>

namespace octavo {

// Builds one JSON value; the caller opens and closes in balance (checked).
class JsonWriter {
 public:
  // indent 0: on one line.
  explicit JsonWriter(int indent = 2) : indent_(indent) {}

  JsonWriter& BeginObject();
  JsonWriter& EndObject();
  JsonWriter& BeginArray();
  JsonWriter& EndArray();
  JsonWriter& Key(std::string_view key);
  JsonWriter& String(std::string_view value);
  JsonWriter& Int(std::int64_t value);
  JsonWriter& Uint(std::uint64_t value);
  // Shortest text that reads back as the same number.
  JsonWriter& Double(double value);
  JsonWriter& Float(float value);
  JsonWriter& Bool(bool value);
  JsonWriter& Null();
  JsonWriter& Proto(const google::protobuf::Message& message);

  // REQUIRES: everything is closed.
  std::string Take();

 private:
  struct Level {
    bool is_array = false;
    bool empty = true;
  };
  void BeforeValue();
  void NewLine();
  void Scalar(const google::protobuf::Message& message,
              const google::protobuf::FieldDescriptor& field, int index);
  void Field(const google::protobuf::Message& message,
             const google::protobuf::FieldDescriptor& field);

  const int indent_;
  bool after_key_ = false;
  std::vector<Level> levels_;
  std::string out_;
};

// A message as JSON text with a newline at the end.
std::string ToJson(const google::protobuf::Message& message);
// The same on one line (for streams of values).
std::string ToJsonLine(const google::protobuf::Message& message);

}  // namespace octavo
