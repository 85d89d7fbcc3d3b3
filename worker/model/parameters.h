// The parameter table: every trainable tensor, its shape, where its shard lives, how it starts.
//
// Storage is five flat buffers (master, gradient, m, v, copy) with equal offsets, split in two
// regions, so that gradient reduction is two packed all-reduces:
//   [ dense: replicated on all ranks | expert: rows of this rank's experts, replicated over the
//   ranks
//     with equal position in their expert-parallel groups ]
// Names and full shapes (row-major, [out, in]):
//   embedding.weight [V,H]                    final_norm.weight [H]       lm_head.weight [V,H]
//   (untied) layers.N.attn_norm.weight [H]             layers.N.attn.qkv.weight [(Hq+2Hkv)·D, H]
//   layers.N.attn.q_norm.weight, k_norm [D]   layers.N.attn.out.weight [H, Hq·D]
//   layers.N.mlp_norm.weight [H]              layers.N.router.weight [E,H]
//   layers.N.experts.fc1.weight [E,2F,H] (gate rows first)    layers.N.experts.fc2.weight [E,H,F]
//   layers.N.shared.fc1.weight, fc2           layers.N.mlp.fc1.weight, fc2  (dense layers)
// Initial values are a function of (seed, name, element index in the full tensor) alone, so they do
// not depend on the number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/layers/weight.h"
#include "worker/model/config.h"

namespace octavo {

enum class ParameterRegion : std::uint8_t { kDense, kExpert };

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;  // full shape
  ParameterRegion region = ParameterRegion::kDense;
  // This rank holds elements [first, first + count) of the full row-major tensor.
  std::int64_t first = 0, count = 0;
  std::int64_t offset = 0;  // elements from the start of each flat buffer
  float init_std = 0;       // 0: ones (norm weights)
  bool decay = true;        // weight decay applies
  float* master = nullptr;  // [count] device, FP32
  float* grad = nullptr;    // [count] device, FP32
  void* m = nullptr;        // [count] device, moment dtype
  void* v = nullptr;
  void* copy = nullptr;  // [count] BF16 for GEMMs; null where nothing reads one
  WeightState state;

  std::int64_t full_elements() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) {
      n *= d;
    }
    return n;
  }
  // First and number of experts of the shard (expert region).
  std::int64_t expert_first() const { return first / (full_elements() / shape[0]); }
  std::int64_t expert_count() const { return count / (full_elements() / shape[0]); }
};

// Owns the flat buffers. Not thread-safe.
class Parameters {
 public:
  // Builds the table and takes the buffers. ResourceExhausted names the bytes.
  static absl::StatusOr<Parameters> Create(const ModelConfig& model, const RunConfig& run,
                                           DType moment_dtype, const Backend& backend,
                                           Arena& arena);

  std::vector<Parameter>& all() { return all_; }
  const std::vector<Parameter>& all() const { return all_; }
  Parameter* Find(std::string_view name);  // null when there is none
  Parameter& At(std::string_view name);    // REQUIRES: exists

  DType moment_dtype() const { return moment_dtype_; }
  // Flat views. Padding between parameters (to 64 elements) is zero in every buffer.
  float* dense_grad() { return grad_; }
  std::int64_t dense_elements() const { return dense_elements_; }
  float* expert_grad() { return grad_ + dense_elements_; }
  std::int64_t expert_elements() const { return expert_elements_; }
  std::int64_t total_elements() const { return dense_elements_ + expert_elements_; }
  float* master() { return master_; }
  void* m() { return m_; }
  void* v() { return v_; }

  // Fills masters from the seed and zeroes moments. Waits for the device.
  void Initialize(std::uint64_t seed);
  // The masters were written (by Initialize, or from a checkpoint): copies are made anew when they
  // are read.
  void MastersChanged();
  // Zeroes the dense gradients; those of experts are overwritten by their first weight gradient.
  void BeginGradients();
  // Zeroes what no weight gradient has written since BeginGradients.
  void FinishGradients();

 private:
  Backend backend_;
  std::vector<Parameter> all_;
  DType moment_dtype_ = DType::kF32;
  float* master_ = nullptr;
  float* grad_ = nullptr;
  void* m_ = nullptr;
  void* v_ = nullptr;
  std::int64_t dense_elements_ = 0, expert_elements_ = 0;
};

// Parameters of the whole model and those active for one token (MoE: top-k experts of each layer).
struct ParameterCounts {
  std::int64_t total = 0, active = 0;
};
ParameterCounts CountParameters(const ModelConfig& model);

// Value of element `index` of parameter `name` with standard deviation 1 (tests and oracles).
float InitialNormal(std::uint64_t seed, std::string_view name, std::int64_t index);

}  // namespace octavo
