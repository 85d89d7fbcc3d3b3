// One event per line, for people and for grep:
//
//   info 2026-11-29T13:40:42.123456Z octavo-worker rank_started train_job=jobs/a attempt=2 rank=0
//   pid=4711
//
//   InitLog({.component = "octavo-worker"});
//   SetLogContext({.train_job = "jobs/a", .attempt = 2, .rank = 0});     // a rank process: once
//   LogInfo("rank_started", {{"pid", pid}, {"command", argv}});
//
// Level, UTC time with microseconds, component, event name (snake_case), then key=value pairs.
// Values with spaces, quotes, '=' or control characters are quoted and escaped, so a line is always
// one line. Everything goes to stderr (stdout belongs to results), and to a file when one is named.
// Before InitLog, events go to stderr with component "-". Thread-safe. A log call never fails and
// never throws; a full disk loses file lines, not stderr lines.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/str.h"

namespace octavo {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogOptions {
  std::string component = "-";  // e.g. "octavo-controller"
  LogLevel min_level = LogLevel::kInfo;
  std::string file;  // empty: stderr only; otherwise appended to as well
};

// Replaces the process's log set-up. Error: the file cannot be opened (names it).
absl::Status InitLog(const LogOptions& options);

// Parses "debug", "info", "warning", "error".
std::optional<LogLevel> ParseLogLevel(std::string_view text);

// What this process works for; appended to every following event of the process.
struct LogContext {
  std::string train_job;      // empty: left out
  std::int64_t attempt = -1;  // negative: left out
  int rank = -1;              // negative: left out
};
void SetLogContext(const LogContext& context);

// One key=value pair; the value may be text, number, bool, absl::Status or anything streamable.
struct LogField {
  template <class T>
  LogField(std::string_view field_key, const T& field_value)
      : key(field_key), value(StrCat(field_value)) {}

  std::string key;
  std::string value;
};

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

inline void LogDebug(std::string_view event, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kDebug, event, fields);
}
inline void LogInfo(std::string_view event, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, event, fields);
}
inline void LogWarning(std::string_view event, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, event, fields);
}
inline void LogError(std::string_view event, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, event, fields);
}

// The text after the component, e.g. `rank_started train_job=jobs/a pid=4711` (pure; for tests).
std::string FormatLogEvent(std::string_view event, const LogContext& context,
                           std::initializer_list<LogField> fields);

}  // namespace octavo
