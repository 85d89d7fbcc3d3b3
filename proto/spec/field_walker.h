// The one reader of job fields: walks a message's descriptor and the (octavo.v1.rule) option of
// every field. The .proto file is the only schema; nothing here knows a field by name.
//
//   ReadYaml(node, &spec, findings)     YAML → message: unknown keys (with the nearest known one),
//                                       wrong types, refused features; records where values stood
//   FillDefaults(&spec, findings)       absent scalars and empty strings get rule.default_value,
//                                       absent messages that are not required appear
//   CheckRules(spec, findings)          required, min, max, one_of, refused on a message from
//   anywhere
//
// A field that a violation names is left out of later checks, so that one mistake gives one
// message.
#pragma once

#include <google/protobuf/message.h>

#include <functional>
#include <string>

#include "octavo/v1/field_rules.pb.h"
#include "proto/spec/violation.h"
#include "proto/spec/yaml_source.h"

namespace octavo {

const v1::FieldRule& RuleOf(const google::protobuf::FieldDescriptor& field);

void ReadYaml(const YamlNode& node, google::protobuf::Message* message, SpecFindings& findings);

// `was_given` answers for a field path whether its value was written by the author; a message that
// did not come from a file passes one that answers false, and zero then means absent.
void FillDefaults(google::protobuf::Message* message,
                  const std::function<bool(const std::string&)>& was_given);

void CheckRules(const google::protobuf::Message& message, SpecFindings& findings);

// "1 to 1024", "at least 1", "softmax, sigmoid", "an integer": what a rule allows, for messages and
// the reference.
std::string ValidText(const google::protobuf::FieldDescriptor& field);

// Sets a scalar field from text (a default, or YAML); false when the text is not of its type.
bool SetScalar(const google::protobuf::FieldDescriptor& field, const std::string& text, bool quoted,
               google::protobuf::Message* message);

}  // namespace octavo
