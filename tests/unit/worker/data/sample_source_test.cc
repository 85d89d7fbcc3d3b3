#include "worker/data/sample_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "base/str.h"
#include "tests/support/temp_dir.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/loader.h"

namespace octavo {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A dataset of documents with these lengths; token i has value i + 1.
std::shared_ptr<const TokenDataset> Documents(const TempDir& dir,
                                              const std::vector<std::int32_t>& lengths) {
  auto& fs = PosixFileSystem::Get();
  auto writer = DatasetWriter::Create(fs, dir.File("d"), 4, 1 << 20);
  std::int32_t next = 1;
  for (const std::int32_t length : lengths) {
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < length; ++i) {
      tokens.push_back(next++);
    }
    EXPECT_TRUE((*writer)->Append(tokens).ok());
    (*writer)->EndDocument();
  }
  EXPECT_TRUE((*writer)->Finish().ok());
  return std::shared_ptr<const TokenDataset>(*OpenTokenDataset(fs, dir.File("d")));
}

struct Sequence {
  std::vector<std::int32_t> tokens, targets;
};

// All samples of 4 tokens.
std::vector<Sequence> ReadAll(const std::shared_ptr<const TokenDataset>& dataset, DocumentMode mode,
                              TokenRegion region) {
  const auto source =
      SampleSource::Create(dataset, {.region = region, .sequence_length = 4, .documents = mode});
  EXPECT_TRUE(source.ok()) << ToString(source.status());
  std::vector<Sequence> out(static_cast<std::size_t>(source->samples()));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto sample = static_cast<std::int64_t>(i);
    out[i].tokens.resize(4);
    out[i].targets.resize(4);
    EXPECT_TRUE(source->Read(sample, out[i].tokens, out[i].targets).ok());
    EXPECT_EQ(source->CountTargets(sample),
              4 - std::count(out[i].targets.begin(), out[i].targets.end(), -1));
  }
  return out;
}

