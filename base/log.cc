#include "base/log.h"

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/basic_file_sink.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace octavo {
namespace {

constexpr char kPattern[] = "%l %Y-%m-%dT%H:%M:%S.%fZ %n %v";

struct State {
  std::mutex mutex;
  std::shared_ptr<spdlog::logger> logger;  // guarded by mutex
  LogContext context;                      // guarded by mutex
};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

std::shared_ptr<spdlog::logger> MakeLogger(const std::string& component, LogLevel min_level,
                                           std::vector<spdlog::sink_ptr> sinks) {
  auto logger = std::make_shared<spdlog::logger>(component, sinks.begin(), sinks.end());
  logger->set_formatter(
      std::make_unique<spdlog::pattern_formatter>(kPattern, spdlog::pattern_time_type::utc));
  logger->set_level(ToSpdlog(min_level));
  logger->flush_on(spdlog::level::debug);  // a crash right after an event must not lose the event
  // spdlog's default handler prints to stderr too, but rate-limits with wall-clock state of its
  // own.
  logger->set_error_handler([](const std::string&) {});
  return logger;
}

// Leaked on purpose: threads may log while static objects are destroyed.
State& GetState() {
  static State* state = [] {
    auto* fresh = new State;
    fresh->logger =
        MakeLogger("-", LogLevel::kInfo, {std::make_shared<spdlog::sinks::stderr_sink_mt>()});
    return fresh;
  }();
  return *state;
}

bool NeedsQuotes(std::string_view value) {
  if (value.empty()) {
    return true;
  }
  for (const char c : value) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7F) {
      return true;
    }
  }
  return false;
}

void AppendValue(std::string* out, std::string_view value) {
  if (!NeedsQuotes(value)) {
    *out += value;
    return;
  }
  *out += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += c;
    } else if (c == '\n') {
      *out += "\\n";
    } else if (c == '\t') {
      *out += "\\t";
    } else if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) {
      constexpr char kHex[] = "0123456789abcdef";
      *out += "\\x";
      *out += kHex[(static_cast<unsigned char>(c) >> 4) & 0xF];
      *out += kHex[static_cast<unsigned char>(c) & 0xF];
    } else {
      *out += c;
    }
  }
  *out += '"';
}

void AppendField(std::string* out, std::string_view key, std::string_view value) {
  *out += ' ';
  *out += key;
  *out += '=';
  AppendValue(out, value);
}

}  // namespace

std::optional<LogLevel> ParseLogLevel(std::string_view text) {
  if (text == "debug") {
    return LogLevel::kDebug;
  }
  if (text == "info") {
    return LogLevel::kInfo;
  }
  if (text == "warning") {
    return LogLevel::kWarning;
  }
  if (text == "error") {
    return LogLevel::kError;
  }
  return std::nullopt;
}

absl::Status InitLog(const LogOptions& options) {
  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
  if (!options.file.empty()) {
    try {
      sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file));
    } catch (const spdlog::spdlog_ex& error) {
      return UnavailableError(StrCat("opening log file ", options.file, ": ", error.what()));
    }
  }
  auto logger = MakeLogger(options.component, options.min_level, std::move(sinks));
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.logger = std::move(logger);
  return absl::OkStatus();
}

void SetLogContext(const LogContext& context) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.context = context;
}

std::string FormatLogEvent(std::string_view event, const LogContext& context,
                           std::initializer_list<LogField> fields) {
  std::string text(event);
  if (!context.train_job.empty()) {
    AppendField(&text, "train_job", context.train_job);
  }
  if (context.attempt >= 0) {
    AppendField(&text, "attempt", StrCat(context.attempt));
  }
  if (context.rank >= 0) {
    AppendField(&text, "rank", StrCat(context.rank));
  }
  for (const LogField& field : fields) {
    AppendField(&text, field.key, field.value);
  }
  return text;
}

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  State& state = GetState();
  std::shared_ptr<spdlog::logger> logger;
  LogContext context;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    logger = state.logger;
    context = state.context;
  }
  if (!logger->should_log(ToSpdlog(level))) {
    return;
  }
  // The text is an argument, never a format: braces in a value must not be interpreted.
  logger->log(ToSpdlog(level), "{}", FormatLogEvent(event, context, fields));
}

}  // namespace octavo
