// Moving rows: where each (token, choice) goes, copies by source row, padding, and the way back.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/scale.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

// FP32 values of a RowSet lie at byte offsets of packed messages, so they are copied, not
// dereferenced.
float LoadFloat(const std::uint8_t* at) {
  float value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
void StoreFloat(float value, std::uint8_t* at) { std::memcpy(at, &value, sizeof(value)); }

std::uint8_t* Payload(const RowSet& set, std::int64_t row) {
  return set.payload + row * set.payload_stride;
}
std::uint8_t* DequantScale(const RowSet& set, std::int64_t row, std::int64_t tile) {
  return set.dequant_scale + row * set.scale_row_stride + tile * set.scale_tile_stride;
}
std::uint8_t* Weight(const RowSet& set, std::int64_t row) {
  return set.weight + row * set.weight_stride;
}

}  // namespace

void RouteIndex(OpsContext*, const RouteIndexArgs& args) {
  OCTAVO_CHECK(args.align >= 1, "route_index: align = %lld", static_cast<long long>(args.align));
  const std::int64_t choices = args.tokens * args.experts_per_token;
  std::fill_n(args.counts, args.experts, std::int64_t{0});
  for (std::int64_t i = 0; i < choices; ++i) {
    const std::int32_t e = args.topk_index[i];
    OCTAVO_CHECK(e >= 0 && e < args.experts, "route_index: expert %d of %d at choice %lld", e,
                 args.experts, static_cast<long long>(i));
    ++args.counts[e];
  }
  std::int64_t total = 0;
  for (std::int32_t e = 0; e < args.experts; ++e) {
    args.begin[e] = total;
    total += RoundUp(args.counts[e], args.align);
    args.counts[e] = 0;  // counted again below, where it is the rank of the next token
  }
  // A token chooses an expert once at most, so the order of choices is the order of tokens.
  for (std::int64_t i = 0; i < choices; ++i) {
    const std::int32_t e = args.topk_index[i];
    args.dest_row[i] = static_cast<std::int32_t>(args.begin[e] + args.counts[e]++);
  }
}

void Permute(OpsContext*, const PermuteArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    for (std::int64_t j = 0; j < args.fanout; ++j) {
      const std::int64_t to = args.dest_row[r * args.fanout + j];
      if (to < 0) {
        continue;
      }
      if (args.payload_bytes > 0) {
        std::memcpy(Payload(args.dst, to), Payload(args.src, r),
                    static_cast<std::size_t>(args.payload_bytes));
      }
      for (std::int64_t t = 0; t < args.tiles; ++t) {
        StoreFloat(LoadFloat(DequantScale(args.src, r, t)), DequantScale(args.dst, to, t));
      }
      if (args.src.weight != nullptr && args.dst.weight != nullptr) {
        StoreFloat(LoadFloat(Weight(args.src, r) + j * static_cast<std::int64_t>(sizeof(float))),
                   Weight(args.dst, to));
      }
    }
  }
}

void PadRows(OpsContext*, const PadRowsArgs& args) {
  ForEachBand(args.groups, [&](const Band& band) {
    for (std::int64_t row = band.row + band.real; row < band.row + band.stored; ++row) {
      if (args.dst.payload != nullptr) {
        std::memset(Payload(args.dst, row), 0, static_cast<std::size_t>(args.payload_bytes));
      }
      for (std::int64_t t = 0; t < args.tiles; ++t) {
        StoreFloat(kDequantScaleMin, DequantScale(args.dst, row, t));
      }
      if (args.dst.weight != nullptr) {
        StoreFloat(0.0f, Weight(args.dst, row));
      }
    }
  });
}

void ExpandSegments(OpsContext*, const ExpandSegmentsArgs& args) {
  std::fill_n(args.dest_row, args.src_rows, -1);
  for (std::int64_t s = 0; s < args.count; ++s) {
    const RowSegment& segment = args.segments[s];
    const std::int64_t from = args.invert ? segment.dst_begin : segment.src_begin;
    const std::int64_t to = args.invert ? segment.src_begin : segment.dst_begin;
    OCTAVO_CHECK(from >= 0 && segment.rows >= 0 && from + segment.rows <= args.src_rows,
                 "expand_segments: segment %lld covers [%lld, %lld) of %lld rows",
                 static_cast<long long>(s), static_cast<long long>(from),
                 static_cast<long long>(from + segment.rows),
                 static_cast<long long>(args.src_rows));
    for (std::int64_t i = 0; i < segment.rows; ++i) {
      args.dest_row[from + i] = static_cast<std::int32_t>(to + i);
    }
  }
}

void Combine(OpsContext* ops_context, const CombineArgs& args) {
  OCTAVO_CHECK(!args.accumulate || args.y_dtype == DType::kF32,
               "combine accumulates into FP32 only");
  Context& context = Get(ops_context);
  float* sum = context.row.Get<float>(args.hidden);
  float* buffer = context.block.Get<float>(args.hidden);
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    // A later round goes on where the earlier one stopped.
    if (args.accumulate) {
      std::memcpy(sum, static_cast<float*>(args.y) + t * args.hidden,
                  static_cast<std::size_t>(args.hidden) * sizeof(float));
    } else {
      std::fill_n(sum, args.hidden, 0.0f);
    }
    for (std::int64_t j = 0; j < args.fanout; ++j) {
      const std::int64_t from = args.source_row[t * args.fanout + j];
      if (from < 0) {
        continue;
      }
      AddRow(LoadRow(Payload(args.src, from), args.src_dtype, 0, args.hidden, buffer), args.hidden,
             sum);
      if (args.weight_out != nullptr && args.src.weight != nullptr) {
        args.weight_out[t * args.fanout + j] = LoadFloat(Weight(args.src, from));
      }
    }
    StoreRow(sum, args.hidden, args.y, args.y_dtype, t * args.hidden);
  }
}

}  // namespace octavo::cpu
