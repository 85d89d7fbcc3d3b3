// Arguments that got through: NaN passed every range, an empty controller address meant a long
// wait, port 99999 was taken modulo 65536, and `octavo submit /dev/zero` filled the memory.
#include <gmock/gmock.h>

#include <sstream>

#include "base/file.h"
#include "cli/cli.h"
#include "cli/exit_codes.h"
#include "cli/validators.h"
#include "proto/limits.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Said {
  int code;
  std::string err;
};

Said Octavo(const std::vector<std::string>& arguments) {
  std::ostringstream out, err;
  const int code = RunCli(arguments, {}, out, err);
  return {code, err.str() + out.str()};
}

std::string Check(const CLI::Validator& validator, std::string text) { return validator(text); }

TEST(CliArguments, NanIsInNoRange) {
  for (const char* text : {"nan", "NaN", "-nan", "inf", "-inf", "", "1x", "0", "9"}) {
    EXPECT_THAT(Check(FiniteRange(1, 8), text), HasSubstr("from 1 to 8")) << text;
  }
  EXPECT_THAT(Check(FiniteRange(1, 8), "1"), IsEmpty());
  EXPECT_THAT(Check(FiniteRange(1, 8), "2.5e0"), IsEmpty());
  EXPECT_EQ(Octavo({"list", "--timeout", "nan"}).code, kExitUsage);
  EXPECT_EQ(Octavo({"watch", "job", "--give-up", "nan"}).code, kExitUsage);
}

TEST(CliArguments, AnEmptyControllerIsAWrongCommandLine) {
  EXPECT_EQ(Octavo({"--controller", "", "list"}).code, kExitUsage);
}

TEST(CliArguments, PortsThatDoNotExistAreRefused) {
  for (const char* text : {"127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1",
                           "127.0.0.1:", "127.0.0.1:http", ""}) {
    EXPECT_THAT(Check(ListenAddress(), text), HasSubstr("from 0 (any) to 65535")) << text;
  }
  for (const char* text : {"127.0.0.1:0", ":7070", "[::1]:65535", "host.example:1"}) {
    EXPECT_THAT(Check(ListenAddress(), text), IsEmpty()) << text;
  }
}

TEST(CliArguments, WorkerNamesArePlain) {
  for (const char* text : {"a b", "a/b", "..", "", "\xc3\xbc", "a\n"}) {
    EXPECT_THAT(Check(PlainName(), text), Not(IsEmpty())) << text;
  }
  EXPECT_THAT(Check(PlainName(), "Host-1.example_a"), IsEmpty());
}

TEST(CliArguments, SubmitReadsFilesOnlyAndNoMoreThanASpecMayHave) {
  const Said endless = Octavo({"submit", "--dry-run", "/dev/zero"});
  EXPECT_EQ(endless.code, kExitUsage);
  EXPECT_THAT(endless.err, HasSubstr("not a regular file"));
  const TempDir dir;
  const Said folder = Octavo({"submit", "--dry-run", dir.path()});
  EXPECT_EQ(folder.code, kExitUsage);
  const Said missing = Octavo({"submit", "--dry-run", dir.File("nowhere.yaml")});
  EXPECT_EQ(missing.code, kExitNotFound);
  EXPECT_THAT(missing.err, HasSubstr("No such file"));
  ASSERT_TRUE(PosixFileSystem::Get()
                  .WriteFileAtomic(dir.File("long.yaml"), std::string(kMaxSpecBytes + 1, '#'))
                  .ok());
  const Said longer = Octavo({"submit", "--dry-run", dir.File("long.yaml")});
  EXPECT_EQ(longer.code, kExitUsage);
  EXPECT_THAT(longer.err, HasSubstr("longer than"));
}

}  // namespace
}  // namespace octavo
