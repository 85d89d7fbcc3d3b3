// Whole trainings in the test process: ranks as threads, a small model, a real dataset and real
// checkpoints in a temporary folder, hosts that record what they are told.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "tests/support/inproc_comm.h"
#include "tests/support/temp_dir.h"
#include "worker/data/dataset_writer.h"
#include "worker/rank/training.h"

namespace octavo::testing {

// Checkpoints mean fsync: in memory where the machine has /dev/shm (an explicit TMPDIR wins).
[[maybe_unused]] inline const bool kInMemory =
    ::access("/dev/shm", W_OK) == 0 && ::setenv("TMPDIR", "/dev/shm", 0) == 0;

class RecordingHost final : public TrainingHost {
 public:
  RankWishes wishes() const override {
    const std::lock_guard lock(mutex_);
    return wishes_;
  }
  ProfileRequest profile() const override {
    const std::lock_guard lock(mutex_);
    return profile_;
  }
  void WishProfile(const ProfileRequest& request) {
    const std::lock_guard lock(mutex_);
    profile_ = request;
  }
  std::optional<PrecisionPlan> TakePlan() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(plan_, std::nullopt);
  }
  bool TryReport(iv1::RankToWorker message) override {
    if (drop_all) {
      return false;
    }
    Deliver(std::move(message));
    return true;
  }
  void Deliver(iv1::RankToWorker message) override {
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(message);
    }
    if (on_message) {
      on_message(message);
    }
  }

  void Wish(const std::function<void(RankWishes&)>& change) {
    const std::lock_guard lock(mutex_);
    change(wishes_);
    ++wishes_.sequence;
  }
  void OfferPlan(const PrecisionPlan& plan) {
    const std::lock_guard lock(mutex_);
    plan_ = plan;
  }
  std::vector<iv1::RankToWorker> messages() const {
    const std::lock_guard lock(mutex_);
    return messages_;
  }
  std::vector<iv1::StepReport> steps() const {
    std::vector<iv1::StepReport> out;
    for (const auto& m : messages()) {
      if (m.has_step()) {
        out.push_back(m.step());
      }
    }
    return out;
  }
  std::vector<double> losses() const {
    std::vector<double> out;
    for (const auto& step : steps()) {
      out.push_back(step.loss());
    }
    return out;
  }
  std::vector<v1::RankProfile> profiles() const {
    std::vector<v1::RankProfile> out;
    for (const auto& m : messages()) {
      if (m.has_profile()) {
        out.push_back(m.profile());
      }
    }
    return out;
  }
  std::vector<iv1::CheckpointDone> checkpoints() const {
    std::vector<iv1::CheckpointDone> out;
    for (const auto& m : messages()) {
      if (m.has_checkpoint()) {
        out.push_back(m.checkpoint());
      }
    }
    return out;
  }

  std::function<void(const iv1::RankToWorker&)> on_message;  // set before training
  bool drop_all = false;                                     // every TryReport is dropped

 private:
  mutable std::mutex mutex_;
  RankWishes wishes_;
  ProfileRequest profile_;
  std::optional<PrecisionPlan> plan_;
  std::vector<iv1::RankToWorker> messages_;
};

