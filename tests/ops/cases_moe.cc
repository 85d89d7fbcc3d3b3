// Router, permute, combine, SwiGLU.
#include <algorithm>

#include "tests/ops/cases.h"

namespace octavo::test {
namespace {

// ---------------------------------------------------------------- router

struct RouterCase {
  std::int32_t experts = 64, k = 8;
  RouterScore score = RouterScore::kSoftmax;
  bool normalize = true, bias = false, poison = false;
  std::int32_t n_group = 1, topk_group = 1;
  std::int64_t tokens = 203, segment = 203;
};

RouterConfig Config(const RouterCase& c) {
  return {.experts = c.experts,
          .experts_per_token = c.k,
          .score = c.score,
          .normalize_topk = c.normalize,
          .routed_scaling_factor = 2.5f,
          .n_group = c.n_group,
          .topk_group = c.topk_group};
}

// Selection is equal given equal selection values; scores differ in the last bits (exp), so weights
// and sums agree to FP32 accuracy.
void Router(OpRun& run, const RouterCase& c) {
  std::vector<float> logits = run.Numbers(c.tokens * c.experts, 1.5f);
  if (c.score == RouterScore::kSoftmax && !c.bias && c.n_group == 1) {
    // Ties, among them of zeros of both signs, are broken by the index.
    for (std::size_t i = 0; i + 3 < logits.size(); i += 7) {
      logits[i + 1] = logits[i];
      logits[i + 2] = i % 2 == 0 ? 0.0f : -0.0f;
    }
  }
  if (c.poison) {
    for (std::size_t i = 0; i < logits.size(); i += 97) {
      logits[i] =
          i % 3 == 0 ? __builtin_nanf("") : (i % 3 == 1 ? 1.0f : -1.0f) * __builtin_huge_valf();
    }
  }
  // Without tokens one segment of zeros is written.
  const std::int64_t segments = std::max<std::int64_t>(1, CeilDiv(c.tokens, c.segment));
  RouterForwardArgs f{};
  f.config = Config(c);
  f.tokens = c.tokens;
  f.tokens_per_segment = c.segment;
  f.logits = run.In(logits);
  f.bias = c.bias ? run.In(run.Numbers(c.experts, 0.3f)) : nullptr;
  f.topk_index = run.Out<std::int32_t>("index", DType::kI32, c.tokens * c.k);
  f.topk_weight = run.Out<float>("weight", DType::kF32, c.tokens * c.k, Agree::kRelative, 2e-6);
  f.counts = run.Out<std::int64_t>("counts", DType::kI64, segments * c.experts);
  f.score_sum =
      run.Out<float>("score_sum", DType::kF32, segments * c.experts, Agree::kRelative, 2e-6);
  f.logsumexp = run.Out<float>("lse", DType::kF32, c.tokens, Agree::kRelative, 2e-6);
  f.z_sum = run.Out<double>("z_sum", DType::kF64, 1, Agree::kRelative, 2e-6);
  run.ops.router_forward(run.context, f);

  if (c.poison) {
    return;  // the gradient of a NaN weight is NaN in places that depend on the order of sums
  }
  RouterBackwardArgs b{};
  b.config = f.config;
  b.tokens = c.tokens;
  b.tokens_per_segment = c.segment;
  b.logits = f.logits;
  b.topk_index = f.topk_index;
  b.dtopk_weight = run.In(run.Numbers(c.tokens * c.k, 1.0f));
  b.aux_coeff = run.In(run.Numbers(segments * c.experts, 0.01f));
  b.z_coeff = 0.001f;
  b.logsumexp = f.logsumexp;
  b.dlogits = run.Out<float>("dlogits", DType::kF32, c.tokens * c.experts, Agree::kRelative, 1e-5);
  run.ops.router_backward(run.context, b);
}

void BiasUpdate(OpRun& run) {
  std::vector<std::int64_t> counts(128);
  for (std::int64_t& v : counts) {
    v = run.Pick(0, 2) == 0 ? 100 : run.Pick(0, 200);
  }
  float* bias = run.InOut<float>("bias", DType::kF32, run.Numbers(128, 0.1f));
  run.ops.router_bias_update(run.context, {run.In(counts), 128, 0.001f, bias});
}

// ---------------------------------------------------------------- permute and back

// Distinct experts a token; some experts get nothing, one gets much.
std::vector<std::int32_t> Choices(OpRun& run, std::int64_t tokens, std::int32_t experts,
                                  std::int32_t k) {
  std::vector<std::int32_t> index;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> left;
    for (std::int32_t e = 0; e < experts; ++e) {
      if (e % 5 != 3) {
        left.push_back(e);
      }
    }
    for (std::int32_t j = 0; j < k; ++j) {
      const std::size_t at =
          j == 0 && run.Pick(0, 1) == 0
              ? 0
              : static_cast<std::size_t>(run.Pick(0, static_cast<std::int64_t>(left.size()) - 1));
      index.push_back(left[at]);
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  return index;
}

struct PermuteCase {
  std::int64_t tokens = 301, payload = 2192;
  std::int32_t experts = 16, k = 4, tiles = 17;
  std::int64_t align = kRowAlign;
  bool weights = true, by_row = true;
};

// Route, permute, pad, and bring BF16 rows back: what one MoE layer does on one rank.
void PermuteRoundTrip(OpRun& run, const PermuteCase& c) {
  const std::int64_t choices = c.tokens * c.k;
  const std::int32_t* topk = run.In(Choices(run, c.tokens, c.experts, c.k));
  WorkspaceQuery query{};
  query.tokens = c.tokens;
  query.experts = c.experts;
  query.experts_per_token = c.k;
  query.dtype = DType::kBF16;
  WorkspaceSizes sizes{};
  run.ops.workspace_sizes(run.context, query, &sizes);
  RouteIndexArgs r{};
  r.tokens = c.tokens;
  r.experts = c.experts;
  r.experts_per_token = c.k;
  r.topk_index = topk;
  r.align = c.align;
  r.counts = run.Out<std::int64_t>("counts", DType::kI64, c.experts);
  r.begin = run.Out<std::int64_t>("begin", DType::kI64, c.experts);
  r.dest_row = run.Out<std::int32_t>("dest_row", DType::kI32, choices);
  r.workspace = run.Allocate(sizes.route_index);
  run.ops.route_index(run.context, r);

  const std::int64_t rows = c.tokens * c.k + c.experts * c.align;
  std::vector<std::uint8_t> payload(static_cast<std::size_t>(c.tokens * c.payload));
  for (auto& byte : payload) {
    byte = static_cast<std::uint8_t>(run.Pick(0, 255));
  }
  PermuteArgs p{};
  p.src.payload = run.In(payload);
  p.src.payload_stride = c.payload;
  p.dst.payload = run.Out<std::uint8_t>("payload", DType::kU8, rows * c.payload);
  p.dst.payload_stride = c.payload;
  if (c.tiles > 0) {
    p.src.dequant_scale =
        reinterpret_cast<std::uint8_t*>(run.In(run.Numbers(c.tokens * c.tiles, 1.0f)));
    p.src.scale_row_stride = c.tiles * 4;
    p.src.scale_tile_stride = 4;
    p.dst.dequant_scale = run.Out<std::uint8_t>("D", DType::kU8, rows * c.tiles * 4);
    p.dst.scale_row_stride = c.by_row ? 4 : c.tiles * 4;
    p.dst.scale_tile_stride = c.by_row ? rows * 4 : 4;
  }
  if (c.weights) {
    p.src.weight = reinterpret_cast<std::uint8_t*>(run.In(run.Numbers(choices, 1.0f)));
    p.src.weight_stride = c.k * 4;
    p.dst.weight = run.Out<std::uint8_t>("weight", DType::kU8, rows * 4);
    p.dst.weight_stride = 4;
  }
  p.rows = c.tokens;
  p.fanout = c.k;
  p.dest_row = r.dest_row;
  p.payload_bytes = c.payload;
  p.tiles = c.tiles;
  run.ops.permute(run.context, p);

  if (c.align == kRowAlign) {
    RowGroups groups;
    groups.count = c.experts;
    groups.begin = r.begin;
    groups.rows = r.counts;
    groups.padded_rows = RoundUp(rows, kRowAlign);
    std::vector<std::int64_t> begin(static_cast<std::size_t>(c.experts)), count = begin;
    run.ops.copy(run.context, {begin.data(), r.begin, c.experts * 8, CopyKind::kToHost});
    run.ops.copy(run.context, {count.data(), r.counts, c.experts * 8, CopyKind::kToHost});
    run.ops.synchronize(run.context);
    groups.host_begin = begin.data();
    groups.host_rows = count.data();
    run.ops.pad_rows(run.context, {groups, p.dst, c.payload, c.tiles});
  }
}

void CombineRows(OpRun& run, DType src, DType dst, bool accumulate, bool weights) {
  const std::int64_t tokens = 211, hidden = 520, rows = 900;
  const std::int32_t k = 6;
  std::vector<std::int32_t> from(static_cast<std::size_t>(tokens * k));
  for (std::int32_t& f : from) {
    f = static_cast<std::int32_t>(run.Pick(-100, rows - 1));
    f = f < 0 ? -1 : f;
  }
  CombineArgs a{};
  a.src.payload = static_cast<std::uint8_t*>(run.Activations(rows * hidden, src, 1.0f));
  a.src.payload_stride = hidden * DTypeBytes(src);
  a.src_dtype = src;
  a.tokens = tokens;
  a.hidden = hidden;
  a.fanout = k;
  a.source_row = run.In(from);
  a.y = accumulate ? static_cast<void*>(
                         run.InOut<float>("y", DType::kF32, run.Numbers(tokens * hidden, 1.0f)))
                   : run.Out<void>("y", dst, tokens * hidden);
  a.y_dtype = dst;
  a.accumulate = accumulate;
  if (weights) {
    a.src.weight = reinterpret_cast<std::uint8_t*>(run.In(run.Numbers(rows, 1.0f)));
    a.src.weight_stride = 4;
    // Choices that are nowhere keep what was there.
    a.weight_out =
        run.InOut<float>("weight_out", DType::kF32, std::vector<float>(from.size(), 0.0f));
  }
  run.ops.combine(run.context, a);
}

void Expand(OpRun& run, bool invert) {
  const std::vector<RowSegment> segments = {{10, 0, 5}, {0, 100, 10}, {40, 5, 0}, {30, 20, 50}};
  ExpandSegmentsArgs a{};
  a.segments = run.In(segments);
  a.count = static_cast<std::int64_t>(segments.size());
  a.src_rows = invert ? 128 : 90;
  a.dest_row = run.Out<std::int32_t>("dest_row", DType::kI32, a.src_rows);
  a.invert = invert;
  run.ops.expand_segments(run.context, a);
}

// ---------------------------------------------------------------- SwiGLU

struct SwigluCase {
  DType dtype = DType::kBF16, format = DType::kE4M3;
  Tiling tiling = Tiling::kRow128;
  bool quantise = true, col = false, weight = true, pow2 = false;
  std::int64_t f = 384;
};

// Rounding to BF16 hides most of exp's last bit: 5e-3 allows one BF16 step here and there.
constexpr double kBf16 = 2e-3, kF32 = 2e-6;
// NUMERICS 12: at least 99.9 % equal codes, the rest one apart.
constexpr double kDifferentCodes = 1e-3;

void Forward(OpRun& run, const SwigluCase& c) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t p = groups.padded_rows;
  SwigluForwardArgs a{};
  a.groups = groups;
  a.f = c.f;
  a.gate_up = run.Activations(p * 2 * c.f, c.dtype, 2.0f);
  a.dtype = c.dtype;
  a.weight = c.weight ? run.In(run.Numbers(p, 0.5f)) : nullptr;
  a.rule = {.format = c.format, .tiling = c.tiling, .pow2 = c.pow2};
  if (c.quantise) {
    a.quant =
        OutQTensor(run, "q", p, c.f, c.format, c.tiling, true, 1, Agree::kCodes, kDifferentCodes);
    if (c.col) {
      a.quant_col = OutQTensor(run, "qc", c.f, p, c.format, c.tiling, true, 1, Agree::kCodes,
                               kDifferentCodes);
    }
    a.stats = run.Stats(groups.count, Agree::kStatsNear, 1e-4);
  } else {
    a.act = run.Out<void>("act", c.dtype, p * c.f, Agree::kRelative,
                          c.dtype == DType::kBF16 ? kBf16 : kF32);
  }
  run.ops.swiglu_forward(run.context, a);
}

void Backward(OpRun& run, const SwigluCase& c) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t p = groups.padded_rows;
  SwigluBackwardArgs a{};
  a.groups = groups;
  a.f = c.f;
  a.gate_up = run.Activations(p * 2 * c.f, c.dtype, 2.0f);
  a.d_act = run.Activations(p * c.f, c.dtype, 0.1f);
  a.dtype = c.dtype;
  a.weight = c.weight ? run.In(run.Numbers(p, 0.5f)) : nullptr;
  a.rule = {.format = c.format, .tiling = c.tiling, .pow2 = c.pow2};
  if (c.quantise) {
    a.quant = OutQTensor(run, "q", p, 2 * c.f, c.format, c.tiling, true, 1, Agree::kCodes,
                         kDifferentCodes);
    if (c.col) {
      a.quant_col = OutQTensor(run, "qc", 2 * c.f, p, c.format, c.tiling, true, 1, Agree::kCodes,
                               kDifferentCodes);
    }
    a.stats = run.Stats(groups.count, Agree::kStatsNear, 1e-4);
  } else {
    a.d_gate_up = run.Out<void>("d_gate_up", c.dtype, p * 2 * c.f, Agree::kRelative,
                                c.dtype == DType::kBF16 ? kBf16 : kF32);
  }
  if (c.weight) {
    // Sums of a row in another order.
    std::vector<float> zero(static_cast<std::size_t>(p), 0.0f);
    a.dweight = run.InOut<float>("dweight", DType::kF32, zero, Agree::kRelative, 1e-5);
  }
  run.ops.swiglu_backward(run.context, a);
}

}  // namespace

