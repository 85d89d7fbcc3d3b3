// The real daemon with real processes: octavo-worker, fake ranks, a fake controller in the test.
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "base/file.h"
#include "base/status.h"
#include "base/subprocess.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/http_get.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/worker/agent/fake_controller.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using Up = FakeController::Up;
using Down = FakeController::Down;

SteadyTime Soon() { return DeadlineAfter(std::chrono::seconds(60)); }

std::string ThisProgram() {
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof(path));
  return std::string(path, static_cast<std::size_t>(size));
}

bool Gone(pid_t pid) {
  const auto stat = PosixFileSystem::Get().ReadFile(StrCat("/proc/", pid, "/stat"));
  return !stat.ok() || stat->find(") Z ") != std::string::npos;
}

bool GoneSoon(pid_t pid) {
  const SteadyTime deadline = Soon();
  while (!Gone(pid) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  return Gone(pid);
}

class WorkerProcessTest : public ::testing::Test {
 protected:
  void StartWorker(const FakeController& controller, const std::vector<std::string>& more = {}) {
    std::vector<std::string> argv = {JoinPath(DirectoryName(ThisProgram()), "octavo-worker"),
                                     "--controller",
                                     controller.address(),
                                     "--slots",
                                     "2",
                                     "--state-dir",
                                     dir_.File("state"),
                                     "--name",
                                     "w0",
                                     "--advertise-address",
                                     "127.0.0.1",
                                     "--rank-binary",
                                     ThisProgram(),
                                     "--port-file",
                                     dir_.File("ports.json")};
    argv.insert(argv.end(), more.begin(), more.end());
    auto spawned = Subprocess::Spawn({.argv = argv,
                                      .stdout_path = dir_.File("worker.log"),
                                      .stderr_path = dir_.File("worker.log")});
    ASSERT_TRUE(spawned.ok()) << ToString(spawned.status());
    worker_ = *std::move(spawned);
  }
  void TearDown() override {
    if (HasFailure()) {
      const auto log = PosixFileSystem::Get().ReadFile(dir_.File("worker.log"));
      std::fprintf(stderr, "--- worker log\n%s\n", log.ok() ? log->c_str() : "(none)");
    }
    if (worker_ != nullptr) {
      worker_->SignalGroup(SIGKILL).IgnoreError();
    }
  }
  static bool IsRegister(const Up& m) { return m.has_register_(); }
  // A heartbeat with a rank that has reached `step`.
  static auto Reached(std::int64_t step) {
    return [step](const Up& m) {
      return m.has_heartbeat() && m.heartbeat().running_size() > 0 &&
             m.heartbeat().running(0).progress().step() >= step;
    };
  }

  const TempDir dir_;
  std::unique_ptr<Subprocess> worker_;
};

TEST_F(WorkerProcessTest, RunsARankToItsEndWithEvidenceLogAndMetrics) {
  FakeController controller;
  StartWorker(controller);
  const Up hello = controller.WaitFor("Register", IsRegister);
  EXPECT_EQ(hello.register_().slots(1).device_name(), "fake");
  EXPECT_EQ(hello.register_().slots(1).slot(), 1);
  controller.StartRank("finish", 0, 1);
  const auto ended = controller.WaitForEnd("finish").reliable().ended();
  EXPECT_EQ(ended.exit_code(), 0);
  EXPECT_EQ(ended.signal(), 0);
  EXPECT_EQ(ended.slot(), 1);
  EXPECT_EQ(ended.outcome().message(), "finished");
  EXPECT_THAT(ended.log_tail(), HasSubstr("assignment of name-of-finish"));
  controller.WaitFor("step 3",
                     [](const Up& m) { return m.has_step() && m.step().report().step() == 3; });

  Down request;
  request.mutable_log()->set_id(9);
  request.mutable_log()->set_job_uid("finish");
  request.mutable_log()->set_tail_lines(1);
  controller.Send(request);
  const Up log = controller.WaitFor("LogReply", [](const Up& m) { return m.has_log(); });
  EXPECT_EQ(log.log().id(), 9);
  EXPECT_EQ(log.log().text(), "assignment of name-of-finish\n");
  EXPECT_TRUE(log.log().end());

  const auto ports =
      nlohmann::json::parse(*PosixFileSystem::Get().ReadFile(dir_.File("ports.json")));
  const std::string http = ports["http"];
  const int port = static_cast<int>(*ParseInt64(http.substr(http.rfind(':') + 1)));
  EXPECT_THAT(HttpGetReply(port, "/metrics"),
              HasSubstr("octavo_train_steps_total{train_job=\"name-of-finish\"} 3\n"));
  EXPECT_THAT(HttpGetReply(port, "/healthz"), HasSubstr("200 OK"));
  EXPECT_THAT(HttpGetReply(port, "/readyz"), HasSubstr("200 OK"));

  Down forget;
  forget.mutable_forget()->set_job_uid("finish");
  controller.Send(forget);
  request.mutable_log()->set_id(10);
  controller.Send(request);  // handled after it, in order
  const Up after = controller.WaitFor(
      "second LogReply", [](const Up& m) { return m.has_log() && m.log().id() == 10; });
  EXPECT_EQ(after.log().text(), "assignment of name-of-finish\n")
      << "logs outlive their job, that is when they are read";
}

TEST_F(WorkerProcessTest, CrashIsReportedWithSignalAndLogTail) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("crash", 0, 0);
  const auto ended = controller.WaitForEnd("crash").reliable().ended();
  EXPECT_EQ(ended.signal(), SIGABRT);
  EXPECT_EQ(ended.exit_code(), -1);
  EXPECT_THAT(ended.log_tail(), HasSubstr("about to crash"));
  EXPECT_FALSE(ended.has_outcome())
      << "the signal is the evidence; the broken link explains nothing";
}

