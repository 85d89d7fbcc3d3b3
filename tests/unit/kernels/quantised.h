// Owners of quantised tensors and row groups for the kernel tests. Memory starts poisoned, so that
// an element that a kernel should write and does not is seen.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/formats/fp8.h"
#include "kernels/ops.h"

namespace octavo {

inline std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A CPU backend for the length of a test.
class CpuBackend {
 public:
  CpuBackend() : backend_(CreateCpuBackend()) {}
  ~CpuBackend() { DestroyCpuBackend(&backend_); }
  const Ops* operator->() const { return backend_.ops; }
  OpsContext* context() const { return backend_.context; }

 private:
  Backend backend_;
};

// Row groups with the given numbers of rows, each padded to 128.
class Groups {
 public:
  explicit Groups(std::vector<std::int64_t> rows) : rows_(std::move(rows)) {
    std::int64_t total = 0;
    for (const std::int64_t n : rows_) {
      begin_.push_back(total);
      total += RoundUp(n, kRowAlign);
    }
    padded_rows_ = total;
  }
  // A dense tensor: one group, no padding, any number of rows.
  static Groups Dense(std::int64_t rows) {
    Groups groups({rows});
    groups.padded_rows_ = rows;
    return groups;
  }
  RowGroups view() const {
    return {.count = static_cast<std::int32_t>(rows_.size()),
            .begin = begin_.data(),
            .rows = rows_.data(),
            .host_begin = begin_.data(),
            .host_rows = rows_.data(),
            .padded_rows = padded_rows_};
  }
  std::int64_t count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t padded_rows() const { return padded_rows_; }
  std::int64_t begin(std::int64_t g) const { return begin_[Index(g)]; }
  std::int64_t rows(std::int64_t g) const { return rows_[Index(g)]; }
  // Group of a real row; −1 for padding.
  std::int64_t GroupOf(std::int64_t row) const {
    for (std::int64_t g = 0; g < count(); ++g) {
      if (row >= begin(g) && row < begin(g) + rows(g)) {
        return g;
      }
    }
    return -1;
  }

 private:
  std::vector<std::int64_t> rows_, begin_;
  std::int64_t padded_rows_ = 0;
};

// How dequant_scales of row tiles lie in memory.
enum class ScaleOrder : std::uint8_t { kTileMajor, kRowMajor };

class Quantised {
 public:
  static constexpr std::uint8_t kPoison = 0xA5;

  Quantised() = default;  // absent
  Quantised(std::int64_t rows, std::int64_t cols, DType format, Tiling tiling,
            ScaleOrder order = ScaleOrder::kTileMajor, std::int64_t groups = 1) {
    codes_.assign(Index(rows * cols), kPoison);
    tensor_ = {.format = format, .tiling = tiling, .rows = rows, .cols = cols, .ld = cols};
    std::int64_t scales = groups;
    if (tiling == Tiling::kBlock128) {
      const std::int64_t stride = RoundUp(CeilDiv(cols, kTile), 4);
      scales = CeilDiv(rows, kTile) * stride;
      tensor_.scale_row_stride = stride;
      tensor_.scale_tile_stride = 1;
    } else if (tiling != Tiling::kTensor) {
      const std::int64_t tiles = CeilDiv(cols, tiling == Tiling::kRow32 ? kMxBlock : kTile);
      scales = rows * tiles;
      tensor_.scale_row_stride = order == ScaleOrder::kTileMajor ? 1 : tiles;
      tensor_.scale_tile_stride = order == ScaleOrder::kTileMajor ? rows : 1;
    }
    scales_.assign(Index(scales), std::numeric_limits<float>::quiet_NaN());
  }
  QTensor view() {
    QTensor tensor = tensor_;
    tensor.q = codes_.empty() ? nullptr : codes_.data();
    tensor.dequant_scale = scales_.empty() ? nullptr : scales_.data();
    return tensor;
  }
  std::uint8_t& code(std::int64_t r, std::int64_t c) { return codes_[Index(r * tensor_.cols + c)]; }
  float& dequant_scale(std::int64_t r, std::int64_t c, std::int64_t group = 0) {
    if (tensor_.tiling == Tiling::kTensor) {
      return scales_[Index(group)];
    }
    const std::int64_t row = tensor_.tiling == Tiling::kBlock128 ? r / kTile : r;
    const std::int64_t tile = c / (tensor_.tiling == Tiling::kRow32 ? kMxBlock : kTile);
    return scales_[Index(row * tensor_.scale_row_stride + tile * tensor_.scale_tile_stride)];
  }
  double Value(std::int64_t r, std::int64_t c, std::int64_t group = 0) {
    return static_cast<double>(Fp8Decode(tensor_.format, code(r, c))) *
           static_cast<double>(dequant_scale(r, c, group));
  }
  std::int64_t rows() const { return tensor_.rows; }
  std::int64_t cols() const { return tensor_.cols; }
  const std::vector<std::uint8_t>& codes() const { return codes_; }
  const std::vector<float>& scales() const { return scales_; }

 private:
  QTensor tensor_;
  std::vector<std::uint8_t> codes_;
  std::vector<float> scales_;
};

}  // namespace octavo
