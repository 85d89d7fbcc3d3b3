// Names of what can be quantised, in the one spelling used by metrics, YAML, logs and files.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string_view>

namespace octavo {

// A product (or payload) that a precision plan decides about (NUMERICS 4).
enum class Op : std::uint8_t { kAttnQkv, kAttnOut, kMlpFc1, kMlpFc2, kFc1, kFc2, kDispatch };
inline constexpr int kOpCount = 7;
inline constexpr std::array<std::string_view, kOpCount> kOpNames = {
    "attn_qkv", "attn_out", "mlp_fc1", "mlp_fc2", "fc1", "fc2", "dispatch"};

// The operand of a product, or the kind of pass for accounting.
enum class Tensor : std::uint8_t { kInput, kWeight, kGrad };
inline constexpr int kTensorCount = 3;
inline constexpr std::array<std::string_view, kTensorCount> kTensorNames = {"input", "weight", "grad"};

constexpr std::string_view Name(Op op) { return kOpNames[static_cast<std::size_t>(op)]; }
constexpr std::string_view Name(Tensor t) { return kTensorNames[static_cast<std::size_t>(t)]; }

constexpr std::optional<Op> ParseOp(std::string_view text) {
  for (int i = 0; i < kOpCount; ++i) {
    if (kOpNames[static_cast<std::size_t>(i)] == text) {
      return static_cast<Op>(i);
    }
  }
  return std::nullopt;
}
constexpr std::optional<Tensor> ParseTensor(std::string_view text) {
  for (int i = 0; i < kTensorCount; ++i) {
    if (kTensorNames[static_cast<std::size_t>(i)] == text) {
      return static_cast<Tensor>(i);
    }
  }
  return std::nullopt;
}

// One place in the model: decoder layer and op.
struct OpSite {
  std::int32_t layer = 0;
  Op op = Op::kAttnQkv;
  friend auto operator<=>(const OpSite&, const OpSite&) = default;
};

}  // namespace octavo
