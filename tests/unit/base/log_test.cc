#include "base/log.h"

#include "base/file.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

TEST(Log, EventIsOneLineWithContextAndQuotedValues) {
  const LogContext context = {.train_job = "jobs/a", .attempt = 2, .rank = 0};
  EXPECT_EQ(FormatLogEvent("rank_started", context, {{"pid", 4711}, {"ok", true}}),
            "rank_started train_job=jobs/a attempt=2 rank=0 pid=4711 ok=true");
  EXPECT_EQ(FormatLogEvent("e", {}, {{"text", "two\nlines \"x\" a=b\x01"}, {"empty", ""}}),
            "e text=\"two\\nlines \\\"x\\\" a=b\\x01\" empty=\"\"");
}

TEST(Log, FileGetsLevelUtcTimeComponentAndHonoursTheMinimum) {
  const TempDir dir;
  ASSERT_TRUE(InitLog({.component = "octavo-test", .file = dir.File("log")}).ok());
  LogDebug("hidden");
  LogWarning("disk_slow", {{"braces", "{}"}});
  const std::string text = *PosixFileSystem::Get().ReadFile(dir.File("log"));
  EXPECT_TRUE(std::string_view(text).find("hidden") == std::string_view::npos) << text;
  EXPECT_TRUE(StartsWith(text, "warning 20")) << text;
  EXPECT_TRUE(EndsWith(text, "Z octavo-test disk_slow braces={}\n")) << text;
  ASSERT_TRUE(InitLog({}).ok());
}

TEST(Log, UnwritableFileIsAnErrorThatNamesIt) {
  const absl::Status status = InitLog({.file = "/proc/no/such/log"});
  EXPECT_NE(std::string(status.message()).find("/proc/no/such/log"), std::string::npos);
}

}  // namespace
}  // namespace octavo
