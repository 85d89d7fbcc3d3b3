// What a job's data.documents does to the loss: masked and padded targets count nowhere.
#include <gtest/gtest.h>

#include "base/str.h"
#include "tests/unit/worker/rank/rank_harness.h"

namespace octavo {
namespace {

using testing::TestJob;

// Documents of 5 to 40 bytes; every byte follows from the one before, but the first is arbitrary.
void WriteDocuments(TestJob& job) {
  auto writer = DatasetWriter::Create(*job.fs, job.config.data.path, 1, 256);
  std::uint32_t noise = 1;
  for (int d = 0; d < 400; ++d) {
    noise = noise * 1664525u + 1013904223u;
    std::uint32_t state = noise >> 20;
    std::string text;
    for (std::uint32_t i = 0; i < 5 + (noise >> 8) % 36; ++i) {
      text += static_cast<char>(state % 64);
      state = state * 5 + 3;
    }
    ASSERT_TRUE((*writer)->AppendBytes(text).ok());
    (*writer)->EndDocument();
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

TEST(DocumentsTest, OnlyTargetsWithALossCountOnAnyNumberOfRanks) {
  for (const DocumentMode mode : {DocumentMode::kMasked, DocumentMode::kSeparate}) {
    std::vector<double> expected;
    for (const int ranks : {1, 2, 4}) {
      TestJob job(RecipeKind::kFp32);
      WriteDocuments(job);
      job.config.steps = 3;
      job.config.data.documents = mode;
      job.config.validation_interval = 3;
      job.config.validation_batches = 8;
      job.config.data.validation_fraction = 0.3;
      EXPECT_ALL_OK(job.Run(ranks, ranks));
      const auto steps = job.host().steps();
      ASSERT_EQ(steps.size(), 3u);
      for (const auto& step : steps) {
        EXPECT_LT(step.tokens(), 64) << "4 sequences of 16, some targets without loss";
        EXPECT_GT(step.tokens(), 20);
      }
      std::vector<double> losses = job.host().losses();
      losses.push_back(steps.back().validation_loss());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]) << ranks << " ranks, value " << i;
      }
      expected = losses;
    }
    EXPECT_NEAR(expected[0], 5.55, 0.5) << "a mean over what counts: ln 256 at the start";
  }
}

}  // namespace
}  // namespace octavo
