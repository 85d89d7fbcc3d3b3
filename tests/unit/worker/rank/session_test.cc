// The rank's line to its worker against a server written here: a whole job of two ranks meets
// through the key-value messages, trains over gloo, and says its last word.
#include "worker/rank/session.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/precision.h"
#include "proto/spec/job_spec.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/rank/assignment.h"
#include "worker/rank/groups.h"

namespace octavo {
namespace {

using Stream = grpc::ServerReaderWriter<iv1::WorkerToRank, iv1::RankToWorker>;

// Serves ranks as the agent does, with the key-value store of the controller in memory.
class FakeWorker final : public iv1::RankService::Service {
 public:
  explicit FakeWorker(const std::string& socket) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeWorker() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(grpc::ServerContext*, Stream* stream) override {
    iv1::RankToWorker message;
    std::vector<std::jthread> waiting;
    std::mutex write;
    const auto send = [&](const iv1::WorkerToRank& out) {
      const std::lock_guard lock(write);
      stream->Write(out);
    };
    while (stream->Read(&message)) {
      if (message.has_hello()) {
        iv1::WorkerToRank out;
        *out.mutable_assignment() = assignment;
        out.mutable_assignment()->set_rank(message.rank());
        send(out);
        for (const iv1::WorkerToRank& more : after_assignment) {
          send(more);
        }
      } else if (message.has_kv()) {
        // A get may wait: answered by a thread of its own, so that the set of a peer is read.
        waiting.emplace_back([this, send, request = message.kv()] { send(Answer(request)); });
      } else {
        const std::lock_guard lock(mutex);
        received.push_back(message);
        if (drop_stream_on_step && message.has_step()) {
          return grpc::Status::CANCELLED;
        }
      }
    }
    return grpc::Status::OK;
  }

  std::vector<iv1::RankToWorker> Received() {
    const std::lock_guard lock(mutex);
    return received;
  }

  iv1::RankAssignment assignment;
  std::vector<iv1::WorkerToRank> after_assignment;
  bool drop_stream_on_step = false;
  std::mutex mutex;
  std::vector<iv1::RankToWorker> received;

 private:
  iv1::WorkerToRank Answer(const iv1::KeyValueRequest& request) {
    iv1::WorkerToRank out;
    auto& reply = *out.mutable_kv();
    reply.set_id(request.id());
    if (request.has_set()) {
      const absl::Status set = store_.Set(request.set().key(), request.set().value());
      reply.set_ok(set.ok());
      reply.set_error(Message(set));
    } else {
      const auto value =
          store_.Get(request.get().key(), static_cast<double>(request.get().timeout_ms()) / 1000);
      reply.set_ok(value.ok());
      reply.set_value(value.ok() ? *value : "");
      reply.set_error(Message(value.status()));
    }
    return out;
  }

  InProcessStore store_;
  std::unique_ptr<grpc::Server> server_;
};

class SessionTest : public ::testing::Test {
 protected:
  // A valid spec for the harness's dataset.
  void FillAssignment(int ranks) {
    const std::string yaml = StrCat(R"(
name: session
model: {family: mixtral, layers: 2, hidden: 128, heads: 4, kv_heads: 2, vocab_size: 256,
        moe: {num_experts: 4, experts_per_token: 2, expert_hidden: 128}}
parallel: {ranks: )",
                                    ranks, R"(}
train: {steps: 4, sequence_length: 16, global_batch: 4}
data: {path: )",
                                    job_.config.data.path, R"(}
checkpoint: {path: )",
                                    job_.dir.File("ckpt"), "}\n");
    const ParsedJobSpec parsed = ParseJobSpec(yaml, "session.yaml");
    ASSERT_TRUE(parsed.ok()) << parsed.Text();
    auto& a = worker_.assignment;
    *a.mutable_spec() = parsed.spec;
    *a.mutable_plan() = PlanToWire(BuildPlanFromSpec(parsed.spec));
    a.set_job_uid("uid-1");
    a.set_job_name("jobs/session");
    a.set_attempt(1);
    a.set_world_size(ranks);
    a.set_bind_address("127.0.0.1");
  }
  absl::StatusOr<std::unique_ptr<WorkerSession>> Connect(int rank, int attempt = 1) {
    return WorkerSession::Connect(
        {.socket = "unix:" + socket_, .job_uid = "uid-1", .attempt = attempt, .rank = rank});
  }
  // What main does with a session.
  static TrainingOutcome Train(WorkerSession& session) {
    const auto config = ConfigFromAssignment(session.assignment());
    EXPECT_TRUE(config.ok()) << ToString(config.status());
    auto backend = LoadedBackend::Open("cpu", 0);
    EXPECT_TRUE(backend.ok());
    auto groups = RankGroups::Create({.config = *config,
                                      .backend = **backend,
                                      .store = session,
                                      .bind_address = session.assignment().bind_address(),
                                      .device_id = "d"});
    EXPECT_TRUE(groups.ok()) << ToString(groups.status());
    EXPECT_EQ((*groups)->transport(), config->run.world_size == 1 ? "self" : "gloo");
    const TrainingOutcome outcome = RunTraining({.config = *config,
                                                 .plan = *PlanFromWire(session.assignment().plan()),
                                                 .backend = (*backend)->backend(),
                                                 .comms = (*groups)->comms(),
                                                 .host = &session,
                                                 .fs = &PosixFileSystem::Get(),
                                                 .blas_core = "test"});
    session.SendOutcome(outcome);
    session.Close();
    return outcome;
  }

