// The contract of JobStore, for every implementation, and what only SQLite can show.
#include "controller/store/job_store.h"

#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/store/memory_store.h"
#include "controller/store/sqlite_store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace octavo {
namespace {

using testing::HasSubstr;

std::string MakeFolder() {
  std::string folder = testing::TempDir() + "/octavo_store_XXXXXX";
  EXPECT_NE(::mkdtemp(folder.data()), nullptr);
  return folder;
}

StoreBatch OneJob(const std::string& uid, std::int64_t revision) {
  StoreBatch batch;
  internal::v1::StoredJob job;
  job.mutable_job()->set_uid(uid);
  job.mutable_job()->set_name("jobs/" + uid);
  batch.jobs.push_back(job);
  v1::PrecisionPlan plan;
  plan.set_version(1);
  batch.plans.push_back({.job_uid = uid, .plan = plan});
  batch.requests.push_back({.request_id = "r-" + uid,
                            .method = "SubmitJob",
                            .job_uid = uid,
                            .fingerprint = 0xfedcba9876543210ULL});
  v1::JobEvent event;
  event.set_revision(revision);
  event.set_kind("SUBMITTED");
  batch.events.push_back({.job_uid = uid, .event = event});
  return batch;
}

StoreBatch OneEvent(const std::string& uid, std::int64_t revision) {
  StoreBatch batch;
  v1::JobEvent event;
  event.set_revision(revision);
  event.set_message(StrCat("event ", revision));
  batch.events.push_back({.job_uid = uid, .event = event});
  return batch;
}

class JobStoreContract : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "sqlite") {
      folder_ = MakeFolder();
    }
    Reopen();
  }
  void TearDown() override {
    store_.reset();
    if (!folder_.empty()) {
      ASSERT_TRUE(PosixFileSystem::Get().RemoveTree(folder_).ok());
    }
  }
  // SQLite: as after a restart. Memory: the same object, which is what the simulator does.
  void Reopen() {
    if (folder_.empty()) {
      if (store_ == nullptr) {
        store_ = std::make_unique<MemoryStore>();
      }
      return;
    }
    store_.reset();
    auto opened = SqliteStore::Open(folder_, PosixFileSystem::Get());
    ASSERT_TRUE(opened.ok()) << ToString(opened.status());
    store_ = *std::move(opened);
  }
  std::string folder_;
  std::unique_ptr<JobStore> store_;
};

TEST_P(JobStoreContract, KeepsEverythingOverAReopen) {
  StoreBatch batch = OneJob("u1", 1);
  internal::v1::StoredAttempt attempt;
  attempt.set_job_uid("u1");
  attempt.mutable_attempt()->set_number(1);
  (*attempt.mutable_incarnations())["w"] = "i1";
  batch.attempts.push_back(attempt);
  batch.drains.push_back({.worker = "w", .reason = "a disk is failing"});
  ASSERT_TRUE(store_->Commit(batch).ok());
  Reopen();
  const auto snapshot = store_->Load();
  ASSERT_TRUE(snapshot.ok()) << ToString(snapshot.status());
  ASSERT_EQ(snapshot->jobs.size(), 1u);
  EXPECT_EQ(snapshot->jobs[0].job().name(), "jobs/u1");
  ASSERT_EQ(snapshot->attempts.size(), 1u);
  EXPECT_EQ(snapshot->attempts[0].incarnations().at("w"), "i1");
  ASSERT_EQ(snapshot->plans.size(), 1u);
  ASSERT_EQ(snapshot->requests.size(), 1u);
  EXPECT_EQ(snapshot->requests[0].fingerprint, 0xfedcba9876543210ULL);
  ASSERT_EQ(snapshot->drains.size(), 1u);
  EXPECT_EQ(snapshot->drains[0].reason, "a disk is failing");
  EXPECT_EQ(snapshot->revision, 1);
}

