#include "worker/rank/checkpointer.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/checkpoint/reader.h"
#include "worker/rank/failure.h"
#include "worker/rank/state_io.h"

namespace octavo {
namespace {

using Steady = std::chrono::steady_clock;

double SecondsSince(Steady::time_point begin) {
  return std::chrono::duration<double>(Steady::now() - begin).count();
}

// What a rank tells the others about its shard.
struct ShardRecord {
  std::int64_t bytes;
  std::uint32_t crc32c;
  std::int32_t ok;
};

// Marked, so that a broken disk is never taken for a broken collective.
absl::Status DiskError(const absl::Status& status) {
  return WithFailure(status, FailureClass::kCheckpointUnusable);
}

}  // namespace

Checkpointer::Checkpointer(const Options& options)
    : options_(options),
      enabled_(!options.config.checkpoint.root.empty()),
      layout_{.world_size = options.config.run.world_size,
              .expert_parallel = options.config.run.expert_parallel,
              .rank = options.config.run.rank},
      store_(options.fs, options.config.checkpoint.root, options.config.job_uid,
             options.config.attempt),
      writer_(options.fs) {}

absl::StatusOr<StartPoint> Checkpointer::Begin(Transformer& model,
                                               const std::function<bool()>& interrupted) {
  StartPoint start;
  start.state.seed = options_.config.run.seed;
  if (!enabled_) {
    model.InitializeParameters();
    return start;
  }
  const bool leader = options_.world.rank() == 0;
  std::vector<CheckpointInfo> candidates;
  absl::Status scanned;
  if (leader) {
    absl::StatusOr<std::vector<CheckpointInfo>> found = store_.Candidates();
    scanned = found.status();
    candidates = found.ok() ? *std::move(found) : std::vector<CheckpointInfo>{};
  }
  RETURN_IF_ERROR(Annotate(options_.world.Agree(InputError(scanned)), "looking for checkpoints"));

  // Rank 0 names one candidate after the other; all try it together.
  std::size_t next = 0;
  int damaged = 0;
  while (true) {
    std::string path;
    while (leader && next < candidates.size() && path.empty()) {
      const CheckpointInfo& info = candidates[next++];
      if (info.usable) {
        path = info.path;
      } else {
        StrAppend(&start.note, start.note.empty() ? "" : "; ", info.path, ": ", info.problem);
        damaged += info.fenced ? 0 : 1;
      }
    }
    RETURN_IF_ERROR(options_.world.Broadcast(&path, 0));
    if (path.empty()) {
      break;
    }
    const absl::Status loaded = options_.world.Agree(
        DiskError(LoadCandidate(path, /*own=*/true, model, interrupted, &start.state)));
    if (loaded.ok()) {
      start.path = path;
      break;
    }
    if (loaded.code() == absl::StatusCode::kCancelled) {
      start.interrupted = true;
      return start;
    }
    if (loaded.code() != absl::StatusCode::kDataLoss &&
        loaded.code() != absl::StatusCode::kNotFound) {
      return Annotate(loaded, StrCat("loading ", path));
    }
    LogWarning("checkpoint_passed_over", {{"path", path}, {"problem", loaded}});
    StrAppend(&start.note, start.note.empty() ? "" : "; ", path, ": ", Message(loaded));
    ++damaged;
  }
  if (start.path.empty()) {
    start.state = TrainState{.seed = options_.config.run.seed};
    const CheckpointConfig& known = options_.config.checkpoint;
    absl::Status unusable;
    if (damaged > 0) {
      unusable = DataLossError(StrCat("no usable checkpoint in ", store_.root(), ": ", start.note,
                                      ". Repair or remove them to start from fresh weights"));
    } else if (known.known_step > 0) {
      unusable = DataLossError(StrCat("the controller knows of a checkpoint of step ",
                                      known.known_step, " in ", known.known_path,
                                      ", but there is no usable one in ", store_.root(),
                                      start.note.empty() ? "" : StrCat(" (", start.note, ")"),
                                      "; is the file system mounted?"));
    }
    RETURN_IF_ERROR(options_.world.Agree(DiskError(leader ? unusable : absl::OkStatus())));
    model.InitializeParameters();
    const std::string& other = options_.config.checkpoint.start_from;
    if (!other.empty()) {
      const bool all = options_.config.checkpoint.start_all;
      // Rank 0 looks for the newest: while another job writes there, ranks could see different
      // ones.
      const absl::StatusOr<std::string> newest =
          leader ? FindCheckpoint(options_.fs, other) : std::string();
      absl::Status loaded = options_.world.Agree(InputError(newest.status()));
      if (loaded.ok()) {
        std::string path = *newest;
        RETURN_IF_ERROR(options_.world.Broadcast(&path, 0));
        loaded = options_.world.Agree(
            InputError(all ? LoadStartState(path, model, interrupted, &start.state)
                           : LoadStartWeights(path, model, interrupted)));
      }
      if (loaded.code() == absl::StatusCode::kCancelled) {
        start.interrupted = true;
        return start;
      }
      RETURN_IF_ERROR(Annotate(loaded, StrCat("loading the ", all ? "state" : "weights",
                                              " of checkpoint.start_from ", other)));
      start.path = other;
    }
  } else {
    saved_step_ = start.state.step;
  }
  const absl::Status begun = leader ? store_.Begin(start.state.step) : absl::OkStatus();
  RETURN_IF_ERROR(
      Annotate(options_.world.Agree(InputError(begun)), "writing the attempt's marker"));
  return start;
}

absl::Status Checkpointer::InputError(const absl::Status& status) const {
  return DiskError(MarkIfPermanent(status, options_.config.attempt));
}

absl::Status Checkpointer::CompareDatasets(const Manifest& manifest) const {
  const auto describe = [](const DatasetIdentity& d) {
    return StrCat(d.format, ", ", d.tokens, " tokens, fingerprint ", d.fingerprint);
  };
  const auto compare = [&](const char* what, const std::string& path,
                           const std::optional<DatasetIdentity>& saved,
                           const std::optional<DatasetIdentity>& now) -> absl::Status {
    if (!saved.has_value() || !now.has_value() || *saved == *now) {
      return absl::OkStatus();
    }
    return FailedPreconditionError(StrCat(
        "the ", what, " ", path, " has changed since the checkpoint of step ", manifest.state.step,
        " was written: it was ", describe(*saved), "; it is ", describe(*now),
        ". Put the former file back, or submit a new job with checkpoint.start_from ",
        store_.root(), " to train on with this one"));
  };
  const DataConfig& data = options_.config.data;
  RETURN_IF_ERROR(compare("dataset", data.path, manifest.dataset, options_.dataset));
  return compare("validation dataset", data.validation_path, manifest.validation,
                 options_.validation);
}

absl::Status Checkpointer::LoadCandidate(const std::string& path, bool own, Transformer& model,
                                         const std::function<bool()>& interrupted,
                                         TrainState* state) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(options_.fs, path));
  const Manifest& manifest = reader->manifest();
  // Read and compared: no other attempt will find it otherwise.
  RETURN_IF_ERROR(WithFailure(CompareModels(manifest.model, options_.config.model),
                              FailureClass::kSpecRejected));
  const absl::Status same_data = CompareDatasets(manifest);
  if (own) {
    RETURN_IF_ERROR(WithFailure(same_data, FailureClass::kSpecRejected));
  } else if (!same_data.ok()) {
    LogWarning("dataset_differs", {{"checkpoint", path}, {"difference", same_data}});
  }
  const auto shards = static_cast<std::int32_t>(manifest.shards.size());
  for (std::int32_t i = layout_.rank; i < shards; i += layout_.world_size) {
    if (interrupted()) {
      return CancelledError("verifying was interrupted by a wish to stop");
    }
    RETURN_IF_ERROR(reader->VerifyShard(i));
  }
  RETURN_IF_ERROR(LoadState(*reader, model, options_.backend, layout_, interrupted));
  *state = manifest.state;
  if (!state->blas_core.empty() && state->blas_core != options_.blas_core) {
    LogWarning("blas_core_changed", {{"saved_with", state->blas_core},
                                     {"now", options_.blas_core},
                                     {"effect", "the resumed run is not bit-identical"}});
  }
  return absl::OkStatus();
}

