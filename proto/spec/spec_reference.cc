// The YAML reference, printed from the same rules that read and check a spec.
#include <google/protobuf/descriptor.h>

#include "base/str.h"
#include "proto/spec/field_walker.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr std::size_t kCommentColumn = 36;

std::string Facts(const FieldDescriptor& field) {
  const v1::FieldRule& rule = RuleOf(field);
  std::vector<std::string> facts;
  if (!rule.refused().empty()) {
    return "REFUSED: " + rule.refused();
  }
  if (rule.required()) {
    facts.push_back("required");
  }
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
    facts.push_back((field.is_repeated() ? "list of " : "") + ValidText(field));
  } else if (field.is_map()) {
    facts.push_back("map of text to text");
  } else if (field.is_repeated()) {
    facts.push_back("list");
  }
  if (!rule.default_value().empty()) {
    facts.push_back("default " + rule.default_value());
  }
  return rule.help() + (facts.empty() ? "" : " [" + StrJoin(facts, "; ") + "]");
}

void Print(const Descriptor& type, int depth, std::string* out) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const bool is_list = field.is_repeated() && !field.is_map();
    std::string line(static_cast<std::size_t>(depth) * 2, ' ');
    line += field.name() + ":";
    line += std::string(line.size() < kCommentColumn ? kCommentColumn - line.size() : 1, ' ');
    StrAppend(out, line, "# ", Facts(field), "\n");
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !field.is_map()) {
      Print(*field.message_type(), depth + (is_list ? 2 : 1), out);
    }
  }
}

}  // namespace

std::string SpecReference() {
  std::string out =
      "# The job file of octavo submit. Keys that are left out get their defaults; unknown and\n"
      "# duplicate keys are errors. A recipe may be written as its name alone (recipe: bf16).\n";
  Print(*v1::JobSpec::descriptor(), 0, &out);
  return out;
}

}  // namespace octavo
