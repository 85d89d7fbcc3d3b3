// The rest of the transformer: norms, RoPE, attention, embedding, loss, optimizer, reductions.
#include "tests/ops/cases.h"

namespace octavo::test {
namespace {

// NUMERICS 12 allows 5e-3 in BF16; rounding alone is 1.7e-3.
constexpr double kBf16 = 3e-3, kF32 = 5e-6;
double Tolerance(DType t) { return t == DType::kBF16 ? kBf16 : kF32; }

void CastCase(OpRun& run, DType from, DType to, std::int64_t cols, std::int64_t ld) {
  const std::int64_t rows = 37;
  Mat src{run.Activations(rows * ld, from, 1.0f, true), from, rows, cols, ld};
  Mat dst{run.Out<void>("dst", to, rows * (cols + 8)), to, rows, cols, cols + 8};
  run.ops.cast(run.context, {src, dst});
}

void AxpbyCase(OpRun& run, DType x, DType y, float b) {
  const std::int64_t n = 5003;
  void* out = run.InOut<std::uint8_t>("y", y, run.Encode(run.Numbers(n, 1.0f), y));
  run.ops.axpby(run.context, {run.Activations(n, x), x, 0.3f, out, y, b, n});
}

void NormForward(OpRun& run, DType t, std::int64_t cols, bool residual) {
  const std::int64_t rows = 67, ld = cols + 16;
  RmsNormForwardArgs a{};
  a.rows = rows;
  a.cols = cols;
  a.x = run.Activations(rows * ld, t);
  a.ld_x = ld;
  a.residual = residual ? run.Activations(rows * cols, t) : nullptr;
  a.residual_out = residual ? run.Out<void>("h", t, rows * cols) : nullptr;
  a.w = run.In(run.Numbers(cols, 1.0f));
  a.eps = 1e-5f;
  a.dtype = t;
  a.y = run.Out<void>("y", t, rows * ld, Agree::kRelative, Tolerance(t));
  a.ld_y = ld;
  a.rstd = run.Out<float>("rstd", DType::kF32, rows, Agree::kRelative, kF32);
  run.ops.rms_norm_forward(run.context, a);
}

void NormBackward(OpRun& run, DType t, std::int64_t rows, std::int64_t cols, bool residual) {
  WorkspaceQuery query{};
  query.tokens = rows;
  query.hidden = cols;
  query.dtype = t;
  WorkspaceSizes sizes{};
  run.ops.workspace_sizes(run.context, query, &sizes);
  std::vector<float> rstd(static_cast<std::size_t>(rows));
  for (float& v : rstd) {
    v = 0.5f + static_cast<float>(run.Pick(0, 100)) / 100;
  }
  RmsNormBackwardArgs a{};
  a.rows = rows;
  a.cols = cols;
  a.h = run.Activations(rows * cols, t);
  a.ld_h = cols;
  a.w = run.In(run.Numbers(cols, 1.0f));
  a.rstd = run.In(rstd);
  a.dy = run.Activations(rows * cols, t);
  a.ld_dy = cols;
  a.d_residual = residual ? run.Activations(rows * cols, t) : nullptr;
  a.dtype = t;
  a.dx = run.Out<void>("dx", t, rows * cols, Agree::kRelative, Tolerance(t));
  a.ld_dx = cols;
  a.dw = run.InOut<float>("dw", DType::kF32, run.Numbers(cols, 1.0f), Agree::kRelative, kF32);
  a.workspace = run.Allocate(sizes.rms_norm_backward);
  run.ops.rms_norm_backward(run.context, a);
}

void RopeCase(OpRun& run, DType t, std::int32_t dim, int direction) {
  const std::int64_t rows = 3 * 50, stride = 6 * dim + 8;
  void* x = run.InOut<std::uint8_t>("x", t, run.Encode(run.Numbers(rows * stride, 1.0f), t),
                                    Agree::kRelative, Tolerance(t));
  run.ops.rope(run.context, {x, t, rows, 50, stride, 1, 4, dim, 10000.0f, direction});
}

void Attention(OpRun& run, DType t, std::int64_t batch, std::int64_t sequence, std::int32_t heads,
               std::int32_t kv_heads, std::int32_t dim) {
  const std::int64_t row = (heads + 2 * kv_heads) * dim, out_row = heads * dim;
  const std::int64_t tokens = batch * sequence;
  WorkspaceQuery query{};
  query.batch = batch;
  query.sequence = sequence;
  query.heads = heads;
  query.kv_heads = kv_heads;
  query.head_dim = dim;
  query.dtype = t;
  WorkspaceSizes sizes{};
  run.ops.workspace_sizes(run.context, query, &sizes);
  const double tolerance = t == DType::kBF16 ? 5e-3 : 2e-5;
  AttentionForwardArgs f{};
  f.batch = batch;
  f.sequence = sequence;
  f.heads = heads;
  f.kv_heads = kv_heads;
  f.head_dim = dim;
  f.qkv = run.Activations(tokens * row, t);
  f.dtype = t;
  f.softmax_factor = 1.0f / std::sqrt(static_cast<float>(dim));
  f.out = run.Out<void>("out", t, tokens * out_row, Agree::kRelative, tolerance);
  f.lse = run.Out<float>("lse", DType::kF32, tokens * heads, Agree::kRelative, 1e-5);
  f.workspace = run.Allocate(sizes.attention_forward);
  f.workspace_bytes = sizes.attention_forward;
  run.ops.attention_forward(run.context, f);
  AttentionBackwardArgs b{};
  b.batch = batch;
  b.sequence = sequence;
  b.heads = heads;
  b.kv_heads = kv_heads;
  b.head_dim = dim;
  b.qkv = f.qkv;
  b.out = f.out;
  b.d_out = run.Activations(tokens * out_row, t);
  b.lse = f.lse;
  b.dtype = t;
  b.softmax_factor = f.softmax_factor;
  b.d_qkv = run.Out<void>("d_qkv", t, tokens * row, Agree::kRelative, tolerance);
  b.workspace = run.Allocate(sizes.attention_backward);
  b.workspace_bytes = sizes.attention_backward;
  run.ops.attention_backward(run.context, b);
}

std::vector<std::int32_t> Tokens(OpRun& run, std::int64_t count, std::int64_t vocab) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::int32_t& t : tokens) {
    // Frequent tokens are frequent, as in text.
    t = static_cast<std::int32_t>(run.Pick(0, 2) == 0 ? run.Pick(0, 3) : run.Pick(0, vocab - 1));
  }
  return tokens;
}