TEST(SampleSourceTest, PackedIgnoresDocuments) {
  TempDir dir;
  const auto all = ReadAll(Documents(dir, {3, 7}), DocumentMode::kPacked, {0, 10});
  ASSERT_EQ(all.size(), 2u);
  EXPECT_THAT(all[0].tokens, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(all[0].targets, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(all[1].targets, ElementsAre(6, 7, 8, 9));
}

TEST(SampleSourceTest, MaskedTakesNoLossForTheFirstTokenOfADocument) {
  TempDir dir;
  const auto all = ReadAll(Documents(dir, {3, 1, 5, 4}), DocumentMode::kMasked, {0, 13});
  ASSERT_EQ(all.size(), 3u);
  EXPECT_THAT(all[0].tokens, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(all[0].targets, ElementsAre(2, 3, -1, -1));  // 4 and 5 begin documents
  EXPECT_THAT(all[1].targets, ElementsAre(6, 7, 8, 9));
  EXPECT_THAT(all[2].targets, ElementsAre(-1, 11, 12, 13));
}

TEST(SampleSourceTest, SeparateKeepsDocumentsApartAndPads) {
  TempDir dir;
  const auto all = ReadAll(Documents(dir, {3, 1, 6, 5}), DocumentMode::kSeparate, {0, 15});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_THAT(all[0].tokens, ElementsAre(1, 2, 0, 0));
  EXPECT_THAT(all[0].targets, ElementsAre(2, 3, -1, -1));
  EXPECT_THAT(all[1].tokens, ElementsAre(5, 6, 7, 8));
  EXPECT_THAT(all[1].targets, ElementsAre(6, 7, 8, 9));
  EXPECT_THAT(all[2].tokens, ElementsAre(9, 0, 0, 0));
  EXPECT_THAT(all[2].targets, ElementsAre(10, -1, -1, -1));
  EXPECT_THAT(all[3].targets, ElementsAre(12, 13, 14, 15));
}

// Every token but the first of a document is a target exactly once, whatever the lengths and
// region.
TEST(SampleSourceTest, SeparateTrainsOnEveryTokenThatSomethingForetells) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(StrCat("seed ", seed));
  std::mt19937 rng(seed);
  for (int round = 0; round < 50; ++round) {
    TempDir dir;
    std::vector<std::int32_t> lengths;
    std::int64_t total = 0;
    for (int d = 0; d < 20; ++d) {
      lengths.push_back(1 + static_cast<std::int32_t>(rng() % 12));
      total += lengths.back();
    }
    const std::int64_t begin = static_cast<std::int64_t>(rng() % 10);
    const std::int64_t end = total - static_cast<std::int64_t>(rng() % 10);
    std::vector<bool> wanted(static_cast<std::size_t>(total) + 1);
    std::int64_t at = 0;
    for (const std::int32_t length : lengths) {
      for (std::int64_t i = std::max(at, begin) + 1; i < std::min(at + length, end); ++i) {
        wanted[static_cast<std::size_t>(i) + 1] = true;
      }
      at += length;
    }
    for (const Sequence& s :
         ReadAll(Documents(dir, lengths), DocumentMode::kSeparate, {begin, end})) {
      for (int i = 0; i < 4; ++i) {
        const std::int32_t target = s.targets[static_cast<std::size_t>(i)];
        if (target >= 0) {
          EXPECT_EQ(target, s.tokens[static_cast<std::size_t>(i)] + 1);
          EXPECT_TRUE(wanted[static_cast<std::size_t>(target)]) << target;
          wanted[static_cast<std::size_t>(target)] = false;
        }
      }
    }
    EXPECT_EQ(std::count(wanted.begin(), wanted.end(), true), 0);
  }
}

TEST(SampleSourceTest, TheStepsTargetsAreCountedAlikeOnEveryRank) {
  TempDir dir;
  const auto dataset = Documents(dir, {3, 1, 6, 5, 9, 2, 17, 4, 30});
  for (const DocumentMode mode :
       {DocumentMode::kPacked, DocumentMode::kMasked, DocumentMode::kSeparate}) {
    for (const std::int32_t ranks : {1, 2, 4}) {
      for (std::int64_t step = 0; step < 5; ++step) {
        std::int64_t targets = 0, counted = -1;
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
          auto loader = Loader::Create(dataset, {.region = {0, dataset->token_count()},
                                                 .sequence_length = 4,
                                                 .vocab = 1 << 20,
                                                 .seed = 3,
                                                 .rank = rank,
                                                 .ranks = ranks,
                                                 .microbatch_sequences = 4 / ranks,
                                                 .documents = mode});
          ASSERT_TRUE(loader.ok()) << ToString(loader.status());
          std::vector<std::int32_t> in(static_cast<std::size_t>(16 / ranks)), out = in;
          ASSERT_TRUE(loader->Load(step, 0, in, out).ok());
          targets += static_cast<std::int64_t>(out.size()) - std::count(out.begin(), out.end(), -1);
          EXPECT_TRUE(counted < 0 || counted == loader->CountTargets(step));
          counted = loader->CountTargets(step);
        }
        EXPECT_EQ(targets, counted);
      }
    }
  }
}

TEST(SampleSourceTest, WhatCannotBeIsRefused) {
  TempDir dir;
  const auto ones = Documents(dir, {1, 1, 1, 1, 1, 1});
  const auto separate = SampleSource::Create(
      ones, {.region = {0, 6}, .sequence_length = 4, .documents = DocumentMode::kSeparate});
  EXPECT_THAT(Message(separate.status()), HasSubstr("no document of two tokens or more"));
  const auto packed = SampleSource::Create(ones, {.region = {0, 4}, .sequence_length = 4});
  EXPECT_THAT(Message(packed.status()), HasSubstr("one sequence of 4 needs 5"));
}

}  // namespace
}  // namespace octavo