TEST_P(JobStoreContract, TheLastPutOfAKeyWins) {
  ASSERT_TRUE(store_->Commit(OneJob("u1", 1)).ok());
  StoreBatch batch;
  internal::v1::StoredJob job;
  job.mutable_job()->set_uid("u1");
  job.mutable_job()->set_message("newer");
  batch.jobs.push_back(job);
  ASSERT_TRUE(store_->Commit(batch).ok());
  EXPECT_EQ(store_->Load()->jobs.at(0).job().message(), "newer");
}

TEST_P(JobStoreContract, ReadsEventsByPageInOrderAndOfOneJobOnly) {
  ASSERT_TRUE(store_->Commit(OneJob("u1", 1)).ok());
  ASSERT_TRUE(store_->Commit(OneJob("u2", 2)).ok());
  for (std::int64_t revision = 3; revision <= 8; ++revision) {
    ASSERT_TRUE(store_->Commit(OneEvent(revision % 2 == 0 ? "u2" : "u1", revision)).ok());
  }
  const auto events = store_->ReadEvents("u1", 1, 2);
  ASSERT_TRUE(events.ok());
  ASSERT_EQ(events->size(), 2u);
  EXPECT_EQ((*events)[0].revision(), 3);
  EXPECT_EQ((*events)[1].revision(), 5);
  EXPECT_TRUE(store_->ReadEvents("nobody", 0, 10)->empty());
}

TEST_P(JobStoreContract, TrimKeepsTheNewestAndTheRevisionNeverGoesBack) {
  ASSERT_TRUE(store_->Commit(OneJob("u1", 1)).ok());
  for (std::int64_t revision = 2; revision <= 10; ++revision) {
    ASSERT_TRUE(store_->Commit(OneEvent("u1", revision)).ok());
  }
  StoreBatch trim;
  trim.trims.emplace_back("u1", 3);
  ASSERT_TRUE(store_->Commit(trim).ok());
  const auto events = store_->ReadEvents("u1", 0, 100);
  ASSERT_EQ(events->size(), 3u);
  EXPECT_EQ(events->front().revision(), 8);
  StoreBatch forget;
  forget.forgotten_jobs.push_back("u1");
  ASSERT_TRUE(store_->Commit(forget).ok());
  Reopen();
  const auto snapshot = store_->Load();
  EXPECT_TRUE(snapshot->jobs.empty());
  EXPECT_TRUE(snapshot->plans.empty());
  EXPECT_TRUE(snapshot->requests.empty());
  EXPECT_EQ(snapshot->revision, 10);
}

TEST_P(JobStoreContract, AnUndoneDrainIsGone) {
  StoreBatch drain;
  drain.drains.push_back({.worker = "w", .reason = "x"});
  ASSERT_TRUE(store_->Commit(drain).ok());
  StoreBatch undo;
  undo.drains.push_back({.worker = "w"});
  ASSERT_TRUE(store_->Commit(undo).ok());
  EXPECT_TRUE(store_->Load()->drains.empty());
}

StoredTelemetry Row(const std::string& uid, std::int64_t sequence, std::int64_t step) {
  StoredTelemetry row{.job_uid = uid, .sequence = sequence, .cost = 10 * step};
  row.history.add_items()->mutable_step()->set_step(step);
  return row;
}