// frequent: most positions hold one of two tokens, as bytes and padding do.
void Embedding(OpRun& run, DType t, bool frequent) {
  const std::int64_t count = frequent ? 9001 : 700, hidden = frequent ? 520 : 264, vocab = 5000;
  std::vector<std::int32_t> ids = Tokens(run, count, vocab);
  if (frequent) {
    for (std::int32_t& id : ids) {
      const std::int64_t pick = run.Pick(0, 9);
      id = pick < 6 ? 4999 : pick < 8 ? 0 : id;
    }
  }
  const std::int32_t* tokens = run.In(ids);
  run.ops.embedding_forward(
      run.context, {tokens, count, hidden, vocab, run.In(run.Numbers(vocab * hidden, 1.0f)),
                    run.Out<void>("out", t, count * hidden), t});
  WorkspaceQuery query{};
  query.tokens = count;
  query.hidden = hidden;
  query.vocab = vocab;
  query.dtype = t;
  WorkspaceSizes sizes{};
  run.ops.workspace_sizes(run.context, query, &sizes);
  // Sums of one token in another order; of thousands of rows where it is frequent.
  float* table = run.InOut<float>("d_table", DType::kF32, run.Numbers(vocab * hidden, 1.0f),
                                  Agree::kRelative, frequent ? 1e-5 : 1e-6);
  run.ops.embedding_backward(
      run.context, {tokens, count, hidden, vocab, run.Activations(count * hidden, t), t, table,
                    run.Allocate(sizes.embedding_backward)});
}

void Loss(OpRun& run, DType t, std::int64_t vocab, float dloss) {
  const std::int64_t rows = 29;
  std::vector<std::int32_t> target(static_cast<std::size_t>(rows));
  for (std::int32_t& v : target) {
    v = static_cast<std::int32_t>(run.Pick(-vocab / 4, vocab - 1));
    v = v < 0 ? -1 : v;
  }
  CrossEntropyArgs a{};
  a.rows = rows;
  a.vocab = vocab;
  a.logits = run.InOut<std::uint8_t>("logits", t, run.Encode(run.Numbers(rows * vocab, 3.0f), t),
                                     Agree::kRelative, Tolerance(t));
  a.dtype = t;
  a.target = run.In(target);
  a.dloss = dloss;
  a.loss_sum = run.InOut<double>("loss", DType::kF64, {1.5}, Agree::kRelative, 1e-6);
  run.ops.cross_entropy(run.context, a);
}

void Adam(OpRun& run, DType moments, DType copy, std::int32_t skip, std::int64_t n) {
  std::vector<float> v = run.Numbers(n, 1e-4f);
  for (float& x : v) {
    x = std::fabs(x);
  }
  AdamWArgs a{};
  a.n = n;
  a.master = run.InOut<float>("master", DType::kF32, run.Numbers(n, 0.02f));
  a.grad = run.In(run.Numbers(n, 0.1f));
  a.m = run.InOut<std::uint8_t>("m", moments, run.Encode(run.Numbers(n, 0.01f), moments));
  a.v = run.InOut<std::uint8_t>("v", moments, run.Encode(v, moments));
  a.moment_dtype = moments;
  a.copy = run.Out<void>("copy", copy, n);
  a.copy_dtype = copy;
  a.lr = 3e-4f;
  a.beta1 = 0.9f;
  a.beta2 = 0.95f;
  a.eps = 1e-8f;
  a.weight_decay = 0.1f;
  a.t = 7;
  a.grad_factor = run.In(std::vector<float>{0.37f});
  a.skip = run.In(std::vector<std::int32_t>{skip});
  run.ops.adamw(run.context, a);
}