absl::Status Checkpointer::LoadStartState(const std::string& path, Transformer& model,
                                          const std::function<bool()>& interrupted,
                                          TrainState* state) {
  RETURN_IF_ERROR(LoadCandidate(path, /*own=*/false, model, interrupted, state));
  // Batches are counted, not sequences: with another batch the same data would come again.
  if (state->data_position != state->step * options_.config.global_batch()) {
    return InvalidArgumentError(StrCat(
        path, ": ", state->step, " steps over ", state->data_position,
        " sequences; with checkpoint.start_state: all, train.global_batch must be the same, not ",
        options_.config.global_batch()));
  }
  return absl::OkStatus();
}

absl::Status Checkpointer::LoadStartWeights(const std::string& path, Transformer& model,
                                            const std::function<bool()>& interrupted) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(options_.fs, path));
  RETURN_IF_ERROR(WithFailure(CompareArchitectures(reader->manifest().model, options_.config.model),
                              FailureClass::kSpecRejected));
  const auto shards = static_cast<std::int32_t>(reader->manifest().shards.size());
  for (std::int32_t i = layout_.rank; i < shards; i += layout_.world_size) {
    if (interrupted()) {
      return CancelledError("verifying was interrupted by a wish to stop");
    }
    RETURN_IF_ERROR(reader->VerifyShard(i));
  }
  return LoadWeights(*reader, model, options_.backend, layout_, interrupted);
}

