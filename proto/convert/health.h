// FP8 health: telemetry on the wire → values that the policy judges, and the job's policy settings.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "octavo/internal/v1/telemetry.pb.h"
#include "octavo/v1/job.pb.h"
#include "proto/precision/health.h"

namespace octavo {

// "layer 3 fc1 grad", the spelling of StepReport.nonfinite_op; and back (nullopt: another text).
struct SiteAndTensor {
  OpSite site;
  Tensor tensor = Tensor::kInput;
};
std::string FormatSite(const SiteAndTensor& site);
std::optional<SiteAndTensor> ParseSite(const std::string& text);

// Tensors with an unknown op or tensor number (a newer peer) are left out.
HealthSnapshot HealthFromWire(const internal::v1::TelemetrySnapshot& wire);
StepHealth StepHealthFromWire(const internal::v1::StepReport& wire);

// The policy of a validated spec with defaults applied. INVALID_ARGUMENT: unknown recipe names.
absl::StatusOr<PolicyConfig> PolicyConfigFromSpec(const v1::JobSpec& spec,
                                                  const DeviceAbility& device);

}  // namespace octavo