void Reductions(OpRun& run) {
  const std::int64_t n = 100003;
  const std::vector<float> x = run.Numbers(n, 1.0f), bad = run.Numbers(n, 1.0f, true);
  WorkspaceQuery query{};
  query.parameters = n;
  query.dtype = DType::kBF16;
  WorkspaceSizes sizes{};
  run.ops.workspace_sizes(run.context, query, &sizes);
  void* workspace = run.Allocate(sizes.sum_squares);
  run.ops.sum_squares(
      run.context,
      {run.In(x), n, run.InOut<double>("sum", DType::kF64, {3.0}, Agree::kRelative, 1e-12),
       workspace});
  run.ops.sum_squares(
      run.context, {run.In(bad), n, run.InOut<double>("bad_sum", DType::kF64, {3.0}), workspace});
  for (DType t : {DType::kF32, DType::kBF16}) {
    std::uint64_t* count =
        run.InOut<std::uint64_t>("count", DType::kI64, std::vector<std::uint64_t>{5});
    run.ops.count_nonfinite(run.context, {run.In(run.Encode(bad, t)), t, n, count});
  }
}

}  // namespace

std::vector<OpCase> ModelCases() {
  constexpr DType kB = DType::kBF16, kF = DType::kF32;
  return {
      {"cast_to_bf16", [](OpRun& r) { CastCase(r, kF, kB, 72, 80); }},
      {"cast_to_f32_odd", [](OpRun& r) { CastCase(r, kB, kF, 13, 17); }},
      {"cast_same", [](OpRun& r) { CastCase(r, kB, kB, 24, 40); }},
      {"axpby_bf16", [](OpRun& r) { AxpbyCase(r, kB, kF, 0.7f); }},
      {"axpby_overwrite", [](OpRun& r) { AxpbyCase(r, kF, kB, 0.0f); }},
      {"norm_forward_64", [](OpRun& r) { NormForward(r, kB, 64, false); }},
      {"norm_forward_1024", [](OpRun& r) { NormForward(r, kB, 1024, true); }},
      {"norm_forward_2048", [](OpRun& r) { NormForward(r, kB, 2048, true); }},
      {"norm_forward_7168", [](OpRun& r) { NormForward(r, kB, 7168, true); }},
      {"norm_forward_f32", [](OpRun& r) { NormForward(r, kF, 520, false); }},
      {"norm_backward_64", [](OpRun& r) { NormBackward(r, kB, 500, 64, false); }},
      {"norm_backward_2048", [](OpRun& r) { NormBackward(r, kB, 300, 2048, true); }},
      {"norm_backward_7168", [](OpRun& r) { NormBackward(r, kB, 5, 7168, true); }},
      {"norm_backward_f32", [](OpRun& r) { NormBackward(r, kF, 300, 4096, true); }},
      {"rope", [](OpRun& r) { RopeCase(r, kB, 64, 1); }},
      {"rope_back_f32", [](OpRun& r) { RopeCase(r, kF, 128, -1); }},
      {"rope_odd", [](OpRun& r) { RopeCase(r, kF, 10, 1); }},
      {"attention_gqa_64", [](OpRun& r) { Attention(r, kB, 2, 200, 8, 2, 64); }},
      {"attention_gqa_128", [](OpRun& r) { Attention(r, kB, 1, 384, 4, 1, 128); }},
      {"attention_full_heads", [](OpRun& r) { Attention(r, kB, 2, 128, 4, 4, 64); }},
      {"attention_f32", [](OpRun& r) { Attention(r, kF, 2, 70, 4, 2, 32); }},
      {"attention_odd_dim", [](OpRun& r) { Attention(r, kB, 1, 33, 2, 1, 20); }},
      {"embedding_bf16", [](OpRun& r) { Embedding(r, kB, false); }},
      {"embedding_f32", [](OpRun& r) { Embedding(r, kF, false); }},
      {"embedding_frequent_bf16", [](OpRun& r) { Embedding(r, kB, true); }},
      {"embedding_frequent_f32", [](OpRun& r) { Embedding(r, kF, true); }},
      {"loss_bf16", [](OpRun& r) { Loss(r, kB, 4096, 0.01f); }},
      {"loss_bf16_wide", [](OpRun& r) { Loss(r, kB, 40000, 0.01f); }},
      {"loss_bf16_odd", [](OpRun& r) { Loss(r, kB, 1003, 0.01f); }},
      {"loss_f32", [](OpRun& r) { Loss(r, kF, 2000, 1.0f); }},
      {"loss_forward_only", [](OpRun& r) { Loss(r, kB, 1024, 0.0f); }},
      {"adamw_f32", [](OpRun& r) { Adam(r, kF, kB, 0, 10003); }},
      {"adamw_bf16_moments", [](OpRun& r) { Adam(r, kB, kF, 0, 4096); }},
      {"adamw_skipped", [](OpRun& r) { Adam(r, kF, kB, 1, 4096); }},
      {"reductions", [](OpRun& r) { Reductions(r); }},
  };
}

}  // namespace octavo::test
