// The whole client against a controller in this process: arguments in, text and exit status out.
#include "cli/cli.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <sstream>

#include "base/file.h"
#include "base/signals.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/exit_codes.h"
#include "proto/convert/precision.h"
#include "proto/spec/job_spec.h"
#include "tests/unit/cli/fake_controller.h"
#include "tests/unit/proto/spec/spec_text.h"

namespace octavo {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Result {
  int code;
  std::string out, err;
};

class CliTest : public testing::Test {
 protected:
  CliTest() {
    const std::string pattern = testing::TempDir() + "octavo_cli_XXXXXX";
    folder_ = pattern;
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~CliTest() override { std::filesystem::remove_all(folder_); }

  std::string WriteFile(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << text;
    return path;
  }

  Result Run(std::vector<std::string> arguments, const std::string& controller = "") {
    arguments.insert(arguments.begin(),
                     {"--controller", controller.empty() ? server_.address() : controller});
    std::ostringstream out, err;
    const int code = RunCli(arguments, {}, out, err);
    return {code, out.str(), err.str()};
  }

  static v1::Job Demo(v1::JobState state) {
    v1::Job job;
    job.set_name("jobs/demo");
    job.set_state(state);
    *job.mutable_spec() = ParseJobSpec(kGoodSpec, "job.yaml").spec;
    job.mutable_progress()->set_total_steps(100);
    return job;
  }

  static v1::JobEvent Event(std::int64_t revision, v1::JobState state) {
    v1::JobEvent event;
    event.set_revision(revision);
    event.set_kind("STATE");
    event.set_state(state);
    *event.mutable_snapshot() = Demo(state);
    return event;
  }

  FakeController server_;
  std::string folder_;
};

TEST_F(CliTest, SubmitSendsTheFileUnderARequestId) {
  v1::SubmitJobRequest got;
  server_.submit = [&](const v1::SubmitJobRequest& request, v1::Job* job) {
    got = request;
    *job = Demo(v1::PENDING);
    return absl::OkStatus();
  };
  const std::string file = WriteFile("job.yaml", kGoodSpec);
  const Result result = Run({"submit", file});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "jobs/demo submitted; octavo watch demo follows it\n");
  EXPECT_EQ(got.spec_yaml(), kGoodSpec);
  EXPECT_EQ(got.file_name(), file);
  EXPECT_GE(got.request_id().size(), 32u);
  EXPECT_FALSE(got.validate_only());
  Run({"submit", file, "--request-id", "mine", "--dry-run"});
  EXPECT_EQ(got.request_id(), "mine");
  EXPECT_TRUE(got.validate_only());
}

TEST_F(CliTest, AWrongFileNeverReachesTheController) {
  server_.submit = [&](const v1::SubmitJobRequest&, v1::Job*) {
    ADD_FAILURE() << "submitted";
    return absl::OkStatus();
  };
  std::string yaml = Edited("steps: 100", "steps: 0");
  yaml.replace(yaml.find("recipe: fp8_flow"), 16, "recipe: fp8_flw ");
  const std::string file = WriteFile("bad.yaml", yaml);
  const Result result = Run({"submit", file});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr(file + ":18:10: train.steps: found 0; valid: an integer, at "
                                           "least 1\n"));
  EXPECT_THAT(result.err, HasSubstr("did you mean \"fp8_flow\"?\n"));
  EXPECT_THAT(result.err, HasSubstr("2 errors; nothing was submitted"));
  EXPECT_EQ(Run({"submit", folder_ + "/missing.yaml"}).code, 3);
}

TEST_F(CliTest, ErrorsOfTheServerCarryTheirViolations) {
  server_.submit = [&](const v1::SubmitJobRequest&, v1::Job*) {
    v1::FieldViolation violation;
    violation.set_field("name");
    violation.set_found("\"demo\"");
    violation.set_message("a job of that name is alive; valid: another name");
    violation.set_line(1);
    violation.set_column(7);
    return WithDetail(AlreadyExistsError("job name taken"), "JOB_NAME_TAKEN", {violation});
  };
  const Result result = Run({"submit", WriteFile("job.yaml", kGoodSpec)});
  EXPECT_EQ(result.code, 4);
  EXPECT_EQ(result.err,
            "error: job name taken\n"
            "  1:7: name: found \"demo\"; a job of that name is alive; valid: another name\n");
}