TEST_F(WorkerProcessTest, RanksMeetThroughTheRelayedKeyValueStore) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("meet", 0, 0);
  controller.StartRank("meet", 1, 1);
  std::map<int, std::string> words;
  for (int rank = 0; rank < 2; ++rank) {
    const Up end = controller.WaitFor("end of both", [&](const Up& m) {
      return m.has_reliable() && m.reliable().has_ended() && m.reliable().ended().rank() == rank;
    });
    words[rank] = end.reliable().ended().outcome().message();
  }
  EXPECT_EQ(words[0], "address-of-1");
  EXPECT_EQ(words[1], "address-of-0");
}

TEST_F(WorkerProcessTest, UnacknowledgedEndIsRepeatedOnTheNextSession) {
  FakeController controller(/*acknowledge=*/false);
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("finish", 0, 0);
  const Up first = controller.WaitForEnd("finish");
  const std::size_t before = controller.heard();
  controller.Disconnect();
  controller.WaitFor("Register again", IsRegister, before);
  const Up second = controller.WaitForEnd("finish", before);
  EXPECT_EQ(second.reliable().SerializeAsString(), first.reliable().SerializeAsString());
}

TEST_F(WorkerProcessTest, TrainingGoesOnWhileTheControllerIsAway) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("train", 0, 0);
  const Up running = controller.WaitFor("step 5", Reached(5));
  const int pid = running.heartbeat().running(0).pid();
  controller.Stop();
  const std::size_t before = controller.heard();
  controller.Start(controller.port());
  const Up back = controller.WaitFor("Register again", IsRegister, before);
  ASSERT_EQ(back.register_().running_size(), 1);
  EXPECT_EQ(back.register_().running(0).pid(), pid) << "the same process";
  const std::int64_t step = back.register_().running(0).progress().step();
  controller.WaitFor("more steps", Reached(step + 5), before);
}

TEST_F(WorkerProcessTest, RanksOfALostControllerStopAfterTheGraceAndTheEndIsToldLater) {
  FakeController controller;
  StartWorker(controller, {"--orphan-grace", "0.3"});
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("train", 0, 0);
  const Up running = controller.WaitFor("step 1", Reached(1));
  controller.Stop();
  EXPECT_TRUE(GoneSoon(running.heartbeat().running(0).pid()));
  const std::size_t before = controller.heard();
  controller.Start(controller.port());
  const auto ended = controller.WaitForEnd("train", before).reliable().ended();
  EXPECT_EQ(ended.exit_code(), 0);
  EXPECT_EQ(ended.outcome().message(), "stopped as wished");
}

TEST_F(WorkerProcessTest, StubbornRankIsKilledWithinTheBounds) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("stubborn", 0, 0);
  controller.WaitFor("it trains", [](const Up& m) {
    return m.has_heartbeat() && m.heartbeat().running_size() > 0 &&
           m.heartbeat().running(0).progress().phase() == internal::v1::RANK_TRAINING;
  });
  Down stop;
  stop.mutable_stop()->set_job_uid("stubborn");
  stop.mutable_stop()->set_attempt(1);
  stop.mutable_stop()->set_grace_ms(10);
  controller.Send(stop);
  const auto ended = controller.WaitForEnd("stubborn").reliable().ended();
  EXPECT_EQ(ended.signal(), SIGKILL);
  EXPECT_THAT(ended.outcome().message(), HasSubstr("asked to stop by the controller"));
}

