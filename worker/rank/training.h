// Training of one rank from start to last step, without knowing where commands come from or reports
// go: the rank process, benches and tests with ranks as threads all call RunTraining.
//
//   TrainingOutcome outcome = RunTraining({.config = config, .plan = plan, .backend = backend,
//                                          .comms = comms, .host = &host, .fs = &fs});
//
// Order: agree on the plan, build the model, load or initialise, step (trainer.h), save, report.
// All ranks of a job call it with equal configurations but for their rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "base/file.h"
#include "kernels/ops.h"
#include "proto/jobs/failure_class.h"
#include "proto/precision/plan.h"
#include "worker/model/transformer.h"
#include "worker/rank/training_config.h"
#include "worker/rank/training_host.h"

namespace octavo {

// Called by tests to break things at a chosen instant; empty in production.
struct TrainingHooks {
  // The operations to train with, given the backend that the rank opened.
  std::function<const Ops*(const Backend& backend)> ops;
  // Before the first microbatch of a pass.
  std::function<void(std::int64_t step, int pass, Transformer& model)> before_pass;
  // After the microbatches of a pass, before FinishPass. `pass` is 0, or 1 for a retry.
  std::function<void(std::int64_t step, int pass, Transformer& model)> before_finish_pass;
};

class OpProfiler;

struct TrainingSetup {
  TrainingConfig config;
  PrecisionPlan plan;  // newest this rank was given; rank 0's is the one all begin with
  Backend backend;     // not owned
  ModelComms comms;    // not owned; groups may share one communicator
  const double* all_to_all_seconds = nullptr;  // spent in all-to-alls so far, where it is measured
  TrainingHost* host = nullptr;
  FileSystem* fs = nullptr;
  std::string blas_core;  // recorded in checkpoints
  TrainingHooks hooks;
  OpProfiler* profiler = nullptr;  // RunTraining's own
};

struct TrainingOutcome {
  FailureClass failure = FailureClass::kNone;
  std::string message;
  std::int64_t step = 0;  // steps completed
  bool stopped = false;   // by a stop wish
  bool suspended = false;
  double last_loss = 0;
  double validation_loss = 0;  // newest; NaN when none ran
  bool ok() const { return failure == FailureClass::kNone; }
};

TrainingOutcome RunTraining(const TrainingSetup& setup);

}  // namespace octavo
