// Tokens of the next step travel while the current one is used, however late they do.
#include "worker/rank/token_feed.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "tests/support/lazy_lanes.h"
#include "tests/support/temp_dir.h"
#include "worker/data/dataset_writer.h"

namespace octavo {
namespace {

constexpr std::int32_t kMicrobatches = 2;
constexpr std::int64_t kTokens = 16;

class FeedTest : public ::testing::Test {
 protected:
  FeedTest() : cpu_(CreateCpuBackend()) {
    auto& fs = PosixFileSystem::Get();
    auto writer = DatasetWriter::Create(fs, dir_.File("d"), 4, 1 << 20);
    std::vector<std::int32_t> tokens(4000);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(i);
    }
    EXPECT_TRUE((*writer)->Append(tokens).ok());
    EXPECT_TRUE((*writer)->Finish().ok());
    dataset_ = std::shared_ptr<const TokenDataset>(*OpenTokenDataset(fs, dir_.File("d")));
    lanes_ = std::make_unique<testing::LazyLanes>(cpu_);
    device_ = std::make_unique<Arena>(lanes_->backend(), "device");
    pinned_ = std::make_unique<Arena>(lanes_->backend(), "pinned", Memory::kHostPinned);
  }
  ~FeedTest() override {
    device_.reset();
    pinned_.reset();
    lanes_.reset();
    DestroyCpuBackend(&cpu_);
  }
  Loader NewLoader() {
    return *Loader::Create(dataset_, {.region = {0, dataset_->token_count()},
                                      .sequence_length = kTokens / 2,
                                      .vocab = 1 << 20,
                                      .seed = 5,
                                      .microbatch_sequences = 2,
                                      .microbatches = kMicrobatches});
  }
  TokenFeed NewFeed() {
    return *TokenFeed::Create(lanes_->backend(), NewLoader(), kMicrobatches, kTokens, *device_,
                              *pinned_);
  }
  // What the device holds is what the loader gives for the step.
  void ExpectStep(const TokenFeed& feed, std::int64_t step) {
    Loader loader = NewLoader();
    for (std::int32_t m = 0; m < kMicrobatches; ++m) {
      std::vector<std::int32_t> tokens(kTokens), targets(kTokens);
      ASSERT_TRUE(loader.Load(step, m, tokens, targets).ok());
      EXPECT_EQ(std::vector(feed.tokens(m), feed.tokens(m) + kTokens), tokens) << "step " << step;
      EXPECT_EQ(std::vector(feed.targets(m), feed.targets(m) + kTokens), targets);
      EXPECT_EQ(feed.target_count(m), kTokens);
    }
  }

  Backend cpu_;
  TempDir dir_;
  std::shared_ptr<const TokenDataset> dataset_;
  std::unique_ptr<testing::LazyLanes> lanes_;
  std::unique_ptr<Arena> device_, pinned_;
};

TEST_F(FeedTest, TheNextStepIsSentWhileThisOneIsUsed) {
  TokenFeed feed = NewFeed();
  for (std::int64_t step = 3; step < 8; ++step) {
    ASSERT_TRUE(feed.LoadStep(step).ok());
    ExpectStep(feed, step);
    const std::int64_t sent = lanes_->put_off();
    feed.Prefetch(step + 1);
    EXPECT_EQ(lanes_->put_off(), sent + 1) << "on the copy lane";
    ExpectStep(feed, step);  // a retried pass reads them again
    lanes_->Run(Lane::kCopy);
    ExpectStep(feed, step);
  }
  const std::int64_t sent = lanes_->put_off();
  ASSERT_TRUE(feed.LoadStep(8).ok());
  EXPECT_EQ(lanes_->put_off(), sent) << "it was there";
}

TEST_F(FeedTest, AnotherStepThanThePrefetchedOneIsLoaded) {
  TokenFeed feed = NewFeed();
  ASSERT_TRUE(feed.LoadStep(0).ok());
  feed.Prefetch(1);
  ASSERT_TRUE(feed.LoadStep(6).ok());
  ExpectStep(feed, 6);
  ASSERT_TRUE(feed.LoadStep(0).ok());
  ExpectStep(feed, 0);
}

}  // namespace
}  // namespace octavo
