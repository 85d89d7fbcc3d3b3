// The job store on SQLite: one file, one connection, one owning thread.
//
// Write-ahead log with synchronous=FULL: a commit is on disk when it returns, and a torn log tail
// is ignored by the next open. SQLite 3.40 has the WAL-reset bug with two connections at once, so
// there is one here, guarded by a lock file, and nobody opens the file of a running controller with
// the sqlite3 shell. A store of a newer schema is refused, a damaged one too (quick_check at open);
// one of an older schema is taken to the newest in one transaction.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "controller/store/job_store.h"

struct sqlite3;
struct sqlite3_stmt;

namespace octavo {

class SqliteStore final : public JobStore {
 public:
  // Opens or creates <folder>/jobs.db. FAILED_PRECONDITION: another controller has the folder, or
  // the schema is newer; DATA_LOSS: the file is damaged. Messages name the file.
  static absl::StatusOr<std::unique_ptr<SqliteStore>> Open(const std::string& folder,
                                                           FileSystem& fs);
  ~SqliteStore() override;

  absl::StatusOr<StoreSnapshot> Load() override;
  absl::Status Commit(const StoreBatch& batch) override;
  absl::StatusOr<std::vector<v1::JobEvent>> ReadEvents(const std::string& job_uid,
                                                       std::int64_t after,
                                                       std::int64_t limit) override;
  absl::StatusOr<std::vector<TelemetryRow>> ListTelemetry(const std::string& job_uid) override;
  absl::StatusOr<std::vector<StoredTelemetry>> ReadTelemetry(const std::string& job_uid,
                                                             std::int64_t first) override;

 private:
  class Statement;
  SqliteStore(std::string path, std::unique_ptr<FileLock> lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  absl::Status OpenDatabase();
  absl::Status PrepareSchema();
  absl::Status Execute(const std::string& sql);
  absl::Status Error(const std::string& attempted) const;
  // A cached prepared statement, reset and without bindings.
  absl::StatusOr<Statement> Prepare(const char* sql);
  absl::StatusOr<std::int64_t> Number(const char* sql);
  absl::Status Apply(const StoreBatch& batch);

  const std::string path_;
  const std::unique_ptr<FileLock> lock_;
  sqlite3* db_ = nullptr;
  std::map<std::string, sqlite3_stmt*> statements_;
};

}  // namespace octavo
