// The small parts of the rim: rank link shutdown, log chunks, probes.
#include <fcntl.h>
#include <sys/stat.h>

#include <chrono>

#include "base/file.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "octavo/internal/v1/rank_service.grpc.pb.h"
#include "proto/limits.h"
#include "tests/support/temp_dir.h"
#include "worker/agent/inventory.h"
#include "worker/agent/log_reader.h"
#include "worker/agent/rank_host.h"
#include "worker/agent/rank_link.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

PosixFileSystem& Files() { return PosixFileSystem::Get(); }

// gRPC 1.51 hangs in Shutdown for ever when one reactor is not finished.
TEST(RankLink, StopReturnsWhileARankIsConnectedAndSilent) {
  const TempDir dir;
  BoundedQueue<Event> events(16);
  RankLink link([&](Event event) { return events.TryPush(std::move(event)); });
  const std::string address = "unix:" + dir.File("s");
  ASSERT_TRUE(link.Start(address).ok());
  const auto stub =
      iv1::RankService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Session(&context);
  iv1::RankToWorker hello;
  hello.mutable_hello()->set_pid(1);
  ASSERT_TRUE(stream->Write(hello));
  const auto got = events.Pop(DeadlineAfter(std::chrono::seconds(30)));
  ASSERT_TRUE(got.has_value() && std::holds_alternative<FromRank>(*got));
  // Not read on, not closed by the rank: only Stop ends it.
  const auto before = std::chrono::steady_clock::now();
  link.Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - before,
            std::chrono::milliseconds(kShutdownLimitMs / 2));
  iv1::WorkerToRank message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  const auto closed = events.Pop(DeadlineAfter(std::chrono::seconds(30)));
  ASSERT_TRUE(closed.has_value());
  EXPECT_TRUE(std::holds_alternative<RankStreamClosed>(*closed));
}