  testing::TestJob job_;
  const std::string socket_ = job_.dir.File("w.sock");
  FakeWorker worker_{socket_};
};

TEST_F(SessionTest, TwoRanksMeetTrainOverGlooAndSayTheirLastWord) {
  FillAssignment(2);
  std::vector<TrainingOutcome> outcomes(2);
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.emplace_back([&, r] {
        auto session = Connect(r);
        ASSERT_TRUE(session.ok()) << ToString(session.status());
        outcomes[static_cast<std::size_t>(r)] = Train(**session);
      });
    }
  }
  EXPECT_ALL_OK(outcomes);
  int steps = 0, last_words = 0, starts = 0, saves = 0, snapshots = 0;
  for (const auto& m : worker_.Received()) {
    EXPECT_EQ(m.job_uid(), "uid-1");
    EXPECT_EQ(m.attempt(), 1);
    steps += m.has_step() ? 1 : 0;
    starts += m.has_attempt_start() ? 1 : 0;
    saves += m.has_checkpoint() && m.checkpoint().ok() ? 1 : 0;
    snapshots += m.has_telemetry() ? 1 : 0;
    if (m.has_outcome()) {
      ++last_words;
      EXPECT_EQ(m.outcome().failure_class(), 0);
      EXPECT_EQ(m.outcome().step(), 4);
    }
  }
  EXPECT_EQ(steps, 4);
  EXPECT_EQ(starts, 1);
  EXPECT_EQ(saves, 1);
  EXPECT_EQ(snapshots, 2);
  EXPECT_EQ(last_words, 2);
}

TEST_F(SessionTest, PlansAndWishesArriveAndALeaverIsNotCalledBack) {
  FillAssignment(1);
  iv1::WorkerToRank wish;
  wish.mutable_wishes()->set_stop(true);
  wish.mutable_wishes()->set_sequence(5);
  iv1::WorkerToRank late;
  late.mutable_wishes()->set_checkpoint(true);
  late.mutable_wishes()->set_sequence(4);  // overtaken
  iv1::WorkerToRank plan;
  *plan.mutable_plan() = worker_.assignment.plan();
  plan.mutable_plan()->set_version(7);
  worker_.after_assignment = {plan, wish, late};
  auto session = Connect(0);
  ASSERT_TRUE(session.ok()) << ToString(session.status());
  // Messages are read in order: once a later answer is here, so are they.
  ASSERT_TRUE((*session)->Set("k", "v").ok());
  EXPECT_TRUE((*session)->wishes().stop);
  EXPECT_FALSE((*session)->wishes().checkpoint);
  const auto taken = (*session)->TakePlan();
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->version, 7);
  EXPECT_FALSE((*session)->TakePlan().has_value());
}

TEST_F(SessionTest, RendezvousKeysRoundTripAndAMissingOneIsNamed) {
  FillAssignment(1);
  auto session = Connect(0);
  ASSERT_TRUE(session.ok());
  ASSERT_TRUE((*session)->Set("a", std::string("\0x", 2)).ok());
  EXPECT_EQ(*(*session)->Get("a", 5), std::string("\0x", 2));
  const auto missing = (*session)->Get("never", 0.05);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(Message(missing.status()).find("never"), std::string::npos);
}

TEST_F(SessionTest, AnAssignmentForSomebodyElseIsRefused) {
  FillAssignment(1);
  const auto session = Connect(0, /*attempt=*/2);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Message(session.status()).find("attempt 1"), std::string::npos);
}

TEST_F(SessionTest, ALostWorkerMakesTheRankLeave) {
  FillAssignment(1);
  worker_.assignment.mutable_spec()->mutable_train()->set_steps(100000);
  worker_.drop_stream_on_step = true;
  auto session = Connect(0);
  ASSERT_TRUE(session.ok());
  const TrainingOutcome outcome = Train(**session);
  EXPECT_TRUE(outcome.stopped);
  EXPECT_LT(outcome.step, 100000);
}

}  // namespace
}  // namespace octavo
