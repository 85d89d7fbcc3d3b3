// Everything a rank needs to know to train, as plain values: no wire types, no files, no sockets.
// assignment.h makes one from the worker's message; benches and tests write one by hand.
#pragma once

#include <cstdint>
#include <string>

#include "worker/data/sample_source.h"
#include "worker/model/config.h"
#include "worker/model/lr_schedule.h"
#include "worker/model/optimizer.h"

namespace octavo {

struct DataConfig {
  std::string path;
  std::string validation_path;        // empty: the tail of path
  double validation_fraction = 0.02;  // of path, when validation_path is empty
  DocumentMode documents = DocumentMode::kPacked;
};

struct CheckpointConfig {
  std::string root;                 // folder of this job's checkpoints; empty: none are written
  std::int64_t interval_steps = 0;  // 0: only at the end
  std::int32_t keep = 2;
  // A full disk at the save of the last step, which is all that is left to do: how often the save
  // is tried, and the time between.
  std::int32_t last_save_tries = 24;
  std::int32_t last_save_wait_ms = 5000;
  // The newest checkpoint that the controller was told of; 0: none.
  std::int64_t known_step = 0;
  std::string known_path;
  std::string start_from;  // for a job that has no checkpoint yet; empty: random weights
  bool start_all = false;  // not the weights alone: the whole state, as a resume would load it
};

struct TrainingConfig {
  std::string job_uid, job_name;
  std::int32_t attempt = 1;
  ModelConfig model;
  RunConfig run;
  OptimizerOptions optimizer;
  LrSchedule schedule;
  double clip = 1.0;  // global gradient norm limit; 0: off
  std::int64_t steps = 0;
  DataConfig data;
  CheckpointConfig checkpoint;
  std::int64_t validation_interval = 0;  // 0: never
  std::int32_t validation_batches = 8;   // microbatches per rank
  std::int32_t telemetry_interval = 10;
  std::int32_t sqnr_interval = 50;
  std::int32_t max_skips_in_a_row = 3;
  bool checkpoint_before_switch = true;  // of the recipe family (NUMERICS 11)
  // Waits. A gang that does not meet in time and a collective that does not end are failures.
  double gang_timeout_seconds = 120;
  double collective_timeout_seconds = 300;

  std::int64_t global_batch() const {
    return std::int64_t{run.world_size} * run.microbatch_sequences * run.microbatches;
  }
  std::int64_t step_tokens() const { return global_batch() * run.sequence_length; }
};

}  // namespace octavo
