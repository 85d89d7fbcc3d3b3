// SwiGLU times the routing weight, forward and backward, with the cast fused: values go from FP32
// registers to FP8 codes, never through BF16.
//
//   forward    act = silu(g)·u·p                         silu(g) = g·s, s = sigmoid(g)
//   backward   d = d_act·p   d_up = d·silu(g)   d_gate = d·u·s·(1 + g·(1 − s))
//              dweight = Σ_f silu(g)·u·d_act             (p = 0 stays right: nothing divides by p)
//
// Both walk bands of 128 rows in blocks of 128 columns; a block's FP32 values are stored in act
// dtype or quantised on the spot (quantize_block.h).
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

OCTAVO_MULTIVERSION void ForwardRow(const float* __restrict gate, const float* __restrict up,
                                    float p, std::int64_t n, float* __restrict act) {
  for (std::int64_t i = 0; i < n; ++i) {
    act[i] = gate[i] * SigmoidF32(gate[i]) * up[i] * p;
  }
}

// weighted[i] = silu(gate)·up·d_act, the terms of dweight. Outputs alias nothing.
OCTAVO_MULTIVERSION void BackwardRow(const float* __restrict gate, const float* __restrict up,
                                     const float* __restrict d_act, float p, std::int64_t n,
                                     float* __restrict d_gate, float* __restrict d_up,
                                     float* __restrict weighted) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float sigmoid = SigmoidF32(gate[i]);
    const float silu = gate[i] * sigmoid;
    const float d = d_act[i] * p;
    d_up[i] = d * silu;
    d_gate[i] = d * up[i] * (sigmoid * (1.0f + gate[i] * (1.0f - sigmoid)));
    weighted[i] = silu * up[i] * d_act[i];
  }
}

// Where a block of results goes: act dtype, or FP8 row-wise and column-wise.
struct Sink {
  void* plain;
  DType dtype;
  QuantizeRule rule;
  const QTensor *row, *col;
  std::int64_t cols;  // of the whole output

  bool quantised() const { return plain == nullptr; }
};

void CheckSink(const Sink& sink, std::int64_t rows, const char* what) {
  if (sink.quantised()) {
    OCTAVO_CHECK(sink.row->present() || sink.col->present(), "%s: no output", what);
    OCTAVO_CHECK(sink.cols % kTile == 0 || sink.rule.tiling == Tiling::kRow32,
                 "%s: %lld columns are not a multiple of 128", what,
                 static_cast<long long>(sink.cols));
    if (sink.row->present()) {
      CheckQTensor(*sink.row, rows, sink.cols, what);
    }
    if (sink.col->present()) {
      CheckQTensor(*sink.col, sink.cols, RoundUp(rows, kTile), what);
    }
  } else {
    OCTAVO_CHECK(!sink.row->present() && !sink.col->present(), "%s: two output forms", what);
  }
}

// block: FP32 [band.real, width], row stride kTile, for columns [col_begin, col_begin + width).
struct BlockOut {
  std::int64_t col_begin, width;
  const float* block;
};
void Emit(Context& context, const Sink& sink, const Band& band, const BlockOut& out,
          RowTileCounts* counts) {
  if (sink.quantised()) {
    QuantizeBand(context,
                 {.band = band,
                  .col_begin = out.col_begin,
                  .width = out.width,
                  .block = {.data = out.block,
                            .dtype = DType::kF32,
                            .stride = kTile,
                            .rows = band.real,
                            .cols = out.width},
                  .rule = sink.rule,
                  .row = sink.row,
                  .col = sink.col},
                 counts);
    return;
  }
  for (std::int64_t r = 0; r < band.stored; ++r) {
    const std::int64_t offset = (band.row + r) * sink.cols + out.col_begin;
    if (r < band.real) {
      StoreRow(out.block + r * kTile, out.width, sink.plain, sink.dtype, offset);
    } else {
      std::memset(static_cast<std::uint8_t*>(sink.plain) + offset * DTypeBytes(sink.dtype), 0,
                  static_cast<std::size_t>(out.width * DTypeBytes(sink.dtype)));
    }
  }
}

}  // namespace

