#include <gtest/gtest.h>

#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr std::int64_t kVocab = 13;
constexpr std::int64_t kHidden = 600;  // more than one chunk

std::vector<std::int32_t> Tokens(Random* random, std::int64_t count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::int32_t& t : tokens) {
    t = static_cast<std::int32_t>(random->Below(kVocab));
  }
  return tokens;
}

TEST(EmbeddingForward, CopiesRowsRoundedToTheActType) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Random random(31);
    const std::vector<float> table = random.Normals(kVocab * kHidden);
    const std::vector<std::int32_t> tokens = Tokens(&random, 40);
    Stored out(40 * kHidden, 7.0f, dtype);
    cpu::EmbeddingForward(nullptr, {.tokens = tokens.data(),
                                    .count = 40,
                                    .hidden = kHidden,
                                    .vocab = kVocab,
                                    .table = table.data(),
                                    .out = out.data(),
                                    .dtype = dtype});
    const Stored rounded(table, dtype);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t c = 0; c < kHidden; ++c) {
        ASSERT_EQ(out.Get(t * kHidden + c),
                  rounded.Get(static_cast<std::size_t>(tokens[t]) * kHidden + c));
      }
    }
  }
}

TEST(EmbeddingBackward, AddsEveryOccurrenceOfATokenInOrder) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Random random(32);
    const std::vector<std::int32_t> tokens = Tokens(&random, 50);  // 13 words: all repeat
    Stored d_out(random.Normals(50 * kHidden), dtype);
    std::vector<float> d_table = random.Normals(kVocab * kHidden);
    std::vector<float> want = d_table;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t c = 0; c < kHidden; ++c) {
        want[static_cast<std::size_t>(tokens[t]) * kHidden + c] += d_out.Get(t * kHidden + c);
      }
    }
    cpu::EmbeddingBackward(nullptr, {.tokens = tokens.data(),
                                     .count = 50,
                                     .hidden = kHidden,
                                     .vocab = kVocab,
                                     .d_out = d_out.data(),
                                     .dtype = dtype,
                                     .d_table = d_table.data(),
                                     .workspace = nullptr});
    EXPECT_EQ(d_table, want) << Name(dtype);
  }
}

TEST(EmbeddingDeathTest, TokenOutsideTheVocabularyEndsTheProcess) {
  const std::vector<float> table(kVocab * kHidden, 0.0f);
  std::vector<float> out(kHidden);
  for (std::int32_t token : {-1, static_cast<std::int32_t>(kVocab)}) {
    const EmbeddingForwardArgs args = {.tokens = &token,
                                       .count = 1,
                                       .hidden = kHidden,
                                       .vocab = kVocab,
                                       .table = table.data(),
                                       .out = out.data(),
                                       .dtype = DType::kF32};
    EXPECT_DEATH(cpu::EmbeddingForward(nullptr, args), "outside the vocabulary of 13");
  }
}

TEST(Embedding, NoTokensIsLegal) {
  cpu::EmbeddingForward(nullptr, {.count = 0, .hidden = kHidden, .vocab = kVocab});
  cpu::EmbeddingBackward(nullptr, {.count = 0, .hidden = kHidden, .vocab = kVocab});
}

}  // namespace
}  // namespace octavo
