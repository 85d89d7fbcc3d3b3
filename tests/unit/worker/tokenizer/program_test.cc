// The program octavo-tokenizer itself: what it refuses to write over, and its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "base/subprocess.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

class TokenizerProgram : public ::testing::Test {
 protected:
  TokenizerProgram() {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      StrAppend(&text, "the router sends token ", i, " to expert ", i % 7, "\n");
    }
    EXPECT_TRUE(Fs().WriteFileAtomic(dir_.File("text"), text).ok());
  }
  // Exit code; what it says is in log().
  int Run(std::vector<std::string> arguments) {
    char path[4096];
    const ssize_t size = ::readlink("/proc/self/exe", path, sizeof(path));
    arguments.insert(arguments.begin(),
                     JoinPath(DirectoryName(std::string(path, static_cast<std::size_t>(size))),
                              "octavo-tokenizer"));
    auto process = Subprocess::Spawn(
        {.argv = arguments, .stdout_path = dir_.File("log"), .stderr_path = dir_.File("log")});
    EXPECT_TRUE(process.ok()) << ToString(process.status());
    const auto end = (*process)->Wait(DeadlineAfter(std::chrono::seconds(120)));
    EXPECT_TRUE(end.has_value()) << "it still runs";
    return end.has_value() ? end->code : -1;
  }
  std::string log() { return *Fs().ReadFile(dir_.File("log")); }

  TempDir dir_;
};

TEST_F(TokenizerProgram, ReplacesAModelAndADatasetOnlyWhenToldTo) {
  const std::string model = dir_.File("sp.model"), dataset = dir_.File("text.octd");
  const std::vector<std::string> train = {
      "train", dir_.File("text"), "--output", model, "--vocab-size", "300", "--threads", "1"};
  const std::vector<std::string> build = {
      "build", dir_.File("text"), "--output", dataset, "--model", model, "--threads", "1"};
  for (const auto& [arguments, output] : {std::pair{train, model}, std::pair{build, dataset}}) {
    SCOPED_TRACE(output);
    ASSERT_EQ(Run(arguments), 0) << log();
    const std::string first = *Fs().ReadFile(output);
    ASSERT_TRUE(Fs().WriteFileAtomic(output, "somebody's").ok());
    EXPECT_EQ(Run(arguments), 4) << log();
    EXPECT_THAT(log(), HasSubstr(output + ": there is one already"));
    EXPECT_THAT(log(), HasSubstr("--overwrite"));
    EXPECT_EQ(*Fs().ReadFile(output), "somebody's");
    std::vector<std::string> overwrite = arguments;
    overwrite.push_back("--overwrite");
    EXPECT_EQ(Run(overwrite), 0) << log();
    EXPECT_EQ(*Fs().ReadFile(output), first);
  }
}

TEST_F(TokenizerProgram, NamesWhatIsMissingAndWhatIsWrong) {
  EXPECT_EQ(
      Run({"build", dir_.File("text"), "--output", dir_.File("d"), "--model", dir_.File("none")}),
      3);
  EXPECT_THAT(log(), HasSubstr(dir_.File("none")));
  EXPECT_EQ(Run({"train", dir_.File("text"), "--output", dir_.File("m"), "--type", "word"}), 2);
  EXPECT_EQ(Run({}), 2);
  EXPECT_FALSE(Fs().Exists(dir_.File("d")));
  EXPECT_FALSE(Fs().Exists(dir_.File("m")));
}

}  // namespace
}  // namespace octavo
