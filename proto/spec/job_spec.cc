#include "proto/spec/job_spec.h"

#include <algorithm>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/error_detail.h"
#include "proto/spec/field_walker.h"
#include "proto/spec/semantic_rules.h"

namespace octavo {
namespace {

void CheckAll(const v1::JobSpec& spec, SpecFindings& findings) {
  CheckRules(spec, findings);
  CheckIdentity(spec, findings);
  CheckModel(spec, findings);
  CheckParallel(spec, findings);
  CheckTraining(spec, findings);
  CheckPrecision(spec, findings);
}

void SortByPlace(std::vector<SpecViolation>& violations) {
  std::stable_sort(
      violations.begin(), violations.end(), [](const SpecViolation& a, const SpecViolation& b) {
        return std::pair(a.mark.line, a.mark.column) < std::pair(b.mark.line, b.mark.column);
      });
}

}  // namespace

std::string ParsedJobSpec::Text() const {
  std::string text;
  for (const SpecViolation& violation : violations) {
    StrAppend(&text, violation.Text(file_name), "\n");
  }
  return text;
}

absl::Status ParsedJobSpec::status() const { return ToStatus(violations, file_name); }

absl::Status ToStatus(const std::vector<SpecViolation>& violations, const std::string& file_name) {
  if (violations.empty()) {
    return absl::OkStatus();
  }
  std::string text = StrCat(file_name.empty() ? "the job's specification" : file_name, ": ",
                            violations.size(), violations.size() == 1 ? " error" : " errors");
  std::vector<v1::FieldViolation> details;
  for (const SpecViolation& violation : violations) {
    StrAppend(&text, "\n", violation.Text(file_name));
    v1::FieldViolation detail;
    detail.set_field(violation.field);
    detail.set_found(violation.found);
    detail.set_message(violation.message);
    detail.set_line(violation.mark.line);
    detail.set_column(violation.mark.column);
    details.push_back(std::move(detail));
  }
  return WithDetail(InvalidArgumentError(text), "SPEC_INVALID", details);
}

ParsedJobSpec ParseJobSpec(std::string_view yaml, const std::string& file_name) {
  ParsedJobSpec parsed;
  parsed.file_name = file_name;
  SpecFindings findings;
  const YamlDocument document = ParseYaml(yaml);
  for (const YamlProblem& problem : document.problems) {
    findings.AddAt(problem.mark, "", "", problem.message);
  }
  // Of half a tree nothing else is worth saying; a duplicate key spoils only itself.
  if (document.is_complete && document.root.kind == YamlNode::Kind::kMap) {
    findings.Locate("", document.root.mark);
    ReadYaml(document.root, &parsed.spec, findings);
    FillDefaults(&parsed.spec,
                 [&findings](const std::string& field) { return findings.WasGiven(field); });
    FillDerivedDefaults(&parsed.spec, findings);
    CheckAll(parsed.spec, findings);
  } else if (document.problems.empty()) {
    findings.AddAt(document.root.mark, "", "no map at the top level",
                   "valid: keys such as name, model, train, data, checkpoint");
  }
  SortByPlace(findings.violations());
  parsed.violations = std::move(findings.violations());
  return parsed;
}

absl::StatusOr<v1::PolicySpec> ParsePolicySpec(std::string_view yaml,
                                               const std::string& file_name) {
  v1::PolicySpec policy;
  SpecFindings findings;
  const YamlDocument document = ParseYaml(yaml);
  for (const YamlProblem& problem : document.problems) {
    findings.AddAt(problem.mark, "", "", problem.message);
  }
  if (document.is_complete && document.root.kind == YamlNode::Kind::kMap) {
    findings.Locate("", document.root.mark);
    ReadYaml(document.root, &policy, findings);
    FillDefaults(&policy,
                 [&findings](const std::string& field) { return findings.WasGiven(field); });
    CheckRules(policy, findings);
  } else if (document.problems.empty()) {
    findings.AddAt(document.root.mark, "", "no map at the top level",
                   "valid: keys of precision.policy, such as flushed_ratio, hold_steps, ladder");
  }
  SortByPlace(findings.violations());
  RETURN_IF_ERROR(ToStatus(findings.violations(), file_name));
  return policy;
}

std::vector<SpecViolation> ValidateJobSpec(const v1::JobSpec& spec) {
  SpecFindings findings;
  CheckAll(spec, findings);
  return std::move(findings.violations());
}

std::vector<SpecViolation> ValidateOverrides(
    const v1::JobSpec& spec,
    const google::protobuf::RepeatedPtrField<v1::PrecisionOverride>& overrides) {
  v1::JobSpec changed = spec;
  *changed.mutable_precision()->mutable_overrides() = overrides;
  return ValidateJobSpec(changed);
}

void ApplyDefaults(v1::JobSpec* spec) {
  FillDefaults(spec, [](const std::string&) { return false; });
  FillDerivedDefaults(spec, SpecFindings());
}

}  // namespace octavo
