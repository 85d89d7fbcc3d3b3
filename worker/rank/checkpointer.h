// Checkpoints of a running job, seen from one rank: when to save, how all ranks come to publish
// one, and how an attempt begins from the newest good one.
//
//   ASSIGN_OR_RETURN(StartPoint start, checkpointer.Begin(model, interrupted));
//   per step:  control.save_busy = checkpointer.busy(); … reduce …
//              RETURN_IF_ERROR(checkpointer.Poll(all.save_busy));
//              if (due) RETURN_IF_ERROR(checkpointer.Save(model, state, /*wait=*/leaving));
//
// A save copies this rank's share to host memory and writes it in the background (writer.h). When
// the control vector shows that no rank is writing any more, all ranks exchange sizes and checksums
// and rank 0 publishes. A disk that is full or broken costs that checkpoint, is reported, and
// training goes on; being fenced by a newer attempt ends this one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/store.h"
#include "worker/checkpoint/writer.h"
#include "worker/model/transformer.h"
#include "worker/rank/host_collectives.h"
#include "worker/rank/training_config.h"
#include "worker/rank/training_host.h"

namespace octavo {

struct StartPoint {
  TrainState state;
  std::string path;  // what was loaded, also of another job (start_from); empty: fresh weights
  std::string note;  // what was passed over, and why
  bool interrupted = false;
};

// Not thread-safe. All methods but busy() are called by all ranks together.
class Checkpointer {
 public:
  struct Options {
    const TrainingConfig& config;
    FileSystem& fs;
    const Backend& backend;
    HostCollectives& world;
    TrainingHost& host;
    std::string blas_core;
    // Of config.data.path and config.data.validation_path, as this rank finds them.
    DatasetIdentity dataset = {};
    std::optional<DatasetIdentity> validation = {};
  };
  explicit Checkpointer(const Options& options);

  // Loads the newest good checkpoint into the model, or initialises it; then writes this attempt's
  // marker. CHECKPOINT_UNUSABLE when there are checkpoints and all are damaged, the newest is of
  // another model, or the controller knows of one and there is none: never a silent fresh start.
  absl::StatusOr<StartPoint> Begin(Transformer& model, const std::function<bool()>& interrupted);

  bool busy() const { return writer_.active() && !writer_.done(); }
  bool saving() const { return writer_.active(); }
  // Publishes a save that all ranks have finished. Only fatal errors are returned.
  absl::Status Poll(bool any_busy);
  // Starts a save of the state after `state.step` steps; with `wait`, publishes it before it
  // returns and then a failed save is an error. The save of the job's last step is tried again for
  // a while when the disk is full (CheckpointConfig::last_save_tries). A step that is already saved
  // is not saved again.
  absl::Status Save(Transformer& model, const TrainState& state, bool wait);
  // Publishes what is in flight.
  absl::Status Finish();

  // Seconds that training stood still for copies and publishing, since the last call.
  double TakeStallSeconds();

 private:
  // `own`: of this job, whose dataset must be the same; else another dataset is a warning.
  absl::Status LoadCandidate(const std::string& path, bool own, Transformer& model,
                             const std::function<bool()>& interrupted, TrainState* state);
  // Of what the specification names, at the start: permanent where another attempt cannot help.
  absl::Status InputError(const absl::Status& status) const;
  // Of another job: its whole state, or its weights alone.
  absl::Status LoadStartState(const std::string& path, Transformer& model,
                              const std::function<bool()>& interrupted, TrainState* state);
  absl::Status LoadStartWeights(const std::string& path, Transformer& model,
                                const std::function<bool()>& interrupted);
  // FAILED_PRECONDITION when the checkpoint says that it was trained or validated on other data.
  absl::Status CompareDatasets(const Manifest& manifest) const;
  void StartWriting(Transformer& model, const TrainState& state);
  // Saves the last step again while the disk is full, until it succeeds, somebody wants the ranks
  // to leave or the tries are used up. Errors: those of the collectives.
  absl::Status RetryLastSave(Transformer& model, const TrainState& state);
  // Time for somebody to make room; true when a rank is wanted elsewhere.
  absl::StatusOr<bool> WaitForRoom(std::int64_t step);
  absl::Status PublishWritten();
  // For the report of a failed save: how full the disk is and what happens next.
  std::string FreeSpace(const absl::Status& saved) const;

  const Options options_;
  const bool enabled_;
  const ShardLayout layout_;
  CheckpointStore store_;
  ShardWriter writer_;
  Manifest pending_;              // of the save in flight
  std::int64_t saved_step_ = -1;  // newest published
  absl::Status last_save_;        // of the newest save, the same on all ranks
  bool report_failure_ = true;    // one event for a row of tries, not one each
  double stall_seconds_ = 0;
};

}  // namespace octavo
