// job.yaml → octavo.v1.JobSpec: defaults filled in, every mistake found at once, each with its
// place.
//
//   ParsedJobSpec parsed = ParseJobSpec(text, "job.yaml");
//   if (!parsed.ok()) return parsed.status();       // INVALID_ARGUMENT with an ErrorDetail
//   PrecisionPlan plan = BuildPlanFromSpec(parsed.spec);
//
// Client and server run this same code on the same bytes. Three layers: the YAML tree
// (yaml_source.h), the field rules of the .proto (field_walker.h), and what only several fields
// together can say (semantic_rules.h). A stored or received spec is checked again by
// ValidateJobSpec.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "octavo/v1/job.pb.h"
#include "proto/precision/plan.h"
#include "proto/spec/violation.h"

namespace octavo {

struct ParsedJobSpec {
  v1::JobSpec spec;  // complete when ok(); otherwise as far as it could be read
  std::string file_name;
  std::vector<SpecViolation> violations;  // in the order of the file

  bool ok() const { return violations.empty(); }
  // One violation a line, as SpecViolation::Text.
  std::string Text() const;
  // OK, or INVALID_ARGUMENT "job.yaml: 2 errors\n…" with reason SPEC_INVALID and the violations.
  absl::Status status() const;
};

// `file_name` is for messages only.
ParsedJobSpec ParseJobSpec(std::string_view yaml, const std::string& file_name);

// A policy alone, as it stands under precision.policy: fields, defaults and their rules.
// INVALID_ARGUMENT as ParsedJobSpec::status.
absl::StatusOr<v1::PolicySpec> ParsePolicySpec(std::string_view yaml, const std::string& file_name);

// All violations of a complete spec (defaults filled in), without places.
std::vector<SpecViolation> ValidateJobSpec(const v1::JobSpec& spec);
absl::Status ToStatus(const std::vector<SpecViolation>& violations, const std::string& file_name);

// The same checks for overrides that an operator wants on top of a job (SetPrecision); fields are
// named "precision.overrides[i]…", and dimensions as in the spec.
std::vector<SpecViolation> ValidateOverrides(
    const v1::JobSpec& spec,
    const google::protobuf::RepeatedPtrField<v1::PrecisionOverride>& overrides);

// For specs built in code: every zero or empty field gets its default, the derived ones too
// (kv_heads, head_dim, expert_parallel, microbatch, …). A parsed spec has them already.
void ApplyDefaults(v1::JobSpec* spec);

// Version 1 of the job's plan. REQUIRES: ValidateJobSpec(spec) is empty. Recipe auto starts in
// bf16.
PrecisionPlan BuildPlanFromSpec(const v1::JobSpec& spec);

// Whether the model has that op in that layer (dense layers have no experts, MoE layers without
// shared experts no MLP). A plan names a recipe for every (layer, op), these included.
bool LayerHasOp(const v1::ModelSpec& model, std::int32_t layer, Op op);

// The YAML reference: every field with type, default, bounds and help, as a commented YAML text.
std::string SpecReference();

}  // namespace octavo