TEST_P(JobStoreContract, TelemetryComesBackInOrderIsTrimmedAndGoesWithItsJob) {
  StoreBatch batch = OneJob("u1", 1);
  batch.telemetry = {Row("u1", 2, 20), Row("u1", 1, 10), Row("u2", 1, 99), Row("u1", 3, 30)};
  EXPECT_FALSE(batch.empty());
  ASSERT_TRUE(store_->Commit(batch).ok());
  StoreBatch again;
  again.telemetry = {Row("u1", 3, 31)};  // the newest row is written again as it grows
  ASSERT_TRUE(store_->Commit(again).ok());
  StoreBatch trim;
  trim.telemetry_trims.emplace_back("u1", 2);
  EXPECT_FALSE(trim.empty());
  ASSERT_TRUE(store_->Commit(trim).ok());
  Reopen();
  auto rows = store_->ReadTelemetry("u1", 0);
  ASSERT_TRUE(rows.ok()) << ToString(rows.status());
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[0].sequence, 2);
  EXPECT_EQ((*rows)[0].history.items(0).step().step(), 20);
  EXPECT_EQ((*rows)[1].sequence, 3);
  EXPECT_EQ((*rows)[1].history.items(0).step().step(), 31);
  const auto newest = store_->ReadTelemetry("u1", 3);
  ASSERT_EQ(newest->size(), 1u);
  EXPECT_EQ((*newest)[0].sequence, 3);
  const auto listed = store_->ListTelemetry("u1");
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ((*listed)[0].sequence, 2);
  EXPECT_EQ((*listed)[0].cost, 200);
  EXPECT_EQ((*listed)[1].cost, 310);
  StoreBatch forget;
  forget.forgotten_jobs.push_back("u1");
  ASSERT_TRUE(store_->Commit(forget).ok());
  Reopen();
  EXPECT_TRUE(store_->ReadTelemetry("u1", 0)->empty());
  EXPECT_EQ(store_->ReadTelemetry("u2", 0)->size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(All, JobStoreContract, testing::Values("memory", "sqlite"),
                         [](const auto& info) { return std::string(info.param); });

class SqliteStoreTest : public testing::Test {
 protected:
  void SetUp() override { folder_ = MakeFolder(); }
  void TearDown() override { ASSERT_TRUE(PosixFileSystem::Get().RemoveTree(folder_).ok()); }
  std::string folder_;
};

TEST_F(SqliteStoreTest, RefusesAFolderThatAnotherControllerHas) {
  const auto first = SqliteStore::Open(folder_, PosixFileSystem::Get());
  ASSERT_TRUE(first.ok());
  const auto second = SqliteStore::Open(folder_, PosixFileSystem::Get());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(second.status()), HasSubstr("one controller at a time"));
}

TEST_F(SqliteStoreTest, RefusesAFileThatIsNoDatabase) {
  ASSERT_TRUE(PosixFileSystem::Get()
                  .WriteFileAtomic(JoinPath(folder_, "jobs.db"), std::string(4096, 'x'))
                  .ok());
  const auto store = SqliteStore::Open(folder_, PosixFileSystem::Get());
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << ToString(store.status());
  EXPECT_THAT(Message(store.status()), HasSubstr("jobs.db"));
}

