// Row movement against plain re-statements, with split arrays and with packed message records.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

// k distinct experts for each token; `only` >= 0 sends every first choice there.
std::vector<std::int32_t> Choices(std::int64_t tokens, int experts, int k, int only,
                                  Random& random) {
  std::vector<std::int32_t> choices;
  std::vector<std::int32_t> order(Index(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::iota(order.begin(), order.end(), 0);
    if (only >= 0) {
      std::swap(order[0], order[Index(only)]);
    }
    for (int j = only >= 0 ? 1 : 0; j < k; ++j) {
      std::swap(order[Index(j)], order[Index(j + random.Below(experts - j))]);
    }
    choices.insert(choices.end(), order.begin(), order.begin() + k);
  }
  return choices;
}

struct Routed {
  std::vector<std::int64_t> counts, begin;
  std::vector<std::int32_t> dest_row;
};

Routed Route(CpuBackend& cpu, const std::vector<std::int32_t>& choices, int experts, int k,
             std::int64_t align) {
  Routed routed;
  routed.counts.assign(Index(experts), -1);
  routed.begin.assign(Index(experts), -1);
  routed.dest_row.assign(choices.size(), -7);
  cpu->route_index(cpu.context(), {.tokens = static_cast<std::int64_t>(choices.size()) / k,
                                   .experts = experts,
                                   .experts_per_token = k,
                                   .topk_index = choices.data(),
                                   .align = align,
                                   .counts = routed.counts.data(),
                                   .begin = routed.begin.data(),
                                   .dest_row = routed.dest_row.data(),
                                   .workspace = nullptr});
  return routed;
}

TEST(RouteIndex, OrdersByExpertThenToken) {
  Random random(51);
  CpuBackend cpu;
  for (const std::int64_t tokens : {0, 1, 300}) {
    for (const std::int64_t align : {std::int64_t{1}, kRowAlign}) {
      for (const int only : {-1, 3}) {
        const int experts = 8;
        const int k = only >= 0 ? 1 : 3;
        const std::vector<std::int32_t> choices = Choices(tokens, experts, k, only, random);
        const Routed routed = Route(cpu, choices, experts, k, align);
        std::int64_t begin = 0;
        for (std::int32_t e = 0; e < experts; ++e) {
          EXPECT_EQ(routed.begin[Index(e)], begin);
          std::int64_t rank = 0;
          for (std::size_t i = 0; i < choices.size(); ++i) {
            if (choices[i] == e) {
              EXPECT_EQ(routed.dest_row[i], begin + rank) << "choice " << i;
              ++rank;
            }
          }
          EXPECT_EQ(routed.counts[Index(e)], rank);
          begin += RoundUp(rank, align);
        }
      }
    }
  }
}

// A message record: payload, then dequant_scales, then the weight.
struct Records {
  std::int64_t payload_bytes, tiles;
  std::vector<std::uint8_t> bytes;
  Records(std::int64_t rows, std::int64_t payload, std::int64_t tile_count)
      : payload_bytes(payload), tiles(tile_count), bytes(Index(rows * stride()), 0xEE) {}
  std::int64_t stride() const { return payload_bytes + 4 * tiles + 4; }
  RowSet view() {
    return {.payload = bytes.data(),
            .payload_stride = stride(),
            .dequant_scale = bytes.data() + payload_bytes,
            .scale_row_stride = stride(),
            .scale_tile_stride = 4,
            .weight = bytes.data() + payload_bytes + 4 * tiles,
            .weight_stride = stride()};
  }
  float Float(std::int64_t row, std::int64_t offset) const {
    float v;
    std::memcpy(&v, bytes.data() + row * stride() + offset, 4);
    return v;
  }
};

TEST(Permute, CopiesPayloadScalesAndWeightsIntoRecordsAndSkipsNegativeRows) {
  Random random(52);
  CpuBackend cpu;
  const std::int64_t rows = 50;
  const std::int32_t fanout = 3;
  const std::int64_t payload_bytes = 48;
  const std::int32_t tiles = 2;
  std::vector<std::uint8_t> payload(Index(rows * payload_bytes));
  for (std::uint8_t& b : payload) {
    b = static_cast<std::uint8_t>(random.Below(256));
  }
  const std::vector<float> scales = random.Normals(tiles * rows);  // [tile][row]
  const std::vector<float> weights = random.Normals(rows * fanout);
  std::vector<std::int32_t> dest(Index(rows * fanout));
  std::iota(dest.begin(), dest.end(), 0);
  for (std::size_t i = dest.size() - 1; i > 0; --i) {
    std::swap(dest[i], dest[Index(random.Below(static_cast<std::int64_t>(i) + 1))]);
  }
  std::vector<bool> written(dest.size(), true);
  for (std::size_t i = 0; i < dest.size(); i += 7) {
    written[Index(dest[i])] = false;
    dest[i] = -1;
  }
  Records out(rows * fanout, payload_bytes, tiles);
  const RowSet src = {
      .payload = payload.data(),
      .payload_stride = payload_bytes,
      .dequant_scale = reinterpret_cast<std::uint8_t*>(const_cast<float*>(scales.data())),
      .scale_row_stride = 4,
      .scale_tile_stride = 4 * rows,
      .weight = reinterpret_cast<std::uint8_t*>(const_cast<float*>(weights.data())),
      .weight_stride = 4 * fanout};
  cpu->permute(cpu.context(), {.src = src,
                               .dst = out.view(),
                               .rows = rows,
                               .fanout = fanout,
                               .dest_row = dest.data(),
                               .payload_bytes = payload_bytes,
                               .tiles = tiles});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t j = 0; j < fanout; ++j) {
      const std::int64_t to = dest[Index(r * fanout + j)];
      if (to < 0) {
        continue;
      }
      EXPECT_TRUE(std::equal(payload.begin() + r * payload_bytes,
                             payload.begin() + (r + 1) * payload_bytes,
                             out.bytes.begin() + to * out.stride()));
      for (std::int64_t t = 0; t < tiles; ++t) {
        EXPECT_EQ(out.Float(to, payload_bytes + 4 * t), scales[Index(t * rows + r)]);
      }
      EXPECT_EQ(out.Float(to, payload_bytes + 4 * tiles), weights[Index(r * fanout + j)]);
    }
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (!written[i]) {
      EXPECT_EQ(out.bytes[i * Index(out.stride())], 0xEE) << "a skipped row was written";
    }
  }
}