// A busy controller accepts and then says nothing for a while; that is not a refusal.
TEST_F(CliTest, ASlowHandshakeIsWaitedForAndNotBegunAgain) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener, 4), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  server_.get = [](const v1::GetJobRequest&, v1::Job* job) {
    *job = Demo(v1::RUNNING);
    return absl::OkStatus();
  };
  std::future<Result> result = std::async(std::launch::async, [&] {
    return Run({"describe", "demo"}, "127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
  });
  pollfd ready{.fd = listener, .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&ready, 1, 10'000), 1);
  const int connection = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  ASSERT_GE(connection, 0);
  EXPECT_EQ(::poll(&ready, 1, 1'000), 0) << "the client gave up the connection and dialled again";
  server_.Adopt(connection);
  ASSERT_EQ(result.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  const Result answer = result.get();
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, HasSubstr("jobs/demo"));
  ::close(listener);
}

TEST_F(CliTest, AnUnreachableControllerIsRetriedThenNamed) {
  const std::string gone = server_.address();
  server_.Stop();
  const Result result = Run({"submit", WriteFile("job.yaml", kGoodSpec), "--timeout", "0.5"}, gone);
  EXPECT_EQ(result.code, 5);
  EXPECT_THAT(result.err, HasSubstr("reaching the controller at " + gone));
  EXPECT_THAT(result.err, HasSubstr("the same command with --request-id r-"));
}

TEST_F(CliTest, UnavailableIsRetriedWithTheSameRequestId) {
  std::set<std::string> ids;
  int calls = 0;
  server_.submit = [&](const v1::SubmitJobRequest& request, v1::Job* job) {
    ids.insert(request.request_id());
    *job = Demo(v1::PENDING);
    return ++calls < 3 ? UnavailableError("starting") : absl::OkStatus();
  };
  EXPECT_EQ(Run({"submit", WriteFile("job.yaml", kGoodSpec)}).code, 0);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(ids.size(), 1u);
}

TEST_F(CliTest, OtherErrorsAreNotRetried) {
  int calls = 0;
  server_.submit = [&](const v1::SubmitJobRequest&, v1::Job*) {
    ++calls;
    return InternalError("broken");
  };
  EXPECT_EQ(Run({"submit", WriteFile("job.yaml", kGoodSpec)}).code, 7);
  EXPECT_EQ(calls, 1);
}

TEST_F(CliTest, DryRunPrintsThePlan) {
  server_.submit = [&](const v1::SubmitJobRequest&, v1::Job* job) {
    *job = Demo(v1::PENDING);
    job->mutable_pending()->set_sentence("needs 2 cpu slots; free now 0, at most 0");
    return absl::OkStatus();
  };
  const Result result = Run({"submit", "--dry-run", WriteFile("job.yaml", kGoodSpec)});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out,
            "valid: demo, 6 layers, 2 ranks, expert_parallel 2, 100 steps; nothing was submitted\n"
            "now: needs 2 cpu slots; free now 0, at most 0\n"
            "precision plan:\n"
            "layer 0: bf16\nlayers 1-4: fp8_flow\nlayer 5: bf16\n");
}

TEST_F(CliTest, AnUnknownCommandIsNamedWithTheNearestOne) {
  Result result = Run({"subm", "job.yaml"});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.err, "error: unknown command \"subm\"; did you mean \"submit\"?\n");
  result = Run({"precision", "shwo", "demo"});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.err, "error: unknown command \"shwo\"; did you mean \"show\"?\n");
  result = Run({"zzzzzzzz"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("unknown command \"zzzzzzzz\"; valid: submit, list"));
  EXPECT_THAT(Run({"list", "--frobnicate"}).err, Not(HasSubstr("unknown command")));
  EXPECT_EQ(Run({"--help"}).code, 0);
}

TEST_F(CliTest, DescribeShowsSharedExpertsDenseLayersAndTheRouter) {
  server_.get = [](const v1::GetJobRequest&, v1::Job* job) {
    *job = Demo(v1::RUNNING);
    v1::ModelSpec& model = *job->mutable_spec()->mutable_model();
    model.add_dense_layers(0);
    model.set_dense_hidden(512);
    model.mutable_moe()->set_shared_experts(2);
    model.mutable_moe()->set_shared_expert_hidden(64);
    v1::RouterSpec& router = *model.mutable_moe()->mutable_router();
    router.set_score("sigmoid");
    router.set_aux_loss("none");
    router.set_n_group(4);
    router.set_topk_group(2);
    return absl::OkStatus();
  };
  const Result result = Run({"describe", "demo"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 shared of 64, dense layers 0 (hidden 512)"));
  EXPECT_THAT(result.out, HasSubstr("sigmoid, auxiliary loss none, best 2 of 4 expert groups"));
}

TEST_F(CliTest, FollowEndsWithTheJobsEnd) {
  for (const auto& [state, code] : {std::pair(v1::SUCCEEDED, 0), std::pair(v1::FAILED, 1),
                                    std::pair(v1::CANCELLED, 6), std::pair(v1::SUSPENDED, 9)}) {
    server_.submit = [&](const v1::SubmitJobRequest&, v1::Job* job) {
      *job = Demo(v1::PENDING);
      return absl::OkStatus();
    };
    server_.watch = [&, end = state](const v1::WatchJobRequest& request,
                                     grpc::ServerWriter<v1::JobEvent>* writer) {
      EXPECT_EQ(request.name(), "jobs/demo");
      writer->Write(Event(5, v1::RUNNING));
      writer->Write(Event(6, end));
      return absl::OkStatus();
    };
    server_.get = [&, end = state](const v1::GetJobRequest&, v1::Job* job) {
      *job = Demo(end);
      return absl::OkStatus();
    };
    const Result result = Run({"submit", "-f", WriteFile("job.yaml", kGoodSpec)});
    EXPECT_EQ(result.code, code);
    EXPECT_THAT(result.out, HasSubstr("state:  " + v1::JobState_Name(state) + "\n"));
  }
}

TEST_F(CliTest, WatchReconnectsWhereItStopped) {
  int calls = 0;
  server_.watch = [&](const v1::WatchJobRequest& request,
                      grpc::ServerWriter<v1::JobEvent>* writer) -> absl::Status {
    ++calls;
    if (calls == 1) {
      EXPECT_EQ(request.resume_token(), 0);
      writer->Write(Event(41, v1::RUNNING));
      return UnavailableError("restarting");
    }
    if (calls == 2) {
      EXPECT_EQ(request.resume_token(), 41);
      return OutOfRangeError("too old");
    }
    EXPECT_EQ(request.resume_token(), 0);
    writer->Write(Event(60, v1::SUCCEEDED));
    return absl::OkStatus();
  };
  server_.get = [&](const v1::GetJobRequest&, v1::Job* job) {
    *job = Demo(v1::SUCCEEDED);
    return absl::OkStatus();
  };
  const Result result = Run({"watch", "demo"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(calls, 3);
  EXPECT_THAT(result.out, HasSubstr("connection to the controller lost"));
}

TEST_F(CliTest, WatchOfAnUnknownJobEndsAtOnce) {
  server_.watch = [](const v1::WatchJobRequest&, grpc::ServerWriter<v1::JobEvent>*) {
    return NotFoundError("no job jobs/nobody");
  };
  const Result result = Run({"watch", "nobody"});
  EXPECT_EQ(result.code, 3);
  EXPECT_EQ(result.err, "error: no job jobs/nobody\n");
}

TEST_F(CliTest, WatchAsJsonGivesOneEventALine) {
  server_.watch = [&](const v1::WatchJobRequest&, grpc::ServerWriter<v1::JobEvent>* writer) {
    v1::JobEvent event;
    event.set_revision(3);
    event.set_kind("STATE");
    event.set_state(v1::FAILED);
    writer->Write(event);
    return absl::OkStatus();
  };
  server_.get = [&](const v1::GetJobRequest&, v1::Job* job) {
    *job = Demo(v1::FAILED);
    return absl::OkStatus();
  };
  const Result result = Run({"watch", "demo", "-o", "json"});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.out,
            "{\"revision\": 3, \"job\": \"\", \"kind\": \"STATE\", \"message\": \"\", \"state\": "
            "\"FAILED\", \"step\": 0}\n");
}

TEST_F(CliTest, ListPagesThroughEverything) {
  server_.list = [&](const v1::ListJobsRequest& request, v1::ListJobsResponse* response) {
    EXPECT_EQ(request.owner(), "me");
    EXPECT_EQ(request.states(0), v1::RUNNING);
    v1::Job* job = response->add_jobs();
    *job = Demo(v1::RUNNING);
    job->set_name(request.page_token().empty() ? "jobs/first" : "jobs/second");
    response->set_next_page_token(request.page_token().empty() ? "t" : "");
    return absl::OkStatus();
  };
  const Result result = Run({"list", "--owner", "me", "--state", "RUNNING"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "JOB     STATE    PRIORITY  RANKS   STEP  LOSS  RECIPE    AGE  STATUS\n"
            "first   RUNNING         0      2  0/100     -  fp8_flow  -\n"
            "second  RUNNING         0      2  0/100     -  fp8_flow  -\n");
  EXPECT_EQ(Run({"list", "--owner", "me", "--state", "RUNNING", "--names"}).out, "first\nsecond\n");
  const Result json = Run({"list", "--owner", "me", "--state", "RUNNING", "-o", "json"});
  EXPECT_THAT(json.out, HasSubstr("{\n  \"jobs\": [\n    {\n      \"name\": \"jobs/first\","));
}

TEST_F(CliTest, CancelSendsReasonAndEtag) {
  server_.cancel = [&](const v1::JobVerbRequest& request, v1::Job* job) {
    EXPECT_EQ(request.name(), "jobs/demo");
    EXPECT_EQ(request.reason(), "enough");
    EXPECT_EQ(request.etag(), "e1");
    EXPECT_FALSE(request.request_id().empty());
    *job = Demo(v1::CANCELLING);
    return absl::OkStatus();
  };
  const Result result = Run({"cancel", "demo", "--reason", "enough", "--etag", "e1"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "demo: cancel requested (CANCELLING)\n");
  server_.cancel = [](const v1::JobVerbRequest&, v1::Job*) {
    return WithDetail(FailedPreconditionError("cannot cancel: the job is SUCCEEDED"),
                      "ILLEGAL_TRANSITION");
  };
  EXPECT_EQ(Run({"cancel", "demo"}).code, 4);
}

TEST_F(CliTest, LogsOfAllRanksGetAPrefixAndACutStreamIsAnError) {
  server_.logs = [](const v1::ReadLogsRequest& request,
                    grpc::ServerWriter<v1::LogChunk>* writer) -> absl::Status {
    v1::LogChunk chunk;
    chunk.set_rank(request.rank() < 0 ? 0 : request.rank());
    chunk.set_text("hel");
    writer->Write(chunk);
    chunk.set_text("lo\n");
    writer->Write(chunk);
    return request.tail_lines() == 5 ? InternalError("worker gone") : absl::OkStatus();
  };
  EXPECT_EQ(Run({"logs", "demo"}).out, "rank 0 | hello\n");
  EXPECT_EQ(Run({"logs", "demo", "--rank", "1"}).out, "hello\n");
  EXPECT_EQ(Run({"logs", "demo", "--rank", "1", "-o", "json"}).out,
            "{\"attempt\": 0, \"rank\": 1, \"line\": \"hello\"}\n");
  const Result cut = Run({"logs", "demo", "--tail", "5"});
  EXPECT_EQ(cut.code, 7);
  EXPECT_THAT(cut.err, HasSubstr("may be incomplete"));
}

TEST_F(CliTest, WorkersShowsSilentOnes) {
  server_.workers = [](const v1::ListWorkersRequest&, v1::ListWorkersResponse* response) {
    v1::Worker* worker = response->add_workers();
    worker->set_name("workers/w0");
    worker->set_state("SILENT");
    worker->set_device("cpu");
    worker->set_slots(2);
    worker->set_slots_free(1);
    worker->set_address("10.0.0.7");
    worker->add_running("jobs/demo#1");
    return absl::OkStatus();
  };
  EXPECT_EQ(Run({"workers"}).out,
            "WORKER  STATE   DEVICE  SLOTS  FREE  ADDRESS   LAST SEEN  RUNNING  MESSAGE\n"
            "w0      SILENT  cpu         2     1  10.0.0.7  -          demo#1\n");
}

TEST_F(CliTest, PrecisionShowsPlannedAndExecuted) {
  server_.precision = [](const v1::GetPrecisionRequest&, v1::JobPrecision* response) {
    const PrecisionPlan plan = BuildPlan(3, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
    response->set_job("jobs/demo");
    *response->mutable_plan() = PlanToWire(plan);
    auto* mismatch = response->mutable_effective()->add_mismatches();
    mismatch->set_layer(1);
    mismatch->set_op("fc1");
    mismatch->set_planned("fp8_flow");
    mismatch->set_executed("bf16");
    mismatch->set_count(4);
    mismatch->set_reason("retried step");
    return absl::OkStatus();
  };
  const Result result = Run({"precision", "show", "demo"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("planned\nlayer 0: bf16\nlayer 1: fp8_flow\nlayer 2: bf16\n"));
  EXPECT_THAT(result.out, HasSubstr("    1  fc1  fp8_flow  bf16          4  retried step\n"));
}

TEST_F(CliTest, PrecisionSetSendsOverridesWithParameters) {
  v1::SetPrecisionRequest got;
  server_.set = [&](const v1::SetPrecisionRequest& request, v1::SetPrecisionResponse* response) {
    got = request;
    response->mutable_plan()->set_version(4);
    return absl::OkStatus();
  };
  const Result result =
      Run({"precision", "set", "demo", "--layers", "2-3", "--ops", "fc1,fc2", "--recipe",
           "fp8_delayed", "--param", "history_len=16", "--reason", "try"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(got.overrides(0).layers(), "2-3");
  EXPECT_EQ(StrJoin(got.overrides(0).ops(), " "), "fc1 fc2");
  EXPECT_EQ(got.overrides(0).recipe().history_len(), 16);
  EXPECT_EQ(got.reason(), "try");
  const Result bad = Run({"precision", "set", "demo", "--layers", "2", "--recipe", "fp8_delayed",
                          "--param", "histroy_len=16"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_THAT(bad.err, HasSubstr("did you mean \"history_len\"?"));
  EXPECT_EQ(Run({"precision", "rollback", "demo", "--to", "2"}).code, 0);
  EXPECT_EQ(got.rollback_to(), 2);
}

// Zero as well: on the wire it is a parameter that was not given, so no server could refuse it.
TEST_F(CliTest, PrecisionSetRefusesAParameterThatTheRecipeHasNot) {
  bool sent = false;
  server_.set = [&](const v1::SetPrecisionRequest&, v1::SetPrecisionResponse*) {
    sent = true;
    return absl::OkStatus();
  };
  const auto set = [&](const std::string& recipe, const std::string& parameter) {
    return Run(
        {"precision", "set", "demo", "--layers", "2", "--recipe", recipe, "--param", parameter});
  };
  for (const char* parameter : {"margin=0", "margin=1", "history_len=0", "kind=bf16", "wgrad"}) {
    SCOPED_TRACE(parameter);
    const Result flow = set("fp8_flow", parameter);
    EXPECT_EQ(flow.code, kExitUsage);
    EXPECT_THAT(flow.err, HasSubstr("valid for recipe fp8_flow: NAME=VALUE with accumulate, "
                                    "min_dequant_scale, wgrad"));
  }
  const Result bf16 = set("bf16", "min_dequant_scale=0");
  EXPECT_EQ(bf16.code, kExitUsage);
  EXPECT_THAT(bf16.err, HasSubstr("recipe bf16 has no parameters"));
  for (const char* parameter :
       {"history_len=0", "history_len=5000", "margin=9", "margin=x", "accumulate=slow"}) {
    EXPECT_EQ(set("fp8_delayed", parameter).code, kExitUsage) << parameter;
  }
  EXPECT_FALSE(sent);
  EXPECT_EQ(set("fp8_delayed", "margin=0").code, kExitOk);
  EXPECT_TRUE(sent);
}

TEST_F(CliTest, TheTokenTravelsWithEveryCall) {
  server_.workers = [](const v1::ListWorkersRequest&, v1::ListWorkersResponse*) {
    return absl::OkStatus();
  };
  const std::string file = WriteFile("token", "0123456789abcdef0123\n");
  const Result result = Run({"workers", "--token-file", file});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "no workers\n");
  EXPECT_EQ(server_.authorization, "Bearer 0123456789abcdef0123");
  EXPECT_EQ(Run({"workers", "--token-file", folder_ + "/none"}).code, 3);
}

TEST_F(CliTest, WrongCommandLinesAreUsageErrors) {
  EXPECT_EQ(Run({}).code, 2);
  EXPECT_EQ(Run({"sumbit", "x"}).code, 2);
  EXPECT_EQ(Run({"submit"}).code, 2);
  EXPECT_EQ(Run({"list", "--state", "running!"}).code, 2);
  EXPECT_EQ(Run({"list", "-o", "xml"}).code, 2);
  EXPECT_EQ(Run({"logs", "demo", "--rank", "-3"}).code, 2);
  const Result help = Run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, HasSubstr("Exit status:"));
  EXPECT_THAT(help.out, HasSubstr("OCTAVO_CONTROLLER"));
}

TEST_F(CliTest, DataBuildAndInspectWork) {
  WriteFile("a.txt", std::string(3000, 'a') + std::string(1000, 'b'));
  const std::string dataset = folder_ + "/text.octd";
  const Result built = Run({"data", "build", folder_ + "/a.txt", "--output", dataset, "--max-bytes",
                            "1MB", "-o", "json"});
  EXPECT_EQ(built.code, 0) << built.err;
  EXPECT_THAT(built.out, HasSubstr("\"tokens\": 4000,"));
  const Result again = Run({"data", "build", folder_ + "/a.txt", "--output", dataset});
  EXPECT_NE(again.code, 0);
  EXPECT_THAT(again.err, HasSubstr("--overwrite"));
  EXPECT_EQ(Run({"data", "build", folder_ + "/a.txt", "--output", dataset, "--overwrite"}).code, 0);
  const Result inspected = Run({"data", "inspect", dataset, "--verify"});
  EXPECT_EQ(inspected.code, 0) << inspected.err;
  EXPECT_THAT(inspected.out, HasSubstr("unigram entropy:  0.5623 nats per token\n"));
  EXPECT_THAT(inspected.out, HasSubstr("80 tokens, unigram entropy 0.0000"));
  EXPECT_THAT(inspected.out, HasSubstr("verified\n"));
  EXPECT_EQ(Run({"data", "inspect", folder_ + "/none"}).code, 3);
}

TEST_F(CliTest, CheckpointsOfAnEmptyFolder) {
  EXPECT_EQ(Run({"checkpoints", "list", folder_}).out, "no checkpoints\n");
  EXPECT_EQ(Run({"checkpoints", "verify", folder_}).code, 3);
  EXPECT_EQ(Run({"checkpoints", "list", folder_ + "/none"}).code, 3);
}

// Runs the script in bash and asks what it offers, as the shell would.
std::string Offers(const std::string& script, const std::string& words, int index) {
  const std::string command = "bash -c 'source " + script + "; COMP_WORDS=(" + words +
                              "); COMP_CWORD=" + std::to_string(index) +
                              "; _octavo; echo \"${COMPREPLY[*]}\"'";
  FILE* pipe = popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  std::string text;
  char buffer[512];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) {
    text += buffer;
  }
  EXPECT_EQ(pclose(pipe), 0) << command;
  return text;
}

TEST_F(CliTest, BashCompletionOffersCommandsAndFlags) {
  const Result script = Run({"completion", "bash"});
  ASSERT_EQ(script.code, 0);
  const std::string path = WriteFile("completion.bash", script.out);
  EXPECT_EQ(Offers(path, "octavo su", 1), "submit suspend\n");
  EXPECT_EQ(Offers(path, "octavo submit --fo", 2), "--follow\n");
  EXPECT_EQ(Offers(path, "octavo precision r", 2), "rollback replay\n");
  EXPECT_EQ(Offers(path, "octavo precision set --la", 3), "--layers\n");
  EXPECT_EQ(Offers(path, "octavo list --contr", 2), "--controller\n");
}

TEST_F(CliTest, EveryCommandIsInEveryCompletionScript) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = Run({"completion", shell}).out;
    for (const char* command :
         {"submit",    "list",       "describe",    "watch",   "cancel",         "suspend",
          "resume",    "checkpoint", "logs",        "events",  "workers",        "drain",
          "precision", "data",       "checkpoints", "version", "spec-reference", "completion",
          "rollback",  "inspect",    "verify"}) {
      EXPECT_THAT(script, HasSubstr(command)) << shell;
    }
  }
  EXPECT_EQ(Run({"completion", "tcsh"}).code, 2);
}

TEST_F(CliTest, ExampleFilesAreValid) {
  // Build folders lie inside the checkout.
  std::filesystem::path root = std::filesystem::canonical("/proc/self/exe");
  while (root.has_relative_path() && !std::filesystem::exists(root / "deploy/examples")) {
    root = root.parent_path();
  }
  const std::filesystem::path folder = root / "deploy/examples";
  ASSERT_TRUE(std::filesystem::exists(folder)) << "no checkout above " << root;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path());
    std::stringstream text;
    text << in.rdbuf();
    std::string yaml = text.str();
    for (const char* hole : {"{DATA}", "{CHECKPOINTS}"}) {
      const std::size_t at = yaml.find(std::string(": ") + hole);
      if (at != std::string::npos) {
        yaml.replace(at + 2, std::string(hole).size(), std::string("/srv/") + hole[1]);
      }
    }
    const ParsedJobSpec parsed = ParseJobSpec(yaml, entry.path().filename());
    EXPECT_TRUE(parsed.ok()) << parsed.Text();
    ++count;
  }
  EXPECT_GE(count, 3);
}

// The signal is there before the stream ends, and whoever takes it off the process must say so:
// a follow that goes on would see the job succeed and end with 0. (In a process of its own, because
// threads of gRPC that other tests began do not block SIGINT.)
TEST(CliSignalsDeathTest, CtrlCWhileTheStreamEndsIsNotLost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto follow = [] {
    const StopSignals mask;
    FakeController server;
    int calls = 0;
    server.get = [](const v1::GetJobRequest&, v1::Job* job) {
      job->set_name("jobs/demo");
      job->set_state(v1::SUCCEEDED);
      return absl::OkStatus();
    };
    server.watch = [&calls](const v1::WatchJobRequest&, grpc::ServerWriter<v1::JobEvent>* writer) {
      if (++calls == 1) {
        ::kill(::getpid(), SIGINT);
        return absl::OkStatus();
      }
      v1::JobEvent event;
      event.set_kind("STATE");
      event.set_state(v1::SUCCEEDED);
      writer->Write(event);
      return absl::OkStatus();
    };
    std::ostringstream out;
    std::_Exit(RunCli({"--controller", server.address(), "watch", "demo"},
                      {.handles_signals = true}, out, out));
  };
  EXPECT_EXIT(follow(), testing::ExitedWithCode(kExitInterrupted), "");
}

}  // namespace
}  // namespace octavo