// The tables of version 1, as released: kept here so that the schema's first step cannot change
// unseen.
constexpr char kVersion1[] = R"sql(
CREATE TABLE jobs (uid TEXT PRIMARY KEY, job BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE attempts (job_uid TEXT NOT NULL, number INTEGER NOT NULL, attempt BLOB NOT NULL,
  PRIMARY KEY (job_uid, number)) STRICT, WITHOUT ROWID;
CREATE TABLE plans (job_uid TEXT NOT NULL, version INTEGER NOT NULL, plan BLOB NOT NULL,
  PRIMARY KEY (job_uid, version)) STRICT, WITHOUT ROWID;
CREATE TABLE requests (request_id TEXT PRIMARY KEY, method TEXT NOT NULL, target TEXT NOT NULL,
  fingerprint INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_target ON requests (target);
CREATE TABLE events (revision INTEGER PRIMARY KEY, job_uid TEXT NOT NULL, event BLOB NOT NULL)
  STRICT;
CREATE INDEX events_by_job ON events (job_uid, revision);
CREATE TABLE drains (worker TEXT PRIMARY KEY, reason TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('revision', 41);
INSERT INTO drains VALUES ('w', 'a disk is failing');
PRAGMA user_version = 1;
)sql";

void RunSql(const std::string& path, const char* sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  char* error = nullptr;
  EXPECT_EQ(sqlite3_exec(db, sql, nullptr, nullptr, &error), SQLITE_OK) << error;
  sqlite3_free(error);
  sqlite3_close(db);
}

TEST_F(SqliteStoreTest, AFileOfVersion1IsTakenToTheNewestAndKeepsWhatItHas) {
  RunSql(JoinPath(folder_, "jobs.db"), kVersion1);
  for (int open = 0; open < 2; ++open) {  // the second time there is nothing to do
    const auto store = SqliteStore::Open(folder_, PosixFileSystem::Get());
    ASSERT_TRUE(store.ok()) << ToString(store.status());
    const auto snapshot = (*store)->Load();
    ASSERT_TRUE(snapshot.ok()) << ToString(snapshot.status());
    EXPECT_EQ(snapshot->revision, open == 0 ? 41 : 42);
    ASSERT_EQ(snapshot->drains.size(), 1u);
    if (open == 0) {
      StoreBatch batch = OneJob("u1", 42);
      batch.telemetry = {Row("u1", 1, 10)};
      ASSERT_TRUE((*store)->Commit(batch).ok());
    } else {
      EXPECT_EQ(snapshot->jobs.size(), 1u);
      EXPECT_EQ((*store)->ReadTelemetry("u1", 0)->size(), 1u);
    }
  }
}

TEST_F(SqliteStoreTest, AFileOfANewerVersionIsRefusedAndLeftAlone) {
  RunSql(JoinPath(folder_, "jobs.db"), "CREATE TABLE x (y); PRAGMA user_version = 1000;");
  for (int open = 0; open < 2; ++open) {
    const auto store = SqliteStore::Open(folder_, PosixFileSystem::Get());
    EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(store.status()), HasSubstr("schema 1000"));
  }
}

TEST_F(SqliteStoreTest, AFailedBatchLeavesNothingAndCanBeTriedAgain) {
  auto opened = SqliteStore::Open(folder_, PosixFileSystem::Get());
  ASSERT_TRUE(opened.ok());
  JobStore& store = **opened;
  ASSERT_TRUE(store.Commit(OneJob("u1", 1)).ok());
  StoreBatch bad = OneJob("u2", 2);
  bad.events.push_back(bad.events[0]);  // the same revision twice breaks the last insert
  EXPECT_FALSE(store.Commit(bad).ok());
  EXPECT_EQ(store.Load()->jobs.size(), 1u) << "nothing of the batch was applied";
  EXPECT_EQ(store.Load()->revision, 1);
  EXPECT_TRUE(store.Commit(OneJob("u2", 2)).ok());
  EXPECT_EQ(store.Load()->jobs.size(), 2u);
}

// A child commits one event after the other and tells each on a pipe, until it is killed: every
// event that was told must be there.
TEST_F(SqliteStoreTest, WhatWasAcknowledgedSurvivesKill9) {
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::close(pipe_fds[0]);
    auto store = SqliteStore::Open(folder_, PosixFileSystem::Get());
    if (!store.ok() || !(*store)->Commit(OneJob("u1", 1)).ok()) {
      ::_exit(1);
    }
    for (std::int64_t revision = 2;; ++revision) {
      if (!(*store)->Commit(OneEvent("u1", revision)).ok() ||
          ::write(pipe_fds[1], &revision, sizeof(revision)) != sizeof(revision)) {
        ::_exit(1);
      }
    }
  }
  ::close(pipe_fds[1]);
  std::int64_t told = 0;
  while (told < 40) {
    ASSERT_EQ(::read(pipe_fds[0], &told, sizeof(told)), static_cast<ssize_t>(sizeof(told)));
  }
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  std::int64_t more = 0;
  while (::read(pipe_fds[0], &more, sizeof(more)) == static_cast<ssize_t>(sizeof(more))) {
    told = more;  // acknowledged before the kill
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(pipe_fds[0]);
  const auto store = SqliteStore::Open(folder_, PosixFileSystem::Get());
  ASSERT_TRUE(store.ok()) << ToString(store.status());
  const auto events = (*store)->ReadEvents("u1", 0, 1 << 20);
  ASSERT_TRUE(events.ok());
  ASSERT_GE(events->back().revision(), told);
  for (std::size_t i = 0; i < events->size(); ++i) {
    ASSERT_EQ((*events)[i].revision(), static_cast<std::int64_t>(i) + 1) << "a hole";
  }
  EXPECT_EQ((*store)->Load()->revision, events->back().revision());
}

}  // namespace
}  // namespace octavo