TEST(PadRows, WritesPaddingAndNothingElse) {
  CpuBackend cpu;
  const Groups groups({130, 0, 5});
  Records records(groups.padded_rows(), 32, 3);
  const std::vector<std::uint8_t> before = records.bytes;
  cpu->pad_rows(cpu.context(),
                {.groups = groups.view(), .dst = records.view(), .payload_bytes = 32, .tiles = 3});
  for (std::int64_t r = 0; r < groups.padded_rows(); ++r) {
    const auto* row = records.bytes.data() + r * records.stride();
    if (groups.GroupOf(r) >= 0) {
      EXPECT_TRUE(std::equal(row, row + records.stride(), before.data()));
      continue;
    }
    EXPECT_TRUE(std::all_of(row, row + 32, [](std::uint8_t b) { return b == 0; }));
    for (std::int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(records.Float(r, 32 + 4 * t), 0x1p-126f);
    }
    EXPECT_EQ(records.Float(r, 32 + 12), 0.0f);
  }
}

TEST(ExpandSegments, MapsRowsBothWays) {
  CpuBackend cpu;
  const std::vector<RowSegment> segments = {{.src_begin = 2, .dst_begin = 10, .rows = 3},
                                            {.src_begin = 6, .dst_begin = 0, .rows = 1},
                                            {.src_begin = 5, .dst_begin = 99, .rows = 0}};
  std::vector<std::int32_t> forward(8, 77);
  cpu->expand_segments(cpu.context(), {.segments = segments.data(),
                                       .count = 3,
                                       .src_rows = 8,
                                       .dest_row = forward.data(),
                                       .invert = false});
  EXPECT_EQ(forward, (std::vector<std::int32_t>{-1, -1, 10, 11, 12, -1, 0, -1}));
  std::vector<std::int32_t> back(14, 77);
  cpu->expand_segments(cpu.context(), {.segments = segments.data(),
                                       .count = 2,
                                       .src_rows = 14,
                                       .dest_row = back.data(),
                                       .invert = true});
  EXPECT_EQ(back, (std::vector<std::int32_t>{6, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 3, 4, -1}));
}

class Combine : public testing::TestWithParam<DType> {};

