#include "controller/store/sqlite_store.h"

#include <sqlite3.h>

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "controller/store/schema.h"

namespace octavo {
namespace {

// May the caller try again? A full or busy disk: yes. A damaged file: no.
absl::StatusCode CodeOf(int result) {
  switch (result & 0xff) {
    case SQLITE_FULL:
      return absl::StatusCode::kResourceExhausted;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::StatusCode::kDataLoss;
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_AUTH:
      return absl::StatusCode::kPermissionDenied;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

}  // namespace

// One use of a cached statement. Parameters are bound in order; text and blobs are not copied, so
// what is bound outlives Step.
class SqliteStore::Statement {
 public:
  Statement(const SqliteStore* store, sqlite3_stmt* statement)
      : store_(store), statement_(statement) {}
  Statement(Statement&& other) noexcept
      : store_(other.store_), statement_(std::exchange(other.statement_, nullptr)) {}
  Statement& operator=(Statement&&) = delete;
  ~Statement() {
    if (statement_ != nullptr) {
      sqlite3_reset(statement_);
      sqlite3_clear_bindings(statement_);
    }
  }

  Statement& Text(const std::string& value) {
    sqlite3_bind_text(statement_, ++bound_, value.data(), static_cast<int>(value.size()),
                      SQLITE_STATIC);
    return *this;
  }
  Statement& Blob(const std::string& value) {
    sqlite3_bind_blob64(statement_, ++bound_, value.data(), value.size(), SQLITE_STATIC);
    return *this;
  }
  Statement& Number(std::int64_t value) {
    sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }

  // True: a row is there.
  absl::StatusOr<bool> Row() {
    const int result = sqlite3_step(statement_);
    if (result == SQLITE_ROW) {
      return true;
    }
    if (result == SQLITE_DONE) {
      return false;
    }
    return store_->Error(StrCat("running ", sqlite3_sql(statement_)));
  }
  // For statements without rows; the statement can be used again afterwards.
  absl::Status Run() {
    const absl::StatusOr<bool> row = Row();
    sqlite3_reset(statement_);
    bound_ = 0;
    return row.status();
  }

  std::string TextAt(int column) const {
    return std::string(static_cast<const char*>(sqlite3_column_blob(statement_, column)),
                       static_cast<std::size_t>(sqlite3_column_bytes(statement_, column)));
  }
  std::int64_t NumberAt(int column) const { return sqlite3_column_int64(statement_, column); }

  template <class Message>
  absl::Status ParseAt(int column, Message* message) const {
    const void* data = sqlite3_column_blob(statement_, column);
    if (!message->ParseFromArray(data, sqlite3_column_bytes(statement_, column))) {
      return DataLossError(StrCat(store_->path_, ": a row of \"", sqlite3_sql(statement_),
                                  "\" is no ", message->GetTypeName()));
    }
    return absl::OkStatus();
  }

 private:
  const SqliteStore* store_;
  sqlite3_stmt* statement_;
  int bound_ = 0;
};

absl::StatusOr<std::unique_ptr<SqliteStore>> SqliteStore::Open(const std::string& folder,
                                                               FileSystem& fs) {
  RETURN_IF_ERROR(Annotate(fs.CreateDirectories(folder), "opening the job store"));
  absl::StatusOr<std::unique_ptr<FileLock>> lock = fs.LockFile(JoinPath(folder, "lock"));
  if (!lock.ok()) {
    return Annotate(lock.status(), StrCat("opening the job store in ", folder,
                                          " (one controller at a time has a data folder)"));
  }
  std::unique_ptr<SqliteStore> store(
      new SqliteStore(JoinPath(folder, "jobs.db"), *std::move(lock)));
  RETURN_IF_ERROR(store->OpenDatabase());
  return store;
}

SqliteStore::~SqliteStore() {
  for (const auto& [sql, statement] : statements_) {
    sqlite3_finalize(statement);
  }
  sqlite3_close(db_);
}

absl::Status SqliteStore::OpenDatabase() {
  // NOMUTEX: one owning thread.
  const int result =
      sqlite3_open_v2(path_.c_str(), &db_,
                      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (result != SQLITE_OK) {
    return Error("opening");
  }
  sqlite3_extended_result_codes(db_, 1);
  RETURN_IF_ERROR(Execute("PRAGMA locking_mode = EXCLUSIVE"));
  RETURN_IF_ERROR(Execute("PRAGMA journal_mode = WAL"));
  RETURN_IF_ERROR(Execute("PRAGMA synchronous = FULL"));
  ASSIGN_OR_RETURN(Statement check, Prepare("PRAGMA quick_check(1)"));
  ASSIGN_OR_RETURN(const bool row, check.Row());
  if (row && check.TextAt(0) != "ok") {
    return DataLossError(StrCat(path_, " is damaged: ", check.TextAt(0),
                                "; restore it from a copy, or move it away to begin anew"));
  }
  return PrepareSchema();
}

absl::Status SqliteStore::PrepareSchema() {
  ASSIGN_OR_RETURN(const std::int64_t version, Number("PRAGMA user_version"));
  if (version == kSchemaVersion) {
    return absl::OkStatus();
  }
  if (version > kSchemaVersion) {
    return FailedPreconditionError(StrCat(path_, " has schema ", version,
                                          "; this controller knows ", kSchemaVersion,
                                          ": run the newer controller, or restore a copy"));
  }
  std::string sql = "BEGIN IMMEDIATE;";
  for (std::int64_t step = std::max<std::int64_t>(version, 0); step < kSchemaVersion; ++step) {
    sql += kSchemaSteps[step];
  }
  StrAppend(&sql, "PRAGMA user_version = ", kSchemaVersion, "; COMMIT;");
  return Annotate(Execute(sql),
                  StrCat("taking ", path_, " from schema ", version, " to ", kSchemaVersion));
}

absl::Status SqliteStore::Error(const std::string& attempted) const {
  const int result = db_ == nullptr ? SQLITE_NOMEM : sqlite3_extended_errcode(db_);
  return MakeStatus(CodeOf(result), StrCat(path_, ": ", attempted, ": ",
                                           db_ == nullptr ? "out of memory" : sqlite3_errmsg(db_),
                                           " (SQLite code ", result, ")"));
}

absl::Status SqliteStore::Execute(const std::string& sql) {
  return sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK
             ? absl::OkStatus()
             : Error(StrCat("running ", sql.substr(0, 60)));
}

absl::StatusOr<SqliteStore::Statement> SqliteStore::Prepare(const char* sql) {
  sqlite3_stmt*& statement = statements_[sql];
  if (statement == nullptr && sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT,
                                                 &statement, nullptr) != SQLITE_OK) {
    statements_.erase(sql);
    return Error(StrCat("preparing ", sql));
  }
  return Statement(this, statement);
}

absl::StatusOr<std::int64_t> SqliteStore::Number(const char* sql) {
  ASSIGN_OR_RETURN(Statement statement, Prepare(sql));
  ASSIGN_OR_RETURN(const bool row, statement.Row());
  return row ? statement.NumberAt(0) : 0;
}

absl::StatusOr<StoreSnapshot> SqliteStore::Load() {
  StoreSnapshot snapshot;
  {
    ASSIGN_OR_RETURN(Statement rows, Prepare("SELECT job FROM jobs ORDER BY uid"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, rows.Row());
      if (!row) {
        break;
      }
      RETURN_IF_ERROR(rows.ParseAt(0, &snapshot.jobs.emplace_back()));
    }
  }
  {
    ASSIGN_OR_RETURN(Statement rows,
                     Prepare("SELECT attempt FROM attempts ORDER BY job_uid, number"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, rows.Row());
      if (!row) {
        break;
      }
      RETURN_IF_ERROR(rows.ParseAt(0, &snapshot.attempts.emplace_back()));
    }
  }
  {
    ASSIGN_OR_RETURN(Statement rows,
                     Prepare("SELECT job_uid, plan FROM plans ORDER BY job_uid, version"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, rows.Row());
      if (!row) {
        break;
      }
      StoredPlan& plan = snapshot.plans.emplace_back();
      plan.job_uid = rows.TextAt(0);
      RETURN_IF_ERROR(rows.ParseAt(1, &plan.plan));
    }
  }
  {
    ASSIGN_OR_RETURN(Statement rows,
                     Prepare("SELECT request_id, method, target, fingerprint FROM requests"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, rows.Row());
      if (!row) {
        break;
      }
      snapshot.requests.push_back({.request_id = rows.TextAt(0),
                                   .method = rows.TextAt(1),
                                   .job_uid = rows.TextAt(2),
                                   .fingerprint = static_cast<std::uint64_t>(rows.NumberAt(3))});
    }
  }
  {
    ASSIGN_OR_RETURN(Statement rows, Prepare("SELECT worker, reason FROM drains"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, rows.Row());
      if (!row) {
        break;
      }
      snapshot.drains.push_back({.worker = rows.TextAt(0), .reason = rows.TextAt(1)});
    }
  }
  ASSIGN_OR_RETURN(snapshot.revision, Number("SELECT value FROM meta WHERE key = 'revision'"));
  return snapshot;
}

absl::Status SqliteStore::Commit(const StoreBatch& batch) {
  RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  absl::Status status = Apply(batch);
  if (status.ok()) {
    status = Execute("COMMIT");
  }
  if (!status.ok() && sqlite3_get_autocommit(db_) == 0) {
    // The first error is the one to tell; a failed rollback leaves the transaction to the next try.
    Execute("ROLLBACK").IgnoreError();
  }
  return status;
}

absl::Status SqliteStore::Apply(const StoreBatch& batch) {
  {
    ASSIGN_OR_RETURN(Statement put, Prepare("INSERT INTO jobs VALUES (?, ?) "
                                            "ON CONFLICT (uid) DO UPDATE SET job = excluded.job"));
    for (const internal::v1::StoredJob& job : batch.jobs) {
      const std::string blob = job.SerializeAsString();
      RETURN_IF_ERROR(put.Text(job.job().uid()).Blob(blob).Run());
    }
  }
  {
    ASSIGN_OR_RETURN(
        Statement put,
        Prepare("INSERT INTO attempts VALUES (?, ?, ?) "
                "ON CONFLICT (job_uid, number) DO UPDATE SET attempt = excluded.attempt"));
    for (const internal::v1::StoredAttempt& attempt : batch.attempts) {
      const std::string blob = attempt.SerializeAsString();
      RETURN_IF_ERROR(
          put.Text(attempt.job_uid()).Number(attempt.attempt().number()).Blob(blob).Run());
    }
  }
  {
    ASSIGN_OR_RETURN(Statement put,
                     Prepare("INSERT INTO plans VALUES (?, ?, ?) "
                             "ON CONFLICT (job_uid, version) DO UPDATE SET plan = excluded.plan"));
    for (const StoredPlan& plan : batch.plans) {
      const std::string blob = plan.plan.SerializeAsString();
      RETURN_IF_ERROR(put.Text(plan.job_uid).Number(plan.plan.version()).Blob(blob).Run());
    }
  }
  {
    ASSIGN_OR_RETURN(Statement put, Prepare("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?)"));
    for (const StoredRequest& request : batch.requests) {
      RETURN_IF_ERROR(put.Text(request.request_id)
                          .Text(request.method)
                          .Text(request.job_uid)
                          .Number(static_cast<std::int64_t>(request.fingerprint))
                          .Run());
    }
  }
  {
    ASSIGN_OR_RETURN(Statement put, Prepare("INSERT INTO events VALUES (?, ?, ?)"));
    for (const StoredEvent& event : batch.events) {
      const std::string blob = event.event.SerializeAsString();
      RETURN_IF_ERROR(put.Number(event.event.revision()).Text(event.job_uid).Blob(blob).Run());
    }
  }
  if (!batch.events.empty()) {
    ASSIGN_OR_RETURN(Statement set, Prepare("UPDATE meta SET value = ? WHERE key = 'revision'"));
    RETURN_IF_ERROR(set.Number(batch.events.back().event.revision()).Run());
  }
  for (const StoredDrain& drain : batch.drains) {
    if (drain.reason.empty()) {
      ASSIGN_OR_RETURN(Statement remove, Prepare("DELETE FROM drains WHERE worker = ?"));
      RETURN_IF_ERROR(remove.Text(drain.worker).Run());
    } else {
      ASSIGN_OR_RETURN(Statement put, Prepare("INSERT OR REPLACE INTO drains VALUES (?, ?)"));
      RETURN_IF_ERROR(put.Text(drain.worker).Text(drain.reason).Run());
    }
  }
  for (const auto& [uid, keep] : batch.trims) {
    ASSIGN_OR_RETURN(Statement trim,
                     Prepare("DELETE FROM events WHERE job_uid = ?1 AND revision <= "
                             "(SELECT revision FROM events WHERE job_uid = ?1 "
                             "ORDER BY revision DESC LIMIT 1 OFFSET ?2)"));
    RETURN_IF_ERROR(trim.Text(uid).Number(keep).Run());
  }
  if (!batch.telemetry.empty()) {
    ASSIGN_OR_RETURN(Statement put,
                     Prepare("INSERT OR REPLACE INTO telemetry VALUES (?, ?, ?, ?)"));
    for (const StoredTelemetry& row : batch.telemetry) {
      const std::string blob = row.history.SerializeAsString();
      RETURN_IF_ERROR(put.Text(row.job_uid).Number(row.sequence).Number(row.cost).Blob(blob).Run());
    }
  }
  for (const auto& [uid, first] : batch.telemetry_trims) {
    ASSIGN_OR_RETURN(Statement trim,
                     Prepare("DELETE FROM telemetry WHERE job_uid = ? AND sequence < ?"));
    RETURN_IF_ERROR(trim.Text(uid).Number(first).Run());
  }
  for (const std::string& uid : batch.forgotten_jobs) {
    for (const char* sql :
         {"DELETE FROM jobs WHERE uid = ?", "DELETE FROM attempts WHERE job_uid = ?",
          "DELETE FROM plans WHERE job_uid = ?", "DELETE FROM events WHERE job_uid = ?",
          "DELETE FROM requests WHERE target = ?", "DELETE FROM telemetry WHERE job_uid = ?"}) {
      ASSIGN_OR_RETURN(Statement remove, Prepare(sql));
      RETURN_IF_ERROR(remove.Text(uid).Run());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::JobEvent>> SqliteStore::ReadEvents(const std::string& job_uid,
                                                                  std::int64_t after,
                                                                  std::int64_t limit) {
  std::vector<v1::JobEvent> events;
  ASSIGN_OR_RETURN(Statement rows, Prepare("SELECT event FROM events WHERE job_uid = ? AND "
                                           "revision > ? ORDER BY revision LIMIT ?"));
  rows.Text(job_uid).Number(after).Number(limit);
  while (true) {
    ASSIGN_OR_RETURN(const bool row, rows.Row());
    if (!row) {
      return events;
    }
    RETURN_IF_ERROR(rows.ParseAt(0, &events.emplace_back()));
  }
}

absl::StatusOr<std::vector<TelemetryRow>> SqliteStore::ListTelemetry(const std::string& job_uid) {
  std::vector<TelemetryRow> listed;
  ASSIGN_OR_RETURN(
      Statement rows,
      Prepare("SELECT sequence, cost FROM telemetry WHERE job_uid = ? ORDER BY sequence"));
  rows.Text(job_uid);
  while (true) {
    ASSIGN_OR_RETURN(const bool row, rows.Row());
    if (!row) {
      return listed;
    }
    listed.push_back({.sequence = rows.NumberAt(0), .cost = rows.NumberAt(1)});
  }
}

absl::StatusOr<std::vector<StoredTelemetry>> SqliteStore::ReadTelemetry(const std::string& job_uid,
                                                                        std::int64_t first) {
  std::vector<StoredTelemetry> telemetry;
  ASSIGN_OR_RETURN(Statement rows, Prepare("SELECT sequence, cost, history FROM telemetry WHERE "
                                           "job_uid = ? AND sequence >= ? ORDER BY sequence"));
  rows.Text(job_uid).Number(first);
  while (true) {
    ASSIGN_OR_RETURN(const bool row, rows.Row());
    if (!row) {
      return telemetry;
    }
    StoredTelemetry& read = telemetry.emplace_back();
    read.job_uid = job_uid;
    read.sequence = rows.NumberAt(0);
    read.cost = rows.NumberAt(1);
    RETURN_IF_ERROR(rows.ParseAt(2, &read.history));
  }
}

}  // namespace octavo