absl::Status Checkpointer::Poll(bool any_busy) {
  if (!writer_.active() || any_busy) {
    return absl::OkStatus();
  }
  return PublishWritten();
}

absl::Status Checkpointer::Finish() {
  return writer_.active() ? PublishWritten() : absl::OkStatus();
}

absl::Status Checkpointer::Save(Transformer& model, const TrainState& state, bool wait) {
  if (!enabled_) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Finish());  // of an earlier save that is still in flight
  if (saved_step_ != state.step) {
    StartWriting(model, state);
  }
  if (!wait) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Finish());
  if (saved_step_ != state.step && state.step >= options_.config.steps) {
    RETURN_IF_ERROR(RetryLastSave(model, state));
  }
  if (saved_step_ != state.step) {
    return Annotate(last_save_, StrCat("saving step ", state.step));
  }
  return absl::OkStatus();
}

void Checkpointer::StartWriting(Transformer& model, const TrainState& state) {
  const auto begin = Steady::now();
  pending_ = Manifest{.job_uid = options_.config.job_uid,
                      .job_name = options_.config.job_name,
                      .attempt = options_.config.attempt,
                      .world_size = layout_.world_size,
                      .expert_parallel = layout_.expert_parallel,
                      .moment_dtype = model.parameters().moment_dtype(),
                      .created_unix_micros = RealClock::Get().UnixMicros(),
                      .model = options_.config.model,
                      .sequence_length = options_.config.run.sequence_length,
                      .state = state,
                      .dataset = options_.dataset,
                      .validation = options_.validation};
  pending_.state.blas_core = options_.blas_core;
  writer_.Start({.folder = store_.PartialPath(state.step),
                 .rank = layout_.rank,
                 .tensors = CopyOwnedState(model, options_.backend, layout_, writer_.TakeBuffers()),
                 .metadata = {{"job_uid", options_.config.job_uid}, {"step", StrCat(state.step)}}});
  stall_seconds_ += SecondsSince(begin);
}

absl::Status Checkpointer::RetryLastSave(Transformer& model, const TrainState& state) {
  const CheckpointConfig& limits = options_.config.checkpoint;
  absl::Status status;
  // last_save_ is the same on all ranks, and so is the number of tries.
  for (std::int32_t tries = 1;
       status.ok() && saved_step_ != state.step &&
       last_save_.code() == absl::StatusCode::kResourceExhausted && tries < limits.last_save_tries;
       ++tries) {
    const absl::StatusOr<bool> leave = WaitForRoom(state.step);
    if (!leave.ok() || *leave) {
      status = leave.status();
      break;
    }
    if (layout_.rank == 0) {
      if (const absl::Status retained = store_.Retain(limits.keep); !retained.ok()) {
        LogWarning("checkpoint_retention_failed", {{"error", retained}});
      }
    }
    report_failure_ = tries + 1 == limits.last_save_tries;
    StartWriting(model, state);
    status = Finish();
  }
  report_failure_ = true;
  return status;
}