TEST_F(WorkerProcessTest, SigtermDrainsAndEndsTheDaemonCleanly) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("train", 0, 0);
  controller.WaitFor("step 1", Reached(1));
  ASSERT_TRUE(worker_->Signal(SIGTERM).ok());
  controller.WaitFor("DrainRequest", [](const Up& m) { return m.has_drain(); });
  controller.WaitFor("last checkpoint",
                     [](const Up& m) { return m.has_reliable() && m.reliable().has_checkpoint(); });
  const auto ended = controller.WaitForEnd("train").reliable().ended();
  EXPECT_TRUE(ended.outcome().stopped());
  EXPECT_EQ(worker_->Wait(Soon()), (ExitReason{.code = 0}));
}

TEST_F(WorkerProcessTest, KillNineOfTheDaemonLeavesNoRankAndTheStateFolderIsFree) {
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  controller.StartRank("stubborn", 0, 0);
  const Up running = controller.WaitFor("it runs", [](const Up& m) {
    return m.has_heartbeat() && m.heartbeat().running_size() > 0 &&
           m.heartbeat().running(0).pid() > 0;
  });
  ASSERT_TRUE(worker_->Signal(SIGKILL).ok());
  ASSERT_TRUE(worker_->Wait(Soon()).has_value());
  EXPECT_TRUE(GoneSoon(running.heartbeat().running(0).pid()));
  const std::size_t before = controller.heard();
  StartWorker(controller);
  const Up again = controller.WaitFor("Register of the next daemon", IsRegister, before);
  EXPECT_EQ(again.register_().running_size(), 0);
}

// One self-signed certificate is certificate, key's owner and authority on both sides.
TEST_F(WorkerProcessTest, MutualTlsAndABearerTokenReachTheController) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  const std::string key = dir_.File("key"), cert = dir_.File("cert"), token = dir_.File("token");
  auto openssl = Subprocess::Spawn(
      {.argv = {"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-nodes", "-keyout", key, "-out", cert, "-days", "1", "-subj", "/CN=octavo",
                "-addext", "subjectAltName=IP:127.0.0.1"},
       .stderr_path = dir_.File("openssl.log")});
  ASSERT_TRUE(openssl.ok()) << ToString(openssl.status());
  ASSERT_EQ((*openssl)->Wait(Soon()), (ExitReason{.code = 0}));
  ASSERT_TRUE(fs.WriteFileAtomic(token, "0123456789abcdef\n").ok());
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = *fs.ReadFile(cert);
  options.pem_key_cert_pairs.push_back(
      {.private_key = *fs.ReadFile(key), .cert_chain = *fs.ReadFile(cert)});
  FakeController controller(/*acknowledge=*/true, grpc::SslServerCredentials(options));
  StartWorker(controller,
              {"--tls-cert", cert, "--tls-key", key, "--tls-ca", cert, "--token-file", token});
  controller.WaitFor("Register over TLS", IsRegister);
  EXPECT_EQ(controller.authorization(), "Bearer 0123456789abcdef");
}

TEST_F(WorkerProcessTest, BadFlagsAndASecondDaemonGetOneClearError) {
  struct Case {
    std::vector<std::string> more;
    std::string expected;
  };
  FakeController controller;
  StartWorker(controller);
  controller.WaitFor("Register", IsRegister);
  const std::unique_ptr<Subprocess> first = std::move(worker_);
  for (const Case& c :
       {Case{{}, "another process holds the lock"}, Case{{"--slots", "0"}, "--slots"},
        Case{{"--device", "tpu"}, "--device"},
        Case{{"--state-dir", dir_.File("s2"), "--rank-binary", "/no/rank"}, "/no/rank"},
        Case{{"--state-dir", dir_.File("s3"), "--rank-binary", "/bin/false"}, "no usable slot"},
        Case{{"--state-dir", dir_.File("s4"), "--tls-cert", "/no/cert"}, "/no/cert"},
        Case{{"--state-dir", dir_.File("s5"), "--listen-http", "nowhere"}, "--listen-http"}}) {
    PosixFileSystem::Get().RemoveTree(dir_.File("worker.log")).IgnoreError();
    StartWorker(controller, c.more);
    const auto exit = worker_->Wait(Soon());
    ASSERT_TRUE(exit.has_value());
    EXPECT_TRUE(exit->code == 2 || exit->code == 3) << exit->DebugString();
    EXPECT_THAT(*PosixFileSystem::Get().ReadFile(dir_.File("worker.log")), HasSubstr(c.expected));
  }
  first->SignalGroup(SIGKILL).IgnoreError();
}

}  // namespace
}  // namespace octavo