TEST_P(Combine, SumsInOrderWithOneRounding) {
  Random random(53);
  CpuBackend cpu;
  const std::int64_t tokens = 20;
  const std::int64_t hidden = 70;
  const std::int32_t fanout = 4;
  const std::int64_t rows = tokens * fanout;
  Stored src(random.Normals(rows * hidden), GetParam());
  std::vector<float> weights = random.Normals(rows);
  std::vector<std::int32_t> from(Index(rows));
  std::iota(from.rbegin(), from.rend(), 0);
  from[5] = -1;
  const std::int64_t row_bytes = hidden * DTypeBytes(GetParam());
  const RowSet set = {.payload = static_cast<std::uint8_t*>(src.data()),
                      .payload_stride = row_bytes,
                      .weight = reinterpret_cast<std::uint8_t*>(weights.data()),
                      .weight_stride = 4};
  Stored y(Index(tokens * hidden), 5.0f, GetParam());
  std::vector<float> weight_out(Index(rows), 8.0f);
  cpu->combine(cpu.context(), {.src = set,
                               .src_dtype = GetParam(),
                               .tokens = tokens,
                               .hidden = hidden,
                               .fanout = fanout,
                               .source_row = from.data(),
                               .y = y.data(),
                               .y_dtype = GetParam(),
                               .accumulate = false,
                               .weight_out = weight_out.data()});
  // A later round goes on from the FP32 sums of the earlier one.
  std::vector<float> sums(Index(tokens * hidden), 0.25f);
  cpu->combine(cpu.context(), {.src = set,
                               .src_dtype = GetParam(),
                               .tokens = tokens,
                               .hidden = hidden,
                               .fanout = fanout,
                               .source_row = from.data(),
                               .y = sums.data(),
                               .y_dtype = DType::kF32,
                               .accumulate = true,
                               .weight_out = nullptr});
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      float sum = 0;
      float later = 0.25f;
      for (std::int64_t j = 0; j < fanout; ++j) {
        const std::int64_t row = from[Index(t * fanout + j)];
        if (row >= 0) {
          sum += src.Get(Index(row * hidden + h));
          later += src.Get(Index(row * hidden + h));
        }
      }
      const float want = GetParam() == DType::kBF16 ? FloatFromBf16(Bf16FromFloat(sum)) : sum;
      ASSERT_EQ(y.Get(Index(t * hidden + h)), want);
      ASSERT_EQ(sums[Index(t * hidden + h)], later);
    }
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(weight_out[i], from[i] >= 0 ? weights[Index(from[i])] : 8.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Combine, testing::Values(DType::kBF16, DType::kF32));

// Out and back: every token gets k times itself.
TEST(Permute, ThenCombineIsTheIdentityTimesK) {
  Random random(54);
  CpuBackend cpu;
  const std::int64_t tokens = 64;
  const std::int64_t hidden = 32;
  const std::int32_t k = 2;
  const std::vector<std::int32_t> choices = Choices(tokens, 6, k, -1, random);
  const Routed routed = Route(cpu, choices, 6, k, kRowAlign);
  std::vector<float> x = random.Normals(tokens * hidden);
  std::vector<float> rows(Index(6 * kRowAlign * hidden));
  cpu->permute(cpu.context(), {.src = {.payload = reinterpret_cast<std::uint8_t*>(x.data()),
                                       .payload_stride = hidden * 4},
                               .dst = {.payload = reinterpret_cast<std::uint8_t*>(rows.data()),
                                       .payload_stride = hidden * 4},
                               .rows = tokens,
                               .fanout = k,
                               .dest_row = routed.dest_row.data(),
                               .payload_bytes = hidden * 4,
                               .tiles = 0});
  std::vector<float> y(x.size());
  cpu->combine(cpu.context(), {.src = {.payload = reinterpret_cast<std::uint8_t*>(rows.data()),
                                       .payload_stride = hidden * 4},
                               .src_dtype = DType::kF32,
                               .tokens = tokens,
                               .hidden = hidden,
                               .fanout = k,
                               .source_row = routed.dest_row.data(),
                               .y = y.data(),
                               .y_dtype = DType::kF32,
                               .accumulate = false,
                               .weight_out = nullptr});
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(y[i], 2 * x[i]);
  }
}

}  // namespace
}  // namespace octavo
