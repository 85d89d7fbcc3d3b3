#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "base/str.h"
#include "tests/support/temp_dir.h"
#include "worker/tokenizer/sentencepiece_tokenizer.h"
#include "worker/data/token_dataset.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

// Text with words that come back, as text does.
std::string Sentences(std::mt19937& rng, int count) {
  const char* words[] = {"expert", "router", "token",  "scale",   "block",     "gradient",
                         "loss",   "step",   "weight", "Köln",    "precision", "the",
                         "of",     "a",      "1234",   "training"};
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += words[rng() % 16];
    text += rng() % 9 == 0 ? "\n" : rng() % 12 == 0 ? "  " : " ";
  }
  return text;
}

class SentencePieceTest : public ::testing::Test {
 protected:
  SentencePieceTest() : rng_(7) {
    EXPECT_TRUE(Fs().CreateDirectories(dir_.File("text")).ok());
    for (int i = 0; i < 12; ++i) {
      EXPECT_TRUE(Fs().WriteFileAtomic(dir_.File(StrCat("text/", i)), Sentences(rng_, 800)).ok());
    }
  }
  std::unique_ptr<SentencePieceTokenizer> Train(SentencePieceType type) {
    const auto summary = TrainSentencePiece(Fs(), {.inputs = {dir_.File("text")},
                                                   .output = dir_.File("sp.model"),
                                                   .vocab_size = 310,
                                                   .type = type,
                                                   .threads = 2});
    EXPECT_TRUE(summary.ok()) << ToString(summary.status());
    EXPECT_EQ(summary->vocab_size, 310);
    EXPECT_EQ(summary->files, 12);
    auto tokenizer = SentencePieceTokenizer::Load(Fs(), dir_.File("sp.model"));
    EXPECT_TRUE(tokenizer.ok()) << ToString(tokenizer.status());
    return *std::move(tokenizer);
  }

  TempDir dir_;
  std::mt19937 rng_;
};

TEST_F(SentencePieceTest, DecodingGivesBackEveryTextExactly) {
  for (const SentencePieceType type : {SentencePieceType::kBpe, SentencePieceType::kUnigram}) {
    const auto tokenizer = Train(type);
    const std::string texts[] = {Sentences(rng_, 50),
                                 "",
                                 " leading and   many  spaces ",
                                 "line\nbreaks\n\nand\ttabs",
                                 "漢字 and 🙂 and é",
                                 "token token token"};
    for (const std::string& text : texts) {
      const auto tokens = tokenizer->Encode(text);
      ASSERT_TRUE(tokens.ok()) << ToString(tokens.status());
      EXPECT_EQ(*tokenizer->Decode(*tokens), text);
      EXPECT_LE(tokens->size(), text.size()) << "never more tokens than bytes";
    }
    EXPECT_LT(tokenizer->Encode("the expert router of the token")->size(), 25u) << "of 31 bytes";
    EXPECT_FALSE(tokenizer->Decode(std::vector<std::int32_t>{310}).ok());
  }
}

TEST_F(SentencePieceTest, ADatasetHoldsEveryFileAsADocumentWhateverTheThreads) {
  const auto tokenizer = Train(SentencePieceType::kBpe);
  std::string one;
  for (const std::int32_t threads : {1, 2, 5}) {
    std::int64_t last_done = 0;
    const auto summary = BuildSentencePieceDataset(
        Fs(), *tokenizer,
        {.inputs = {dir_.File("text")},
         .output = dir_.File("d"),
         .threads = threads,
         .progress = [&](const BuildProgress& p) { last_done = p.files_done; }});
    ASSERT_TRUE(summary.ok()) << ToString(summary.status());
    EXPECT_EQ(summary->documents, 12);
    EXPECT_EQ(last_done, 12);
    const std::string bytes = *Fs().ReadFile(dir_.File("d"));
    EXPECT_TRUE(one.empty() || bytes == one) << threads << " threads";
    one = bytes;
  }
  const auto dataset = OpenTokenDataset(Fs(), dir_.File("d"));
  EXPECT_EQ((*dataset)->vocab_size(), 310);
  EXPECT_EQ((*dataset)->token_bytes(), 2);
  // Documents decode to their files, in sorted order, each with its end mark.
  const char* sorted[] = {"0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9"};
  std::int64_t begin = 0;
  for (int d = 0; d < 12; ++d) {
    const std::int64_t end = (*dataset)->DocumentEnd(d);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(end - begin));
    ASSERT_TRUE((*dataset)->Read(begin, tokens).ok());
    EXPECT_EQ(tokens.back(), tokenizer->end_id());
    tokens.pop_back();
    EXPECT_EQ(*tokenizer->Decode(tokens), *Fs().ReadFile(dir_.File(StrCat("text/", sorted[d]))));
    begin = end;
  }
}

TEST_F(SentencePieceTest, TheByteLimitCutsAtTheByte) {
  const auto tokenizer = Train(SentencePieceType::kBpe);
  const std::int64_t limit = 7001;
  ASSERT_TRUE(BuildSentencePieceDataset(Fs(), *tokenizer,
                                        {.inputs = {dir_.File("text")},
                                         .output = dir_.File("d"),
                                         .max_bytes = limit,
                                         .threads = 3})
                  .ok());
  const auto dataset = OpenTokenDataset(Fs(), dir_.File("d"));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>((*dataset)->token_count()));
  ASSERT_TRUE((*dataset)->Read(0, tokens).ok());
  tokens.erase(std::remove(tokens.begin(), tokens.end(), tokenizer->end_id()), tokens.end());
  EXPECT_EQ(static_cast<std::int64_t>(tokenizer->Decode(tokens)->size()), limit);
}

TEST_F(SentencePieceTest, MistakesAreErrorsWithThePath) {
  EXPECT_THAT(Message(SentencePieceTokenizer::Load(Fs(), dir_.File("text/0")).status()),
              HasSubstr("not a SentencePiece model"));
  EXPECT_EQ(SentencePieceTokenizer::Load(Fs(), dir_.File("none")).status().code(),
            absl::StatusCode::kNotFound);
  const auto too_large = TrainSentencePiece(
      Fs(), {.inputs = {dir_.File("text")}, .output = dir_.File("big.model"), .vocab_size = 50000});
  EXPECT_EQ(too_large.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(Fs().Exists(dir_.File("big.model")));
  const auto nothing =
      TrainSentencePiece(Fs(), {.inputs = {}, .output = dir_.File("big.model"), .vocab_size = 310});
  EXPECT_FALSE(nothing.ok());
}

}  // namespace
}  // namespace octavo