absl::StatusOr<bool> Checkpointer::WaitForRoom(std::int64_t step) {
  constexpr std::chrono::milliseconds kLook{200};
  const auto until =
      Steady::now() + std::chrono::milliseconds(options_.config.checkpoint.last_save_wait_ms);
  std::mutex mutex;
  std::condition_variable nobody_wakes;
  std::unique_lock lock(mutex);
  bool leave = false;
  while (!leave && Steady::now() < until) {
    options_.host.TryReport(
        ProgressMessage(iv1::RANK_SAVING, step, "the disk is full; trying again"));
    nobody_wakes.wait_until(lock, std::min(until, Steady::now() + kLook));
    const RankWishes wishes = options_.host.wishes();
    leave = wishes.stop || wishes.suspend || wishes.stop_without_checkpoint;
  }
  return options_.world.Any(leave);
}

absl::Status Checkpointer::PublishWritten() {
  const auto begin = Steady::now();
  absl::StatusOr<ShardFile> shard = writer_.Finish();
  ShardRecord record{.ok = shard.ok() ? 1 : 0};
  if (shard.ok()) {
    record.bytes = shard->bytes;
    record.crc32c = shard->crc32c;
  }
  ASSIGN_OR_RETURN(
      const std::string gathered,
      options_.world.AllGather({reinterpret_cast<const char*>(&record), sizeof(record)}));
  absl::Status saved = options_.world.Agree(DiskError(shard.status()));
  if (saved.ok()) {
    for (std::int32_t r = 0; r < layout_.world_size; ++r) {
      ShardRecord of_rank;
      std::memcpy(&of_rank, gathered.data() + static_cast<std::size_t>(r) * sizeof(record),
                  sizeof(record));
      pending_.shards.push_back(
          {.file = ShardFileName(r), .bytes = of_rank.bytes, .crc32c = of_rank.crc32c});
    }
    saved = options_.world.Agree(
        DiskError(layout_.rank == 0 ? store_.Publish(pending_) : absl::OkStatus()));
  }
  if (MarkOf(saved) == FailureClass::kCollectiveTimeout) {
    return saved;
  }
  if (saved.ok()) {
    saved_step_ = pending_.state.step;
  }
  last_save_ = saved;
  stall_seconds_ += SecondsSince(begin);

  if (layout_.rank == 0) {
    iv1::RankToWorker message;
    auto& done = *message.mutable_checkpoint();
    done.set_step(pending_.state.step);
    done.set_path(store_.FinalPath(pending_.state.step));
    done.set_bytes(pending_.total_bytes());
    done.set_seconds(writer_.write_seconds());
    done.set_ok(saved.ok());
    done.set_error(saved.ok() ? "" : StrCat(Message(saved), FreeSpace(saved)));
    if (saved.ok() || report_failure_) {
      options_.host.Deliver(std::move(message));
    }
    if (saved.ok()) {
      LogInfo("checkpoint_saved", {{"step", pending_.state.step},
                                   {"path", store_.FinalPath(pending_.state.step)},
                                   {"bytes", pending_.total_bytes()},
                                   {"write_seconds", writer_.write_seconds()}});
      const absl::Status retained = store_.Retain(options_.config.checkpoint.keep);
      if (!retained.ok()) {
        LogWarning("checkpoint_retention_failed", {{"error", retained}});
      }
    } else {
      LogError("checkpoint_failed", {{"step", pending_.state.step}, {"error", saved}});
      // All ranks have stopped writing. What is left would keep a full disk full.
      const absl::Status removed = options_.fs.RemoveTree(store_.PartialPath(pending_.state.step));
      if (!removed.ok()) {
        LogWarning("checkpoint_leavings_stay", {{"error", removed}});
      }
    }
  }
  // Another attempt owns the job now: nothing this one does counts any more.
  return saved.code() == absl::StatusCode::kAborted ? saved : absl::OkStatus();
}

std::string Checkpointer::FreeSpace(const absl::Status& saved) const {
  if (saved.code() != absl::StatusCode::kResourceExhausted) {
    return "";
  }
  const absl::StatusOr<std::int64_t> free = options_.fs.FreeBytes(store_.root());
  const CheckpointConfig& limits = options_.config.checkpoint;
  return StrCat("; free in ", store_.root(), ": ",
                free.ok() ? HumanBytes(static_cast<double>(*free))
                          : StrCat("unknown (", Message(free.status()), ")"),
                pending_.state.step >= options_.config.steps && limits.last_save_tries > 1
                    ? StrCat("; the last step is saved again every ", limits.last_save_wait_ms,
                             " ms, ", limits.last_save_tries, " times in all: make room")
                    : "");
}

double Checkpointer::TakeStallSeconds() { return std::exchange(stall_seconds_, 0.0); }

}  // namespace octavo