std::vector<OpCase> MoeCases() {
  using S = RouterScore;
  using T = Tiling;
  return {
      {"router_softmax", [](OpRun& r) { Router(r, {}); }},
      {"router_softmax_many",
       [](OpRun& r) { Router(r, {.experts = 256, .tokens = 130, .segment = 50}); }},
      {"router_softmax_raw",
       [](OpRun& r) { Router(r, {.experts = 33, .k = 3, .normalize = false}); }},
      {"router_topk_softmax",
       [](OpRun& r) { Router(r, {.experts = 96, .score = S::kTopKSoftmax}); }},
      {"router_sigmoid_bias", [](OpRun& r) { Router(r, {.score = S::kSigmoid, .bias = true}); }},
      {"router_sigmoid_groups",
       [](OpRun& r) {
         Router(
             r,
             {.experts = 256, .score = S::kSigmoid, .bias = true, .n_group = 8, .topk_group = 4});
       }},
      {"router_512_experts", [](OpRun& r) { Router(r, {.experts = 512, .k = 10, .tokens = 40}); }},
      {"router_poisoned", [](OpRun& r) { Router(r, {.poison = true}); }},
      {"router_poisoned_groups",
       [](OpRun& r) {
         Router(r, {.score = S::kSigmoid, .poison = true, .n_group = 4, .topk_group = 2});
       }},
      {"router_no_tokens", [](OpRun& r) { Router(r, {.tokens = 0, .segment = 1}); }},
      {"router_bias_update", [](OpRun& r) { BiasUpdate(r); }},
      {"permute_padded", [](OpRun& r) { PermuteRoundTrip(r, {}); }},
      {"permute_send_order",
       [](OpRun& r) {
         PermuteRoundTrip(
             r, {.payload = 144, .experts = 300, .k = 8, .tiles = 0, .align = 1, .weights = false});
       }},
      {"permute_one_token",
       [](OpRun& r) { PermuteRoundTrip(r, {.tokens = 1, .experts = 8, .k = 2, .by_row = false}); }},
      {"expand_segments", [](OpRun& r) { Expand(r, false); }},
      {"expand_segments_inverted", [](OpRun& r) { Expand(r, true); }},
      {"combine_bf16", [](OpRun& r) { CombineRows(r, DType::kBF16, DType::kBF16, false, true); }},
      {"combine_accumulate",
       [](OpRun& r) { CombineRows(r, DType::kBF16, DType::kF32, true, false); }},
      {"combine_f32", [](OpRun& r) { CombineRows(r, DType::kF32, DType::kF32, false, true); }},
      {"swiglu_bf16", [](OpRun& r) { Forward(r, {.quantise = false}); }},
      {"swiglu_f32",
       [](OpRun& r) { Forward(r, {.dtype = DType::kF32, .quantise = false, .weight = false}); }},
      {"swiglu_quantised", [](OpRun& r) { Forward(r, {}); }},
      {"swiglu_quantised_pow2", [](OpRun& r) { Forward(r, {.pow2 = true, .f = 1152}); }},
      {"swiglu_quantised_both", [](OpRun& r) { Forward(r, {.col = true}); }},
      {"swiglu_quantised_mx", [](OpRun& r) { Forward(r, {.tiling = T::kRow32, .col = true}); }},
      {"swiglu_backward_bf16", [](OpRun& r) { Backward(r, {.quantise = false}); }},
      {"swiglu_backward_f32",
       [](OpRun& r) { Backward(r, {.dtype = DType::kF32, .quantise = false, .weight = false}); }},
      {"swiglu_backward_quantised", [](OpRun& r) { Backward(r, {.format = DType::kE5M2}); }},
      {"swiglu_backward_quantised_pow2", [](OpRun& r) { Backward(r, {.pow2 = true, .f = 1152}); }},
      {"swiglu_backward_both", [](OpRun& r) { Backward(r, {.col = true}); }},
      {"swiglu_backward_mx", [](OpRun& r) { Backward(r, {.tiling = T::kRow32, .col = true}); }},
  };
}

}  // namespace octavo::test