// One job in one folder; Run may be called again and again, as attempts of it.
class TestJob {
 public:
  explicit TestJob(RecipeKind recipe = RecipeKind::kBf16) {
    ModelConfig& m = config.model;
    m.layers = 2;
    m.hidden = 128;
    m.heads = 4;
    m.kv_heads = 2;
    m.head_dim = 32;
    m.vocab = 256;
    m.experts = 4;
    m.experts_per_token = 2;
    m.expert_hidden = 128;
    m.init_std = 0.05f;
    m.router.aux_scope = AuxLossScope::kSequence;
    m.router.aux_coefficient = 0.01f;
    m.router.bias_update_rate = 0.01f;
    config.run.sequence_length = 16;
    config.run.seed = 3;
    config.run.allow_emulation = true;
    config.run.fp32 = recipe == RecipeKind::kFp32;
    config.job_uid = "uid";
    config.steps = 6;
    config.schedule = {.peak = 3e-3, .final = 3e-4, .warmup_steps = 2, .total_steps = 100};
    config.checkpoint = {.root = dir.File("checkpoints"),
                         .interval_steps = 0,
                         .keep = 100,
                         .last_save_tries = 3,
                         .last_save_wait_ms = 10};
    config.telemetry_interval = 3;
    config.sqnr_interval = 4;
    config.collective_timeout_seconds = 60;
    config.data.path = dir.File("data");
    plan = BuildPlan(m.layers, DefaultRecipe(recipe), 0, {});
    plan.version = 1;
    WriteText();
  }

  // global sequences of a step: 4, however they are spread.
  std::vector<TrainingOutcome> Run(int ranks = 1, int expert_parallel = 1) {
    config.run.world_size = ranks;
    config.run.expert_parallel = expert_parallel;
    config.run.microbatch_sequences = 4 / ranks;
    config.run.microbatches = 1;
    ++config.attempt;
    if (hosts.size() != static_cast<std::size_t>(ranks)) {
      NewHosts(ranks);
    }
    std::vector<TrainingOutcome> outcomes(static_cast<std::size_t>(ranks));
    InprocRanks comms = InprocRanks::Make(ranks, expert_parallel);
    InprocRanks::Run(ranks, [&](int r) {
      const auto at = static_cast<std::size_t>(r);
      Backend backend = CreateCpuBackend();
      TrainingSetup setup{
          .config = config,
          .plan = plan,
          .backend = {.ops = wrap ? wrap(backend) : backend.ops, .context = backend.context},
          .comms = {.world = comms.ranks[at].world.get(),
                    .expert_parallel = comms.ranks[at].expert_parallel.get(),
                    .expert_data = comms.ranks[at].expert_data.get()},
          .host = hosts[at].get(),
          .fs = fs,
          .blas_core = "test",
          .hooks = hooks};
      setup.config.run.rank = r;
      outcomes[at] = RunTraining(setup);
      DestroyCpuBackend(&backend);
    });
    return outcomes;
  }
  // Fresh hosts: nothing recorded, no wishes.
  void NewHosts(int ranks) {
    hosts.clear();
    for (int r = 0; r < ranks; ++r) {
      hosts.push_back(std::make_unique<RecordingHost>());
    }
  }
  RecordingHost& host(int rank = 0) { return *hosts[static_cast<std::size_t>(rank)]; }

  TempDir dir;
  TrainingConfig config{.attempt = 0};
  PrecisionPlan plan;
  FileSystem* fs = &PosixFileSystem::Get();
  TrainingHooks hooks;
  std::function<const Ops*(const Backend&)> wrap;  // another table over the CPU backend's
  std::vector<std::unique_ptr<RecordingHost>> hosts;

 private:
  // A noisy walk over bytes that a model can learn in a few steps.
  void WriteText() {
    auto writer = DatasetWriter::Create(PosixFileSystem::Get(), config.data.path, 1, 256);
    std::string text;
    std::uint32_t state = 12345, noise = 1;
    for (int i = 0; i < 8000; ++i) {
      noise = noise * 1664525u + 1013904223u;
      state = state * 5 + 3 + (noise >> 30 == 0 ? 1 : 0);
      text += static_cast<char>(state % 64);
    }
    EXPECT_TRUE((*writer)->AppendBytes(text).ok());
    EXPECT_TRUE((*writer)->Finish().ok());
  }
};

#define EXPECT_ALL_OK(outcomes)                                            \
  for (const TrainingOutcome& octavo_outcome : (outcomes)) {               \
    EXPECT_TRUE(octavo_outcome.ok())                                       \
        << Name(octavo_outcome.failure) << ": " << octavo_outcome.message; \
  }

}  // namespace octavo::testing
