#include "worker/data/blend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/status.h"
#include "base/str.h"
#include "tests/support/temp_dir.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/loader.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

// Tokens first, first + 1, …: a token says which dataset and where.
void WriteCounting(const std::string& path, std::int32_t first, std::int32_t count) {
  auto writer = DatasetWriter::Create(Fs(), path, 4, 1 << 20);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::int32_t i = 0; i < count; ++i) {
    tokens[static_cast<std::size_t>(i)] = first + i;
  }
  ASSERT_TRUE((*writer)->Append(tokens).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
}

class BlendTest : public ::testing::Test {
 protected:
  static constexpr std::int32_t kSmall = 10 * 8 + 1, kLarge = 200 * 8 + 1, kFirstOfLarge = 100000;
  BlendTest() {
    WriteCounting(dir_.File("small"), 0, kSmall);
    EXPECT_TRUE(Fs().CreateDirectories(dir_.File("sub")).ok());
    WriteCounting(dir_.File("sub/large"), kFirstOfLarge, kLarge);
    Write("octavo-blend v1\n# weight path\n\n 3\tsmall \n1 sub/large\n");
  }
  void Write(const std::string& text) {
    EXPECT_TRUE(Fs().WriteFileAtomic(dir_.File("blend"), text).ok());
  }
  std::string OpenError(const std::string& text) {
    Write(text);
    return Message(OpenTokenDataset(Fs(), dir_.File("blend")).status());
  }
  std::shared_ptr<const TokenDataset> Open() {
    auto dataset = OpenTokenDataset(Fs(), dir_.File("blend"));
    EXPECT_TRUE(dataset.ok()) << ToString(dataset.status());
    return std::shared_ptr<const TokenDataset>(*std::move(dataset));
  }
  // First tokens of sequences [0, steps · 4) as `ranks` ranks load them.
  std::vector<std::int32_t> Order(std::int32_t ranks, std::int64_t steps, LoaderOptions options) {
    const auto dataset = Open();
    if (options.region.end == 0) {
      options.region = {0, dataset->token_count()};
    }
    options.sequence_length = 8;
    options.vocab = 1 << 20;
    options.ranks = ranks;
    options.microbatch_sequences = 4 / ranks;
    std::vector<std::int32_t> order(static_cast<std::size_t>(steps * 4));
    for (options.rank = 0; options.rank < ranks; ++options.rank) {
      auto loader = Loader::Create(dataset, options);
      EXPECT_TRUE(loader.ok()) << ToString(loader.status());
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(4 / ranks) * 8), targets = tokens;
      for (std::int64_t step = 0; step < steps; ++step) {
        EXPECT_TRUE(loader->Load(step, 0, tokens, targets).ok());
        for (std::int32_t s = 0; s < 4 / ranks; ++s) {
          order[static_cast<std::size_t>(step * 4 + loader->FirstSequence(0) + s)] =
              tokens[static_cast<std::size_t>(s) * 8];
        }
      }
    }
    return order;
  }

  TempDir dir_;
};

TEST_F(BlendTest, ItReadsLikeItsPartsOneAfterTheOther) {
  const auto dataset = Open();
  EXPECT_EQ(dataset->token_count(), kSmall + kLarge);
  EXPECT_EQ(dataset->document_count(), 2);
  EXPECT_EQ(dataset->DocumentEnd(0), kSmall);
  EXPECT_EQ(dataset->DocumentEnd(1), kSmall + kLarge);
  std::vector<std::int32_t> tokens(4);
  ASSERT_TRUE(dataset->Read(kSmall - 2, tokens).ok());
  EXPECT_EQ(tokens,
            (std::vector<std::int32_t>{kSmall - 2, kSmall - 1, kFirstOfLarge, kFirstOfLarge + 1}));
  EXPECT_FALSE(dataset->Read(kSmall + kLarge - 3, tokens).ok());
  EXPECT_TRUE(dataset->Verify().ok());
  EXPECT_EQ(dataset->format_name(), "blend of 2");
}