TEST(RankLink, AFloodingRankWaitsInItsOwnSocket) {
  const TempDir dir;
  BoundedQueue<Event> events(16);
  RankLink link([&](Event event) { return events.TryPush(std::move(event)); });
  const std::string address = "unix:" + dir.File("s");
  ASSERT_TRUE(link.Start(address).ok());
  const auto stub =
      iv1::RankService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Session(&context);
  constexpr int kMessages = 100;
  for (int step = 1; step <= kMessages; ++step) {
    iv1::RankToWorker message;
    message.mutable_step()->set_step(step);
    ASSERT_TRUE(stream->Write(message));
  }
  stream->WritesDone();
  for (int step = 1; step <= kMessages; ++step) {
    const auto got = events.Pop(DeadlineAfter(std::chrono::seconds(30)));
    ASSERT_TRUE(got.has_value());
    const FromRank& from = std::get<FromRank>(*got);
    EXPECT_EQ(from.message.step().step(), step);
    EXPECT_EQ(events.size(), 0u) << "one message per rank is in the mailbox";
    link.ReadNext(from.stream);
  }
  EXPECT_EQ(events.dropped(), 0);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(RankLink, BadSocketPathIsAClearError) {
  RankLink link([](Event) { return true; });
  const absl::Status status = link.Start("unix:/no/such/folder/s");
  EXPECT_THAT(Message(status), HasSubstr("/no/such/folder/s"));
}

iv1::LogRequest Request(const std::string& uid) {
  iv1::LogRequest request;
  request.set_id(3);
  request.set_job_uid(uid);
  return request;
}

TEST(LogReader, ChunksTailsAndTheNewestAttempt) {
  const TempDir dir;
  for (const int attempt : {2, 10}) {
    const std::string folder = dir.File(StrCat("uid/", attempt, "/1"));
    ASSERT_TRUE(Files().CreateDirectories(folder).ok());
    ASSERT_TRUE(
        Files()
            .WriteFileAtomic(folder + "/rank.log", StrCat("one ", attempt, "\ntwo\nthree\n"))
            .ok());
  }
  iv1::LogRequest request = Request("uid");
  request.set_rank(1);
  iv1::LogReply reply = ReadLogChunk(request, dir.path());
  EXPECT_EQ(reply.text(), "one 10\ntwo\nthree\n");
  EXPECT_EQ(reply.id(), 3);
  EXPECT_TRUE(reply.end());
  request.set_attempt(2);
  request.set_max_bytes(5);
  reply = ReadLogChunk(request, dir.path());
  EXPECT_EQ(reply.text(), "one 2");
  EXPECT_FALSE(reply.end());
  request.set_offset(reply.next_offset());
  request.set_max_bytes(0);
  EXPECT_EQ(ReadLogChunk(request, dir.path()).text(), "\ntwo\nthree\n");
  request.set_offset(0);
  for (const auto& [lines, text] :
       std::vector<std::pair<int, std::string>>{{1, "three\n"},
                                                {2, "two\nthree\n"},
                                                {3, "one 2\ntwo\nthree\n"},
                                                {99, "one 2\ntwo\nthree\n"}}) {
    request.set_tail_lines(lines);
    EXPECT_EQ(ReadLogChunk(request, dir.path()).text(), text) << lines;
  }
}

TEST(LogReader, ErrorsAreReplies) {
  const TempDir dir;
  EXPECT_THAT(ReadLogChunk(Request("none"), dir.path()).error(), HasSubstr("no log of the job"));
  for (const char* bad : {"", "..", "../x", "a/b"}) {
    EXPECT_THAT(ReadLogChunk(Request(bad), dir.path()).error(), HasSubstr("not a valid name"));
  }
}

TEST(RankHost, KeepsTheFoldersOfTheNewestJobsOnly) {
  const TempDir dir;
  RankHost host({.rank_binary = "/bin/true", .state_dir = dir.path(), .socket_address = "unix:x"},
                [](RankExited) {});
  const auto name = [](int job) { return StrCat("job-", job); };
  for (int job = 0; job < RankHost::kJobFoldersKept + 3; ++job) {
    const std::string folder = JoinPath(host.RanksFolder(), name(job));
    ASSERT_TRUE(Files().CreateDirectories(folder).ok());
    const timespec times[2] = {{.tv_sec = 1000 + job}, {.tv_sec = 1000 + job}};
    ASSERT_EQ(::utimensat(AT_FDCWD, folder.c_str(), times, 0), 0);
  }
  ASSERT_TRUE(host.ForgetJob(name(1)).ok());  // over just now: the newest
  const auto left = Files().ListDirectory(host.RanksFolder());
  ASSERT_TRUE(left.ok());
  EXPECT_EQ(left->size(), static_cast<std::size_t>(RankHost::kJobFoldersKept));
  EXPECT_TRUE(Files().Exists(JoinPath(host.RanksFolder(), name(1))));
  for (const int gone : {0, 2, 3}) {
    EXPECT_FALSE(Files().Exists(JoinPath(host.RanksFolder(), name(gone)))) << gone;
  }
  EXPECT_FALSE(host.ForgetJob("../x").ok());
}

TEST(Inventory, ProbeOutputIsParsedOrRefused) {
  const auto facts =
      ParseProbe(R"({"device_name": "H200", "sm": 90, "memory_bytes": 151000000000})");
  ASSERT_TRUE(facts.ok());
  EXPECT_EQ(facts->device_name(), "H200");
  EXPECT_EQ(facts->sm(), 90);
  EXPECT_EQ(facts->memory_bytes(), 151000000000);
  for (const char* bad : {"", "[]", "{}", "oops", R"({"device_name": 3})"}) {
    EXPECT_FALSE(ParseProbe(bad).ok()) << bad;
  }
}

TEST(Inventory, SlotWithAFailedProbeIsPoisonedAndAllFailedIsAnError) {
  const TempDir dir;
  const std::string script = dir.File("rank");
  ASSERT_TRUE(Files()
                  .WriteFileAtomic(script,
                                   "#!/bin/sh\n"
                                   "[ \"$5\" = 1 ] && { echo no GPU 1 >&2; exit 3; }\n"
                                   "echo '{\"device_name\": \"d\"}'\n")
                  .ok());
  ASSERT_EQ(::chmod(script.c_str(), 0755), 0);
  const auto slots =
      ProbeSlots({.rank_binary = script, .device = "cuda", .slots = 2, .folder = dir.path()});
  ASSERT_TRUE(slots.ok()) << ToString(slots.status());
  EXPECT_FALSE((*slots)[0].poisoned());
  EXPECT_TRUE((*slots)[1].poisoned());
  EXPECT_THAT((*slots)[1].device_name(), HasSubstr("exit code 3: no GPU 1"));
  EXPECT_EQ((*slots)[1].slot(), 1);
  const absl::Status none =
      ProbeSlots({.rank_binary = "/bin/false", .device = "cpu", .slots = 1, .folder = dir.path()})
          .status();
  EXPECT_THAT(Message(none), HasSubstr("no usable slot"));
}

}  // namespace
}  // namespace octavo