void SwigluForward(OpsContext* ops_context, const SwigluForwardArgs& args) {
  Context& context = Get(ops_context);
  const Sink sink = {.plain = args.act,
                     .dtype = args.dtype,
                     .rule = args.rule,
                     .row = &args.quant,
                     .col = &args.quant_col,
                     .cols = args.f};
  CheckSink(sink, args.groups.padded_rows, "swiglu_forward");
  float* block = context.block.Get<float>(kTile * kTile);
  float gate_buffer[kTile];
  float up_buffer[kTile];
  ForEachBand(args.groups, [&](const Band& band) {
    RowTileCounts counts;
    for (std::int64_t c = 0; c < args.f; c += kTile) {
      const std::int64_t width = std::min(kTile, args.f - c);
      for (std::int64_t r = 0; r < band.real; ++r) {
        const std::int64_t row = band.row + r;
        const std::int64_t at = row * 2 * args.f + c;
        const float* gate = LoadRow(args.gate_up, args.dtype, at, width, gate_buffer);
        const float* up = LoadRow(args.gate_up, args.dtype, at + args.f, width, up_buffer);
        const float p = args.weight != nullptr ? args.weight[row] : 1.0f;
        ForwardRow(gate, up, p, width, block + r * kTile);
      }
      Emit(context, sink, band, {.col_begin = c, .width = width, .block = block}, &counts);
    }
    if (sink.quantised()) {
      AddToSlot(counts, band.real * args.f,
                args.stats != nullptr ? args.stats + band.group : nullptr);
    }
  });
}

void SwigluBackward(OpsContext* ops_context, const SwigluBackwardArgs& args) {
  Context& context = Get(ops_context);
  const Sink sink = {.plain = args.d_gate_up,
                     .dtype = args.dtype,
                     .rule = args.rule,
                     .row = &args.quant,
                     .col = &args.quant_col,
                     .cols = 2 * args.f};
  CheckSink(sink, args.groups.padded_rows, "swiglu_backward");
  // A tile of the output must not span gate and up.
  OCTAVO_CHECK(!sink.quantised() || args.f % TileLength(args.rule.tiling) == 0,
               "swiglu_backward: F = %lld is not a multiple of the tile",
               static_cast<long long>(args.f));
  float* block = context.block.Get<float>(2 * kTile * kTile);
  float* up_block = block + kTile * kTile;
  float gate_buffer[kTile];
  float up_buffer[kTile];
  float d_act_buffer[kTile];
  float weighted[kTile];
  ForEachBand(args.groups, [&](const Band& band) {
    RowTileCounts counts;
    // dweight: FP32 terms, FP64 lanes (element f in lane f % 8), summed in order.
    constexpr std::int64_t kLanes = 8;
    double lanes[kTile][kLanes] = {};
    for (std::int64_t c = 0; c < args.f; c += kTile) {
      const std::int64_t width = std::min(kTile, args.f - c);
      for (std::int64_t r = 0; r < band.real; ++r) {
        const std::int64_t row = band.row + r;
        const std::int64_t at = row * 2 * args.f + c;
        BackwardRow(LoadRow(args.gate_up, args.dtype, at, width, gate_buffer),
                    LoadRow(args.gate_up, args.dtype, at + args.f, width, up_buffer),
                    LoadRow(args.d_act, args.dtype, row * args.f + c, width, d_act_buffer),
                    args.weight != nullptr ? args.weight[row] : 1.0f, width, block + r * kTile,
                    up_block + r * kTile, weighted);
        for (std::int64_t i = 0; i < width; ++i) {
          lanes[r][i % kLanes] += weighted[i];
        }
      }
      Emit(context, sink, band, {.col_begin = c, .width = width, .block = block}, &counts);
      Emit(context, sink, band, {.col_begin = args.f + c, .width = width, .block = up_block},
           &counts);
    }
    if (sink.quantised()) {
      AddToSlot(counts, band.real * 2 * args.f,
                args.stats != nullptr ? args.stats + band.group : nullptr);
    }
    for (std::int64_t r = 0; args.dweight != nullptr && r < band.stored; ++r) {
      double sum = 0;
      for (std::int64_t i = 0; i < kLanes; ++i) {
        sum += lanes[r][i];
      }
      args.dweight[band.row + r] = static_cast<float>(sum);
    }
  });
}

}  // namespace octavo::cpu