TEST_F(BlendTest, SequencesComeInProportionToTheWeightsAndEachPartInWholeEpochs) {
  constexpr std::int64_t kSteps = kBlendCycle / 4;
  const auto order = Order(1, kSteps, {.seed = 5});
  std::map<std::int32_t, int> seen;
  std::int64_t small = 0;
  for (const std::int32_t token : order) {
    ++seen[token];
    small += token < kFirstOfLarge ? 1 : 0;
  }
  EXPECT_EQ(small, kBlendCycle * 3 / 4) << "a whole cycle holds the share exactly";
  // 12288 sequences of 10 samples and 4096 of 200: every sample of a part once an epoch.
  EXPECT_EQ(seen.size(), 210u);
  for (const auto& [token, times] : seen) {
    const std::int64_t samples = token < kFirstOfLarge ? 10 : 200;
    const std::int64_t total = token < kFirstOfLarge ? 12288 : 4096;
    EXPECT_GE(times, total / samples) << token;
    EXPECT_LE(times, total / samples + 1) << token;
  }
}

TEST_F(BlendTest, SharesAreKeptInEveryStretchOfTheOrder) {
  // 400 sequences drawn without replacement from a cycle: the standard deviation is 8.7.
  const auto order = Order(1, 1000, {.seed = 11});
  for (std::size_t begin = 0; begin < order.size(); begin += 400) {
    int small = 0;
    for (std::size_t i = begin; i < begin + 400; ++i) {
      small += order[i] < kFirstOfLarge ? 1 : 0;
    }
    EXPECT_NEAR(small, 300, 6 * 8.7) << "from sequence " << begin;
  }
}

TEST_F(BlendTest, TheOrderIsAPureFunctionOfSeedAndStepOnAnyNumberOfRanks) {
  const auto one = Order(1, 50, {.seed = 5});
  EXPECT_EQ(Order(2, 50, {.seed = 5}), one);
  EXPECT_EQ(Order(4, 50, {.seed = 5}), one);
  EXPECT_NE(Order(1, 50, {.seed = 6}), one);
}

TEST_F(BlendTest, TheValidationTailIsTheTailOfEveryPart) {
  const auto dataset = Open();
  const TrainValidationSplit split = SplitTail(dataset->token_count(), 0.2);
  std::set<std::int32_t> trained;
  for (const std::int32_t token : Order(1, 1000, {.region = split.train, .seed = 5})) {
    trained.insert(token);
  }
  std::set<std::int32_t> parts;
  for (const std::int32_t token :
       Order(1, 100, {.region = split.validation, .seed = 5, .shuffle = false})) {
    EXPECT_EQ(trained.count(token), 0u) << token;
    parts.insert(token / kFirstOfLarge);
    const std::int32_t size = token < kFirstOfLarge ? kSmall : kLarge;
    EXPECT_GE(token % kFirstOfLarge, size * 4 / 5 - 1) << token;
  }
  EXPECT_EQ(parts.size(), 2u);
}

TEST_F(BlendTest, MistakesAreNamedWithTheirLine) {
  EXPECT_THAT(OpenError("octavo-blend v1\n"), HasSubstr("no dataset is listed"));
  EXPECT_THAT(OpenError("octavo-blend v2\n1 small\n"), HasSubstr("blend:1: found"));
  EXPECT_THAT(OpenError("octavo-blend v1\n1 small\nsmall 1\n"), HasSubstr("blend:3: found"));
  EXPECT_THAT(OpenError("octavo-blend v1\n-1 small\n"), HasSubstr("weight above 0"));
  EXPECT_THAT(OpenError("octavo-blend v1\n0 small\n"), HasSubstr("weight above 0"));
  EXPECT_THAT(OpenError("octavo-blend v1\n1\n"), HasSubstr("blend:2: found"));
  EXPECT_THAT(OpenError("octavo-blend v1\n1 missing\n"), HasSubstr("opening a part of"));
  EXPECT_THAT(OpenError("octavo-blend v1\n1 blend\n"), HasSubstr("is a blend itself"))
      << "a blend that lists itself must not recurse for ever";
  Write("octavo-blend v1\n1e-9 small\n1 sub/large\n");
  const auto dataset = Open();
  const auto loader = Loader::Create(
      dataset, {.region = {0, dataset->token_count()}, .sequence_length = 8, .vocab = 1 << 20});
  EXPECT_THAT(Message(loader.status()), HasSubstr("part 1 of the blend"));
}

}  // namespace
}  // namespace octavo
