// Telemetry in the store: items come back exactly, rows are few and bounded, and a restarted
// controller replays what the one before would have.
#include "controller/core/history_rows.h"

#include <cstdlib>
#include <map>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/core/core.h"
#include "controller/core/policy_driver.h"
#include "controller/store/memory_store.h"
#include "controller/store/sqlite_store.h"
#include "gtest/gtest.h"
#include "tests/unit/controller/core/test_spec.h"

namespace octavo {
namespace {

HealthSnapshot FullSnapshot() {
  TensorHealth tensor{.site = {3, Op::kFc2}, .tensor = Tensor::kGrad};
  tensor.shadow = true;
  tensor.shadow_recipe = RecipeKind::kFp8Flow;
  tensor.e5m2 = true;
  tensor.amax = 3.0e38F;
  tensor.dequant_scale_min = 1.0e-45F;  // the smallest denormal
  tensor.dequant_scale_max = 0.1F;
  tensor.elements = 0xfedcba9876543210ULL;
  tensor.nonfinite = 1;
  tensor.saturated = 2;
  tensor.nonzero = 3;
  tensor.flushed = 4;
  tensor.transpose_flushed = 5;
  tensor.signal_energy = 1.0 / 3;
  tensor.noise_energy = 1e-300;
  tensor.worst = {{.expert = 7, .ratio = ExpertRatio::kTransposeFlushed, .count = 8, .total = 9}};
  return {
      .first_step = 11, .last_step = 20, .plan_version = 4, .tensors = {tensor, TensorHealth()}};
}

TEST(HistoryItems, ComeBackExactly) {
  const HealthSnapshot snapshot = FullSnapshot();
  const auto back = HistoryItemFromStore(HistoryItemToStore(snapshot));
  ASSERT_TRUE(back.has_value());
  const auto& got = std::get<HealthSnapshot>(*back);
  EXPECT_EQ(got.first_step, 11);
  EXPECT_EQ(got.last_step, 20);
  EXPECT_EQ(got.plan_version, 4);
  ASSERT_EQ(got.tensors.size(), 2u);
  const TensorHealth& want = snapshot.tensors[0];
  const TensorHealth& t = got.tensors[0];
  EXPECT_EQ(t.site, want.site);
  EXPECT_EQ(t.tensor, want.tensor);
  EXPECT_EQ(t.shadow, want.shadow);
  EXPECT_EQ(t.shadow_recipe, want.shadow_recipe);
  EXPECT_EQ(t.e5m2, want.e5m2);
  EXPECT_EQ(t.amax, want.amax);
  EXPECT_EQ(t.dequant_scale_min, want.dequant_scale_min);
  EXPECT_EQ(t.dequant_scale_max, want.dequant_scale_max);
  EXPECT_EQ(t.elements, want.elements);
  EXPECT_EQ(t.nonfinite, want.nonfinite);
  EXPECT_EQ(t.saturated, want.saturated);
  EXPECT_EQ(t.nonzero, want.nonzero);
  EXPECT_EQ(t.flushed, want.flushed);
  EXPECT_EQ(t.transpose_flushed, want.transpose_flushed);
  EXPECT_EQ(t.signal_energy, want.signal_energy);
  EXPECT_EQ(t.noise_energy, want.noise_energy);
  ASSERT_EQ(t.worst.size(), 1u);
  EXPECT_EQ(t.worst[0].expert, 7);
  EXPECT_EQ(t.worst[0].ratio, ExpertRatio::kTransposeFlushed);
  EXPECT_EQ(t.worst[0].count, 8u);
  EXPECT_EQ(t.worst[0].total, 9u);

  const StepHealth step{.step = 5,
                        .loss = 1.0 / 7,
                        .nonfinite = true,
                        .site_known = true,
                        .site = {2, Op::kFc1},
                        .tensor = Tensor::kWeight,
                        .nonfinite_elements = 6};
  const auto step_back = std::get<StepHealth>(*HistoryItemFromStore(HistoryItemToStore(step)));
  EXPECT_EQ(step_back.step, step.step);
  EXPECT_EQ(step_back.loss, step.loss);
  EXPECT_TRUE(step_back.nonfinite);
  EXPECT_TRUE(step_back.site_known);
  EXPECT_EQ(step_back.site, step.site);
  EXPECT_EQ(step_back.tensor, step.tensor);
  EXPECT_EQ(step_back.nonfinite_elements, step.nonfinite_elements);

  EXPECT_EQ(
      std::get<AttemptStarted>(*HistoryItemFromStore(HistoryItemToStore(AttemptStarted{0}))).step,
      0);
  const auto applied =
      std::get<PlanAppliedAt>(*HistoryItemFromStore(HistoryItemToStore(PlanAppliedAt{3, 30})));
  EXPECT_EQ(applied.version, 3);
  EXPECT_EQ(applied.step, 30);
  EXPECT_FALSE(HistoryItemFromStore({}).has_value()) << "of a newer controller";
}

// What a store holds after the batch.
struct Table {
  std::map<std::int64_t, StoredTelemetry> rows;
  void Apply(const StoreBatch& batch) {
    for (const StoredTelemetry& row : batch.telemetry) {
      rows[row.sequence] = row;
    }
    for (const auto& [uid, first] : batch.telemetry_trims) {
      rows.erase(rows.begin(), rows.lower_bound(first));
    }
  }
  std::vector<StoredTelemetry> All() const {
    std::vector<StoredTelemetry> all;
    for (const auto& [sequence, row] : rows) {
      all.push_back(row);
    }
    return all;
  }
  std::vector<TelemetryRow> List() const {
    std::vector<TelemetryRow> list;
    for (const auto& [sequence, row] : rows) {
      list.push_back({.sequence = sequence, .cost = row.cost});
    }
    return list;
  }
};

std::string Bytes(const std::vector<HistoryItem>& items) {
  std::string bytes;
  for (const HistoryItem& item : items) {
    bytes += HistoryItemToStore(item).SerializeAsString() + "|";
  }
  return bytes;
}

TEST(HistoryRows, KeepWhatTheBoundAllowsInFewRowsAndHardlyMore) {
  std::vector<HistoryItem> all;
  HistoryRows rows;
  Table table;
  std::size_t most_rows = 0;
  // 400 tensors a snapshot and 10 steps between them, a save every 15 steps: twice the bound.
  HealthSnapshot snapshot;
  snapshot.tensors.resize(400);
  const auto add = [&](const HistoryItem& item) {
    rows.Add(item);
    all.push_back(item);
  };
  for (std::int64_t step = 1; step <= 7003; ++step) {
    add(StepHealth{.step = step, .loss = 1.0 / static_cast<double>(step)});
    if (step % 10 == 0) {
      snapshot.first_step = step - 9;
      snapshot.last_step = step;
      add(snapshot);
    }
    if (step % 15 == 0) {
      StoreBatch batch;
      rows.Take("u", &batch);
      EXPECT_LE(batch.telemetry.size(), 1u);
      table.Apply(batch);
      most_rows = std::max(most_rows, table.rows.size());
    }
  }
  EXPECT_LE(most_rows, static_cast<std::size_t>(HistoryRows::kCostMax / HistoryRows::kRowCost + 2));
  std::int64_t stored_cost = 0, largest_row = 0;
  for (const auto& [sequence, row] : table.rows) {
    std::int64_t cost = 0;
    for (const auto& item : row.history.items()) {
      cost += HistoryRows::CostOf(*HistoryItemFromStore(item));
    }
    EXPECT_EQ(cost, row.cost);
    stored_cost += cost;
    largest_row = std::max(largest_row, cost);
  }
  EXPECT_LE(stored_cost, HistoryRows::kCostMax + 2 * largest_row);
  EXPECT_GE(stored_cost, HistoryRows::kCostMax - 2 * largest_row);
  // What is read is the end of what was added, with the steps that no save has taken yet.
  const std::vector<HistoryItem> items = rows.Items(table.All());
  ASSERT_LT(items.size(), all.size());
  EXPECT_EQ(Bytes(items),
            Bytes({all.end() - static_cast<std::ptrdiff_t>(items.size()), all.end()}));

  StoreBatch last;
  rows.Take("u", &last);
  table.Apply(last);
  HistoryRows restored;
  restored.Restore(table.List());
  EXPECT_EQ(Bytes(restored.Items(table.All())), Bytes(rows.Items(table.All())));
  // What comes after the restart overwrites no row.
  const std::size_t before = table.rows.size();
  StoreBatch batch;
  restored.Take("u", &batch);
  EXPECT_TRUE(batch.empty()) << "nothing is new";
  restored.Add(StepHealth{.step = 7004});
  restored.Take("u", &batch);
  ASSERT_EQ(batch.telemetry.size(), 1u);
  EXPECT_GT(batch.telemetry[0].sequence, table.rows.rbegin()->first);
  table.Apply(batch);
  EXPECT_EQ(table.rows.size(), before + 1);
}

TEST(HistoryRows, RowsOfStepsAloneAreFilledBeforeANewOneBegins) {
  HistoryRows rows;
  Table table;
  for (std::int64_t step = 1; step <= 1000; ++step) {
    rows.Add(StepHealth{.step = step});
    StoreBatch batch;
    rows.Take("u", &batch);  // a save at every step
    table.Apply(batch);
  }
  EXPECT_EQ(table.rows.size(), 1000u / HistoryRows::kRowCost + 1);
  EXPECT_EQ(rows.Items(table.All()).size(), 1000u);
}

// ---------------------------------------------------------------- the whole controller

v1::JobSpec MakeSpec(const std::string& name) {
  return TestSpec(name, [](v1::JobSpec& spec) {
    spec.mutable_parallel()->set_ranks(1);
    spec.mutable_train()->set_steps(100000);
    spec.mutable_precision()->set_recipe("fp8_blockwise");
  });
}

// One controller with its policy over a store that outlives it, and one worker played by hand.
class TelemetryRestart : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "sqlite") {
      folder_ = testing::TempDir() + "/octavo_telemetry_XXXXXX";
      ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    } else {
      store_ = std::make_unique<MemoryStore>();
    }
    Restart();
  }
  void TearDown() override {
    core_.reset();
    store_.reset();
    if (!folder_.empty()) {
      ASSERT_TRUE(PosixFileSystem::Get().RemoveTree(folder_).ok());
    }
  }
  void Restart() {
    core_.reset();
    policy_ = std::make_unique<PolicyDriver>();
    if (!folder_.empty()) {
      store_.reset();
      auto opened = SqliteStore::Open(folder_, PosixFileSystem::Get());
      ASSERT_TRUE(opened.ok()) << ToString(opened.status());
      store_ = *std::move(opened);
    }
    core_ = std::make_unique<Core>(CoreOptions(), store_.get(), policy_.get());
    const absl::Status recovered = core_->Recover(now_);
    ASSERT_TRUE(recovered.ok()) << ToString(recovered);
  }
  void Settle() {
    core_->Tick(now_);
    if (core_->WantsSchedule(now_)) {
      core_->Schedule(now_);
    }
    const StoreBatch batch = core_->TakeBatch();
    commits_ += batch.empty() ? 0 : 1;
    telemetry_rows_ += static_cast<int>(batch.telemetry.size());
    if (!batch.empty()) {
      const absl::Status stored = store_->Commit(batch);
      ASSERT_TRUE(stored.ok()) << ToString(stored);
    }
    for (Effect& effect : core_->TakeEffects()) {
      if (auto* send = std::get_if<SendToWorker>(&effect);
          send != nullptr && send->message.has_start()) {
        start_ = send->message.start().assignment();
      }
    }
  }
  void Advance(std::int64_t micros) {
    now_.mono_micros += micros;
    now_.unix_micros += micros;
  }
  void Send(const internal::v1::WorkerToController& message) {
    core_->WorkerMessage(session_, message, now_);
    Settle();
  }
  void Register() {
    internal::v1::WorkerToController message;
    internal::v1::Register& request = *message.mutable_register_();
    request.set_worker("w");
    request.set_incarnation("i");
    request.set_version(CoreOptions().version);
    request.set_device("cpu");
    request.add_slots();
    if (!start_.job_uid().empty()) {
      *request.add_running() = Running();
    }
    ++session_;
    Send(message);
    Heartbeat();
  }
  internal::v1::RunningRank Running() const {
    internal::v1::RunningRank rank;
    rank.set_job_uid(start_.job_uid());
    rank.set_attempt(start_.attempt());
    rank.mutable_progress()->set_phase(internal::v1::RANK_TRAINING);
    return rank;
  }
  void Heartbeat() {
    internal::v1::WorkerToController message;
    message.mutable_heartbeat();
    if (!start_.job_uid().empty()) {
      *message.mutable_heartbeat()->add_running() = Running();
    }
    Send(message);
  }
  void Run(const std::string& name) {
    start_.Clear();
    const v1::JobSpec spec = MakeSpec(name);
    ASSERT_TRUE(core_->Submit({.spec = spec, .spec_yaml = name, .caller = "ada"}, now_).ok());
    Settle();
    ASSERT_EQ(start_.job_name(), name);
    Heartbeat();
    internal::v1::WorkerToController message;
    internal::v1::ReliableReport& report = *message.mutable_reliable();
    report.set_sequence(++sequence_);
    report.mutable_attempt_start()->set_job_uid(start_.job_uid());
    report.mutable_attempt_start()->set_attempt(start_.attempt());
    report.mutable_attempt_start()->mutable_start();
    Send(message);
  }
  // Half a second a step; a snapshot every 10, with a third of fc1's input flushed when `bad`.
  void Steps(std::int64_t first, std::int64_t last, bool bad) {
    for (std::int64_t step = first; step <= last; ++step) {
      Advance(500000);
      Heartbeat();
      internal::v1::WorkerToController message;
      message.mutable_step()->set_job_uid(start_.job_uid());
      message.mutable_step()->set_attempt(start_.attempt());
      internal::v1::StepReport& report = *message.mutable_step()->mutable_report();
      report.set_step(step);
      report.set_loss(3 + 0.01 * static_cast<double>(step % 7));
      report.set_plan_version(1);
      Send(message);
      if (step % 10 != 0) {
        continue;
      }
      internal::v1::WorkerToController telemetry;
      telemetry.mutable_telemetry()->set_job_uid(start_.job_uid());
      telemetry.mutable_telemetry()->set_attempt(start_.attempt());
      internal::v1::TelemetrySnapshot& snapshot =
          *telemetry.mutable_telemetry()->mutable_snapshot();
      snapshot.set_first_step(step - 9);
      snapshot.set_last_step(step);
      snapshot.set_plan_version(1);
      snapshot.set_ranks(1);
      internal::v1::TensorStats& tensor = *snapshot.add_tensors();
      tensor.set_layer(1);
      tensor.set_op(static_cast<std::int32_t>(Op::kFc1));
      tensor.set_amax(1);
      tensor.set_dequant_scale_min(0.01F);
      tensor.set_dequant_scale_max(0.02F);
      tensor.set_elements(1000);
      tensor.set_nonzero(900);
      tensor.set_flushed(bad ? 300 : 0);
      Send(telemetry);
    }
  }
  void End() {
    internal::v1::WorkerToController message;
    internal::v1::ReliableReport& report = *message.mutable_reliable();
    report.set_sequence(++sequence_);
    internal::v1::RankEnded& ended = *report.mutable_ended();
    ended.set_job_uid(start_.job_uid());
    ended.set_attempt(start_.attempt());
    ended.mutable_outcome()->set_step(100000);
    start_.Clear();
    Send(message);
  }
  std::string Replay(const std::string& name) {
    v1::ReplayPolicyRequest request;
    request.set_name(name);
    const auto response = core_->Replay(request);
    return response.ok() ? response->DebugString() : "error: " + ToString(response.status());
  }
  std::string Health(const std::string& name) {
    v1::GetHealthRequest request;
    request.set_name(name);
    const auto response = core_->Health(request);
    return response.ok() ? response->DebugString() : "error: " + ToString(response.status());
  }

  std::string folder_;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<PolicyDriver> policy_;
  std::unique_ptr<Core> core_;
  Now now_{.mono_micros = 1000000000, .unix_micros = 1790000000000000};
  SessionId session_ = 0;
  std::int64_t sequence_ = 0;
  internal::v1::RankAssignment start_;
  int commits_ = 0, telemetry_rows_ = 0;
};

