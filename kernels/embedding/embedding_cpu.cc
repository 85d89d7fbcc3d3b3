// Embedding lookup and its gradient. The gradient is added token by token, in order: several
// occurrences of one token sum deterministically.
#include <algorithm>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

std::int64_t RowOf(std::int32_t token, std::int64_t vocab, std::int64_t position) {
  OCTAVO_CHECK(token >= 0 && token < vocab, "token %d at %lld is outside the vocabulary of %lld",
               token, static_cast<long long>(position), static_cast<long long>(vocab));
  return token;
}

}  // namespace

void EmbeddingForward(OpsContext*, const EmbeddingForwardArgs& a) {
  for (std::int64_t t = 0; t < a.count; ++t) {
    const std::int64_t row = RowOf(a.tokens[t], a.vocab, t);
    StoreRow(a.table + row * a.hidden, a.hidden, a.out, a.dtype, t * a.hidden);
  }
}

void EmbeddingBackward(OpsContext*, const EmbeddingBackwardArgs& a) {
  float buffer[kChunk];
  for (std::int64_t t = 0; t < a.count; ++t) {
    const std::int64_t row = RowOf(a.tokens[t], a.vocab, t);
    for (std::int64_t c = 0; c < a.hidden; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.hidden - c);
      AddRow(LoadRow(a.d_out, a.dtype, t * a.hidden + c, n, buffer), n,
             a.d_table + row * a.hidden + c);
    }
  }
}

}  // namespace octavo::cpu
