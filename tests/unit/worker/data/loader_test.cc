#include "worker/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "base/status.h"
#include "tests/support/temp_dir.h"
#include "worker/data/dataset_writer.h"

namespace octavo {
namespace {

// Token i of the dataset is i, so that contents show positions.
std::shared_ptr<const TokenDataset> Counting(const TempDir& dir, std::int32_t count) {
  auto& fs = PosixFileSystem::Get();
  auto writer = DatasetWriter::Create(fs, dir.File("d"), 4, 1 << 20);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::int32_t i = 0; i < count; ++i) {
    tokens[static_cast<std::size_t>(i)] = i;
  }
  EXPECT_TRUE((*writer)->Append(tokens).ok());
  EXPECT_TRUE((*writer)->Finish().ok());
  return std::shared_ptr<const TokenDataset>(*OpenTokenDataset(fs, dir.File("d")));
}

// First token of every sequence of a step, in the global order.
std::vector<std::int32_t> StepOrder(const std::shared_ptr<const TokenDataset>& dataset,
                                    std::int64_t step, std::int32_t ranks, std::int32_t sequences,
                                    std::int32_t microbatches) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(ranks * sequences * microbatches));
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    auto loader = Loader::Create(dataset, {.region = {0, dataset->token_count()},
                                           .sequence_length = 8,
                                           .vocab = 1 << 20,
                                           .seed = 9,
                                           .rank = rank,
                                           .ranks = ranks,
                                           .microbatch_sequences = sequences,
                                           .microbatches = microbatches});
    EXPECT_TRUE(loader.ok()) << ToString(loader.status());
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(sequences) * 8);
    auto targets = tokens;
    for (std::int32_t m = 0; m < microbatches; ++m) {
      EXPECT_TRUE(loader->Load(step, m, tokens, targets).ok());
      for (std::int32_t s = 0; s < sequences; ++s) {
        const auto at = static_cast<std::size_t>(s) * 8;
        EXPECT_EQ(targets[at], tokens[at] + 1);
        EXPECT_EQ(targets[at + 7], tokens[at + 7] + 1);
        order[static_cast<std::size_t>(loader->FirstSequence(m) + s)] = tokens[at];
      }
    }
  }
  return order;
}

TEST(LoaderTest, AStepTrainsOnTheSameSequencesInTheSameOrderOnAnyNumberOfRanks) {
  TempDir dir;
  const auto dataset = Counting(dir, 1000);
  for (const std::int64_t step : {0, 1, 40}) {
    const auto one = StepOrder(dataset, step, 1, 8, 1);
    EXPECT_EQ(StepOrder(dataset, step, 1, 2, 4), one);
    EXPECT_EQ(StepOrder(dataset, step, 2, 2, 2), one);
    EXPECT_EQ(StepOrder(dataset, step, 4, 1, 2), one);
    EXPECT_EQ(StepOrder(dataset, step, 8, 1, 1), one);
  }
}

TEST(LoaderTest, AnEpochVisitsEverySequenceOnce) {
  TempDir dir;
  const auto dataset = Counting(dir, 8 * 24 + 1);
  std::vector<std::int32_t> seen;
  for (std::int64_t step = 0; step < 6; ++step) {
    const auto order = StepOrder(dataset, step, 2, 2, 1);
    seen.insert(seen.end(), order.begin(), order.end());
  }
  std::sort(seen.begin(), seen.end());
  for (std::int32_t i = 0; i < 24; ++i) {
    EXPECT_EQ(seen[static_cast<std::size_t>(i)], i * 8);
  }
}

TEST(LoaderTest, RegionsOfTheSplitShareNoToken) {
  const auto split = SplitTail(1000, 0.02);
  EXPECT_EQ(split.train.end, 980);
  EXPECT_EQ(split.validation.begin, 980);
  EXPECT_EQ(split.validation.end, 1000);
  EXPECT_EQ(SplitTail(1000, 0).validation.size(), 0);
  TempDir dir;
  const auto dataset = Counting(dir, 1000);
  auto loader = Loader::Create(dataset, {.region = SplitTail(1000, 0.1).validation,
                                         .sequence_length = 8,
                                         .vocab = 1 << 20,
                                         .shuffle = false});
  ASSERT_TRUE(loader.ok());
  EXPECT_EQ(loader->samples(), 12);
  std::vector<std::int32_t> tokens(8), targets(8);
  ASSERT_TRUE(loader->Load(1, 0, tokens, targets).ok());
  EXPECT_EQ(tokens[0], 908);
}

TEST(LoaderTest, TooShortDataAndTooSmallVocabularyAreRefused) {
  TempDir dir;
  const auto dataset = Counting(dir, 8);
  LoaderOptions options{.region = {0, 8}, .sequence_length = 8, .vocab = 1 << 20};
  const auto small = Loader::Create(dataset, options);
  ASSERT_FALSE(small.ok());
  EXPECT_NE(Message(small.status()).find("needs 9"), std::string::npos);
  options.sequence_length = 4;
  options.vocab = 100;
  const auto vocab = Loader::Create(dataset, options);
  ASSERT_FALSE(vocab.ok());
  EXPECT_NE(Message(vocab.status()).find("model.vocab_size is 100"), std::string::npos);
}

}  // namespace
}  // namespace octavo
