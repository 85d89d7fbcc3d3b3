// The gRPC and HTTP rim with real sockets: answers, streams, limits, and an end that is bounded.
#include "controller/api/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/store/memory_store.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "octavo/internal/v1/worker_service.grpc.pb.h"
#include "octavo/v1/job_service.grpc.pb.h"
#include "proto/convert/error_detail.h"

namespace octavo {
namespace {

using testing::HasSubstr;

constexpr char kSpecYaml[] = R"yaml(
name: NAME
model:
  family: mixtral
  layers: 4
  hidden: 128
  heads: 2
  vocab_size: 256
  moe: {num_experts: 8, experts_per_token: 2, expert_hidden: 128}
parallel: {ranks: 1}
train: {steps: 100, sequence_length: 64, global_batch: 2}
data: {path: /data/x}
checkpoint: {path: /ckpt/x}
precision: {recipe: bf16}
)yaml";

std::string SpecYaml(const std::string& name) {
  std::string text = kSpecYaml;
  text.replace(text.find("NAME"), 4, name);
  return text;
}

class ServerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_TRUE(InitLog({.component = "test", .min_level = LogLevel::kError}).ok());
  }
  // Without HTTP: its server takes up to two seconds to stop.
  static ServerOptions GrpcOnly() { return {.http = ""}; }
  void Start(ServerOptions options = GrpcOnly()) {
    options.version = "9.9.9";
    server_ =
        std::make_unique<ControllerServer>(std::move(options), &store_, nullptr, &RealClock::Get());
    const absl::Status started = server_->Start();
    ASSERT_TRUE(started.ok()) << ToString(started);
    grpc::ChannelArguments arguments;
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    channel_ = grpc::CreateCustomChannel(StrCat("127.0.0.1:", server_->port()),
                                         grpc::InsecureChannelCredentials(), arguments);
    jobs_ = v1::JobService::NewStub(channel_);
    workers_ = internal::v1::WorkerService::NewStub(channel_);
  }
  void TearDown() override {
    if (server_ != nullptr) {
      EXPECT_TRUE(server_->Shutdown(DeadlineAfter(std::chrono::seconds(10))));
    }
  }
  static void Limit(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  static absl::Status ToAbsl(const grpc::ClientContext& context, const grpc::Status& status) {
    const auto& trailer = context.GetServerTrailingMetadata();
    const auto detail = trailer.find(kErrorTrailer);
    return StatusFromWire(status.error_code(), status.error_message(),
                          detail == trailer.end()
                              ? std::string()
                              : std::string(detail->second.data(), detail->second.size()));
  }
  absl::StatusOr<v1::Job> Submit(const std::string& yaml, const std::string& token = "") {
    grpc::ClientContext context;
    Limit(context);
    if (!token.empty()) {
      context.AddMetadata("authorization", "Bearer " + token);
    }
    v1::SubmitJobRequest request;
    request.set_request_id(StrCat("r", ++requests_));
    request.set_spec_yaml(yaml);
    request.set_file_name("job.yaml");
    v1::Job job;
    const grpc::Status status = jobs_->SubmitJob(&context, request, &job);
    if (!status.ok()) {
      return ToAbsl(context, status);
    }
    return job;
  }
  std::string Http(const std::string& path) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(server_->http_port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    EXPECT_EQ(::write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    std::string text;
    char buffer[4096];
    for (ssize_t n = 0; (n = ::read(fd, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<std::size_t>(n));
    }
    ::close(fd);
    return text;
  }

  MemoryStore store_;
  std::unique_ptr<ControllerServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<internal::v1::WorkerService::Stub> workers_;
  int requests_ = 0;
};

TEST_F(ServerTest, ASubmittedJobIsStoredBeforeTheAnswer) {
  Start();
  const auto job = Submit(SpecYaml("one"));
  ASSERT_TRUE(job.ok()) << ToString(job.status());
  EXPECT_EQ(job->name(), "jobs/one");
  EXPECT_EQ(store_.Load()->jobs.size(), 1u);
}

TEST_F(ServerTest, ABadSpecComesBackWithPlaceAndReason) {
  Start();
  std::string yaml = SpecYaml("bad");
  yaml.replace(yaml.find("mixtral"), 7, "mixtrol");
  const auto job = Submit(yaml);
  EXPECT_EQ(job.status().code(), absl::StatusCode::kInvalidArgument);
  const auto detail = GetErrorDetail(job.status());
  ASSERT_TRUE(detail.has_value()) << ToString(job.status());
  EXPECT_EQ(detail->reason(), "SPEC_INVALID");
  ASSERT_GE(detail->violations_size(), 1);
  EXPECT_EQ(detail->violations(0).field(), "model.family");
  EXPECT_EQ(detail->violations(0).line(), 4);
}

TEST_F(ServerTest, AnOversizedSpecIsRefused) {
  Start();
  const auto job = Submit(std::string(kMaxSpecBytes + 1, '#'));
  EXPECT_EQ(job.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(job.status()), HasSubstr("262144"));
}

TEST_F(ServerTest, AWatchFollowsAJobToItsEndAndThenEnds) {
  Start();
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  grpc::ClientContext context;
  Limit(context);
  v1::WatchJobRequest request;
  request.set_name("jobs/one");
  const auto stream = jobs_->WatchJob(&context, request);
  v1::JobEvent event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.kind(), "SNAPSHOT");
  {
    grpc::ClientContext cancel;
    Limit(cancel);
    v1::JobVerbRequest verb;
    verb.set_name("one");
    v1::Job job;
    ASSERT_TRUE(jobs_->CancelJob(&cancel, verb, &job).ok());
  }
  v1::JobEvent last;
  while (stream->Read(&event)) {
    last = event;
  }
  EXPECT_EQ(last.state(), v1::CANCELLED);
  EXPECT_EQ(last.snapshot().state(), v1::CANCELLED);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerTest, AWatchOfAnUnknownJobFailsByName) {
  Start();
  grpc::ClientContext context;
  Limit(context);
  v1::WatchJobRequest request;
  request.set_name("nobody");
  const auto stream = jobs_->WatchJob(&context, request);
  v1::JobEvent event;
  EXPECT_FALSE(stream->Read(&event));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(ErrorReason(ToAbsl(context, status)), "JOB_NOT_FOUND");
}

// A worker that does what it is told, by hand, over a real stream.
class HandWorker {
 public:
  HandWorker(internal::v1::WorkerService::Stub* stub, const std::string& name) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    stream_ = stub->Session(&context_);
    internal::v1::WorkerToController message;
    internal::v1::Register& request = *message.mutable_register_();
    request.set_worker(name);
    request.set_incarnation("i");
    request.set_version(CoreOptions().version);
    request.set_address("127.0.0.1");
    request.set_http_address("127.0.0.1:9");
    request.set_device("cpu");
    request.add_slots();
    EXPECT_TRUE(stream_->Write(message));
    message.Clear();
    message.mutable_heartbeat();
    EXPECT_TRUE(stream_->Write(message));
  }
  ~HandWorker() {
    context_.TryCancel();
    stream_->Finish();
  }
  bool Write(const internal::v1::WorkerToController& message) { return stream_->Write(message); }
  // The next message of that kind; others are dropped.
  internal::v1::ControllerToWorker Await(internal::v1::ControllerToWorker::BodyCase kind) {
    internal::v1::ControllerToWorker message;
    while (stream_->Read(&message)) {
      if (message.body_case() == kind) {
        return message;
      }
    }
    ADD_FAILURE() << "the stream ended before a message of kind " << kind;
    return {};
  }
  internal::v1::WorkerToController StepOf(const internal::v1::RankAssignment& start,
                                          std::int64_t step) {
    internal::v1::WorkerToController message;
    message.mutable_step()->set_job_uid(start.job_uid());
    message.mutable_step()->set_attempt(start.attempt());
    message.mutable_step()->mutable_report()->set_step(step);
    message.mutable_step()->mutable_report()->set_loss(3);
    return message;
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<internal::v1::WorkerToController, internal::v1::ControllerToWorker>>
      stream_;
};

TEST_F(ServerTest, AWorkerGetsItsRankAndItsReportIsAcknowledged) {
  Start();
  HandWorker worker(workers_.get(), "w");
  EXPECT_TRUE(worker.Await(internal::v1::ControllerToWorker::kRegistered).registered().accepted());
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  const internal::v1::RankAssignment start =
      worker.Await(internal::v1::ControllerToWorker::kStart).start().assignment();
  EXPECT_EQ(start.job_name(), "one");
  internal::v1::WorkerToController message;
  message.mutable_reliable()->set_sequence(1);
  internal::v1::RankEnded& ended = *message.mutable_reliable()->mutable_ended();
  ended.set_job_uid(start.job_uid());
  ended.set_attempt(start.attempt());
  ended.mutable_outcome();
  ASSERT_TRUE(worker.Write(message));
  EXPECT_EQ(worker.Await(internal::v1::ControllerToWorker::kAck).ack().sequence(), 1);
  EXPECT_EQ(store_.Load()->jobs.at(0).job().state(), v1::SUCCEEDED)
      << "acknowledged after it was stored";
}

TEST_F(ServerTest, LogsComeFromTheWorkerThatHasThem) {
  Start();
  HandWorker worker(workers_.get(), "w");
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  worker.Await(internal::v1::ControllerToWorker::kStart);
  grpc::ClientContext context;
  Limit(context);
  v1::ReadLogsRequest request;
  request.set_name("one");
  request.set_rank(-1);
  const auto stream = jobs_->ReadLogs(&context, request);
  const std::vector<std::string> parts = {"first ", "second"};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const internal::v1::LogRequest ask = worker.Await(internal::v1::ControllerToWorker::kLog).log();
    EXPECT_EQ(ask.offset(), i == 0 ? 0 : 6);
    internal::v1::WorkerToController reply;
    reply.mutable_log()->set_id(ask.id());
    reply.mutable_log()->set_text(parts[i]);
    reply.mutable_log()->set_next_offset(ask.offset() + static_cast<std::int64_t>(parts[i].size()));
    reply.mutable_log()->set_end(i + 1 == parts.size());
    ASSERT_TRUE(worker.Write(reply));
  }
  std::string text;
  v1::LogChunk chunk;
  while (stream->Read(&chunk)) {
    text += chunk.text();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(text, "first second");
}

TEST_F(ServerTest, LogsOfAJobThatNeverStartedAreRefusedAtOnce) {
  Start();
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  grpc::ClientContext context;
  Limit(context);
  v1::ReadLogsRequest request;
  request.set_name("one");
  const auto stream = jobs_->ReadLogs(&context, request);
  v1::LogChunk chunk;
  EXPECT_FALSE(stream->Read(&chunk));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(ErrorReason(ToAbsl(context, status)), "NO_LOGS");
}

// The reader never reads; the events keep coming until its queue and the transport's windows are
// full. It is cut off with the reason, and the others are not slowed down.
TEST_F(ServerTest, ASlowWatcherIsCutOffWithAReason) {
  Start();
  HandWorker worker(workers_.get(), "w");
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  const internal::v1::RankAssignment start =
      worker.Await(internal::v1::ControllerToWorker::kStart).start().assignment();
  grpc::ClientContext context;
  Limit(context);
  v1::WatchJobRequest request;
  request.set_name("one");
  const auto stream = jobs_->WatchJob(&context, request);
  v1::JobEvent event;
  ASSERT_TRUE(stream->Read(&event));  // attached
  // Stored events (here: warnings of repeated steps) are never merged, unlike progress.
  std::int64_t step = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (server_->metrics().Text().find(
             "octavo_telemetry_dropped_total{reason=\"watch_too_slow\"} 1") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "waited for the cut at step " << step;
    for (int i = 0; i < 500; ++i) {
      internal::v1::WorkerToController message = worker.StepOf(start, ++step);
      message.mutable_step()->mutable_report()->set_outcome(1);
      message.mutable_step()->mutable_report()->set_nonfinite_op(std::string(200, 'x'));
      ASSERT_TRUE(worker.Write(message));
    }
  }
  std::int64_t read = 0;
  while (stream->Read(&event)) {
    ++read;
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(ErrorReason(ToAbsl(context, status)), "WATCH_TOO_SLOW");
  EXPECT_LT(read, step);
}

TEST_F(ServerTest, ShutdownIsBoundedWhateverClientsDo) {
  Start();
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  HandWorker worker(workers_.get(), "w");
  worker.Await(internal::v1::ControllerToWorker::kStart);
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_name("one");
  const auto stream = jobs_->WatchJob(&context, request);  // never read, never finished
  v1::JobEvent event;
  ASSERT_TRUE(stream->Read(&event));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(server_->Shutdown(DeadlineAfter(std::chrono::seconds(8))));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(6));
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  server_.reset();
}

TEST_F(ServerTest, RolesDecideWhoMayDoWhat) {
  ServerOptions options = GrpcOnly();
  auto tokens = TokenTable::Parse(
      "viewer-token-0123456789 viewer vera\nsubmit-token-0123456789 submitter sam\n"
      "operat-token-0123456789 operator olga\n",
      "tokens");
  ASSERT_TRUE(tokens.ok()) << ToString(tokens.status());
  options.authorizer = Authorizer(*std::move(tokens), {});
  Start(std::move(options));
  EXPECT_EQ(Submit(SpecYaml("a")).status().code(), absl::StatusCode::kUnauthenticated);
  const auto viewer = Submit(SpecYaml("a"), "viewer-token-0123456789");
  EXPECT_EQ(viewer.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(Message(viewer.status()), HasSubstr("vera is a viewer"));
  const auto job = Submit(SpecYaml("a"), "submit-token-0123456789");
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->spec().owner(), "sam");
  grpc::ClientContext context;  // a worker without a token
  Limit(context);
  const auto session = workers_->Session(&context);
  internal::v1::ControllerToWorker message;
  EXPECT_FALSE(session->Read(&message));
  EXPECT_EQ(session->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(ServerTest, HttpServesMetricsHealthAndDiscovery) {
  Start({});
  HandWorker worker(workers_.get(), "w");
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  worker.Await(internal::v1::ControllerToWorker::kStart);
  EXPECT_THAT(Http("/healthz"), HasSubstr("200"));
  EXPECT_THAT(Http("/readyz"), HasSubstr("200"));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::string sd;
  while ((sd = Http("/sd")).find("127.0.0.1:9\"") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "waited for the worker in /sd: " << sd;
  }
  const std::string metrics = Http("/metrics");
  EXPECT_THAT(metrics,
              HasSubstr("octavo_build_info{version=\"9.9.9\",component=\"controller\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("octavo_train_job_info{train_job=\"one\""));
  EXPECT_THAT(metrics, HasSubstr("octavo_rpc_requests_total{method=\"SubmitJob\",code=\"OK\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("octavo_jobs{state=\"STARTING\"}"));
}

TEST_F(ServerTest, MetricsPassTheLinterAndSeriesOfEndedJobsDisappear) {
  if (std::system("command -v promtool > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool (package prometheus) is not installed";
  }
  Start();
  ASSERT_TRUE(Submit(SpecYaml("one")).ok());
  std::string text = server_->metrics().Text();
  EXPECT_THAT(text, HasSubstr("train_job=\"one\""));
  FILE* promtool = ::popen("promtool check metrics 2>&1", "w");
  ASSERT_NE(promtool, nullptr);
  ASSERT_EQ(std::fwrite(text.data(), 1, text.size(), promtool), text.size());
  EXPECT_EQ(::pclose(promtool), 0);
  grpc::ClientContext context;
  Limit(context);
  v1::JobVerbRequest verb;
  verb.set_name("one");
  v1::Job job;
  ASSERT_TRUE(jobs_->CancelJob(&context, verb, &job).ok());
  EXPECT_THAT(server_->metrics().Text(), testing::Not(HasSubstr("train_job=\"one\"")));
}

TEST_F(ServerTest, ASecondControllerCannotTakeTheSamePort) {
  Start();
  ServerOptions options;
  options.listen = StrCat("127.0.0.1:", server_->port());
  MemoryStore other;
  ControllerServer second(std::move(options), &other, nullptr, &RealClock::Get());
  const absl::Status started = second.Start();
  EXPECT_EQ(started.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(started), HasSubstr(StrCat("127.0.0.1:", server_->port())));
}

// Commits fail: nothing is acknowledged, readiness says why, and after the limit the store counts
// as broken.
TEST_F(ServerTest, NothingIsAnsweredThatCouldNotBeStored) {
  ServerOptions options;
  options.mailbox.store_retry_ms = 300;
  Start(std::move(options));
  store_.FailCommits(ResourceExhaustedError("disk full"));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
  v1::SubmitJobRequest request;
  request.set_spec_yaml(SpecYaml("one"));
  v1::Job job;
  const grpc::Status status = jobs_->SubmitJob(&context, request, &job);
  EXPECT_FALSE(status.ok());
  ASSERT_TRUE(server_->fatal().has_value());
  EXPECT_THAT(Message(*server_->fatal()), HasSubstr("disk full"));
  EXPECT_THAT(Http("/readyz"), HasSubstr("503"));
  EXPECT_TRUE(store_.Load()->jobs.empty());
}

}  // namespace
}  // namespace octavo
