// The table of op cases, by family. One function a case; see op_run.h for what a case is.
#pragma once

#include <vector>

#include "tests/ops/op_run.h"

namespace octavo::test {

std::vector<OpCase> QuantizeCases();
std::vector<OpCase> GemmCases();
std::vector<OpCase> MoeCases();
std::vector<OpCase> ModelCases();

// Group sizes with everything that has gone wrong in somebody's code: empty groups first, last and
// in a row, one row, a full tile, one more than a tile.
inline std::vector<std::int64_t> RaggedRows() { return {0, 1, 128, 0, 0, 129, 77, 300, 0}; }

// A quantised matrix in memory that is compared. by_row: D with row stride 1 (GEMM operand), else
// with tile stride 1 (wire).
inline QTensor OutQTensor(OpRun& run, const std::string& name, std::int64_t rows, std::int64_t cols,
                          DType format, Tiling tiling, bool by_row, std::int64_t groups = 1,
                          Agree codes = Agree::kExact, double tolerance = 0) {
  QTensor t;
  t.format = format;
  t.tiling = tiling;
  t.rows = rows;
  t.cols = cols;
  t.q = run.Out<std::uint8_t>(name + ".q", DType::kU8, rows * cols, codes, tolerance);
  std::int64_t count = 0;
  switch (tiling) {
    case Tiling::kTensor:
      count = groups;
      break;
    case Tiling::kBlock128:
      t.scale_row_stride = RoundUp(CeilDiv(cols, kTile), 4);
      t.scale_tile_stride = 1;
      count = CeilDiv(rows, kTile) * t.scale_row_stride;
      break;
    default: {
      const std::int64_t tiles = CeilDiv(cols, tiling == Tiling::kRow32 ? kMxBlock : kTile);
      t.scale_row_stride = by_row ? 1 : tiles;
      t.scale_tile_stride = by_row ? rows : 1;
      count = rows * tiles;
    }
  }
  t.dequant_scale = run.Out<float>(name + ".D", DType::kF32, count,
                                   codes == Agree::kExact ? Agree::kExact : Agree::kRelative, 1e-5);
  return t;
}

}  // namespace octavo::test