TEST_P(TelemetryRestart, ARestartedControllerReplaysTheSameDecisions) {
  Register();
  Run("job");
  Steps(1, 200, false);
  Steps(201, 300, true);
  const std::string before = Replay("job");
  const std::string health = Health("job");
  ASSERT_NE(before.find("fallback"), std::string::npos) << before;
  core_->SaveProgress(now_);  // an orderly end
  EXPECT_EQ(Replay("job"), before) << "between the save and its commit";
  Settle();
  EXPECT_EQ(Replay("job"), before);
  Restart();
  EXPECT_EQ(Replay("job"), before);
  EXPECT_EQ(Health("job"), health);
  // The job goes on, and so does its history.
  Register();
  Steps(301, 330, true);
  const std::string after = Replay("job");
  EXPECT_NE(after.find("last_step: 330"), std::string::npos) << after;
  EXPECT_NE(after.find("first_step: 1\n"), std::string::npos) << after;
}

TEST_P(TelemetryRestart, AKilledControllerLosesTheLastSecondsAtMostAndAsksForNoCommitOfItsOwn) {
  Register();
  Run("job");
  const int commits = commits_;
  Steps(1, 300, false);  // 150 s
  const std::int64_t every_s = CoreOptions().progress_store_ms / 1000;
  EXPECT_LE(commits_ - commits, 150 / every_s + 5) << "a commit for every progress_store_ms";
  EXPECT_GE(telemetry_rows_, 150 / every_s / 2);
  Restart();
  v1::ReplayPolicyRequest request;
  request.set_name("job");
  const auto replay = core_->Replay(request);
  ASSERT_TRUE(replay.ok()) << ToString(replay.status());
  EXPECT_GE(replay->last_step(), 300 - 2 * every_s - 1);
  EXPECT_EQ(replay->first_step(), 1);
}

TEST_P(TelemetryRestart, TheLastEndedJobsKeepTheirTelemetryOverARestartTheOthersLoseIt) {
  Register();
  const int jobs = static_cast<int>(PolicyDriver::kEndedJobsKept) + 3;
  std::map<std::string, std::string> before;
  for (int i = 0; i < jobs; ++i) {
    const std::string name = StrCat("job-", i);
    Run(name);
    Steps(1, 20, false);
    End();
    Advance(1000000);
    ASSERT_TRUE(
        IsTerminal(core_->state().jobs.at(core_->state().newest_by_name.at(name))->state()));
  }
  for (int i = 0; i < jobs; ++i) {
    const std::string name = StrCat("job-", i);
    before[name] = Replay(name);
    EXPECT_EQ(before[name].starts_with("error"), i < 3) << name << ": " << before[name];
    EXPECT_EQ(store_->ListTelemetry(core_->state().newest_by_name.at(name))->empty(), i < 3)
        << name;
  }
  Restart();
  for (const auto& [name, replay] : before) {
    EXPECT_EQ(Replay(name), replay) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TelemetryRestart, testing::Values("memory", "sqlite"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace octavo
