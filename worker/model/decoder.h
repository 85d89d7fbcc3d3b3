// Decoder: the walk through embedding, layers, final norm and head, forward and backward.
//
//   x ── norm ── attention ──(+)── norm ── MoE or dense MLP ──(+)── … ── norm ── head, loss
// The residual stream is in the act dtype; each addition is fused into the norm that follows it and
// rounded there, so a layer that recomputes starts from exactly the bits that its forward saw.
// Owns the layers and their activation and scratch buffers, all taken at creation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/arena.h"
#include "worker/layers/attention.h"
#include "worker/layers/context.h"
#include "worker/layers/dense_mlp.h"
#include "worker/layers/exchange.h"
#include "worker/layers/lm_head.h"
#include "worker/layers/moe.h"
#include "worker/layers/moe_dispatch.h"
#include "worker/model/config.h"
#include "worker/model/parameters.h"

namespace octavo {

struct DecoderArenas {
  Arena& activations;
  Arena& workspace;
  Arena& communication;
  Arena& pinned;
};

struct DecoderOptions {
  const ModelConfig& model;
  const RunConfig& run;
  Backend backend;
  bool mx = false;  // mxfp8 may be planned: buffers hold one scale per 32 elements
};

// One forward or backward over a microbatch.
struct DecoderPass {
  const std::int32_t* tokens = nullptr;   // [T] device
  const std::int32_t* targets = nullptr;  // [T]; null: no head and no loss
  float dloss = 0;                        // gradient of one token's loss; 0: forward only
  double* loss_sum = nullptr;             // [1] device, added to
  bool training = false;                  // counts and auxiliary histories are kept
  // Called in backward when the gradients of layers [layer, …) and of what follows them are final
  // (they may be called for at once several times; 0 is not said). Null: nobody asks.
  std::function<absl::Status(std::int32_t layer)> final_from;
  double aux_loss = 0, z_loss = 0;  // out: this rank's weighted terms
};

class Decoder {
 public:
  Decoder(const DecoderOptions& options, Parameters& parameters, WeightCache& cache,
          DenseGroups& dense, Exchange* world, Exchange* expert_parallel,
          const DecoderArenas& arenas);

  absl::Status Forward(LayerContext& ctx, DecoderPass* pass);
  // After a Forward with dloss != 0.
  absl::Status Backward(LayerContext& ctx, const DecoderPass& pass);

  // FP32 logits [rows, V] on the device of rows [first, first + rows) of the last Forward; rows <=
  // logits_rows_max(). Valid until the next call.
  const float* Logits(const LayerContext& ctx, std::int64_t first, std::int64_t rows) const {
    head_->Logits(ctx, head_scratch_, h_, first, rows);
    return head_scratch_.logits;
  }
  std::int64_t logits_rows_max() const { return head_scratch_.chunk; }

  // Start of a pass over the microbatches of a step.
  void ResetStepCounts();
  // [layers, E] the expert-parallel group's tokens per expert of the pass; dense layers stay 0.
  std::vector<std::int64_t>& step_counts() { return step_counts_; }
  // Balance bias of a MoE layer, [E] device; null without loss-free balance.
  float* bias(std::int32_t layer) { return layers_[static_cast<std::size_t>(layer)].bias; }
  bool is_moe(std::int32_t layer) const {
    return layers_[static_cast<std::size_t>(layer)].moe != nullptr;
  }
  std::int64_t multi_round_layers() const { return multi_round_layers_; }
  // Scratch of shadow casts, for the context.
  const QBuffer& shadow_row() const { return shadow_row_; }
  const QBuffer& shadow_col() const { return shadow_col_; }

 private:
  // Activations that backward reads; recomputing layers share one.
  struct Saved {
    void* normed1 = nullptr;  // [T, H] input of attention
    float* rstd1 = nullptr;
    AttentionSaved attention;
    void* x_mid = nullptr;    // [T, H] stream after attention
    void* normed2 = nullptr;  // [T, H] input of the MLP
    float* rstd2 = nullptr;
    MoeSaved moe;
    DenseMlpSaved mlp;
  };
  struct Layer {
    std::unique_ptr<Attention> attention;
    std::unique_ptr<Moe> moe;
    std::unique_ptr<DenseMlp> mlp;
    const float* norm1 = nullptr;
    const float* norm2 = nullptr;
    float* norm1_grad = nullptr;
    float* norm2_grad = nullptr;
    float* bias = nullptr;
    void* x_in = nullptr;  // [T, H] stream at entry
    bool recompute = false;
    Saved* saved = nullptr;
    MoeRouting routing;
    std::vector<std::int64_t> aux_history;  // [E] all ranks, earlier microbatches (global scope)
    std::string name;
  };

  AttentionShape ShapeOfAttention(std::int32_t layer, Parameters& parameters) const;
  MoeShape ShapeOfMoe(std::int32_t layer, Parameters& parameters, Exchange& ep, float* bias) const;
  DenseMlpShape ShapeOfMlp(std::int32_t layer, const std::string& part, std::int64_t ffn,
                           Parameters& parameters) const;
  void TakeSaved(Saved* saved, bool moe, bool mlp, const AttentionShape& attention,
                 const MoeShape& moe_shape, const DenseMlpShape& mlp_shape, Arena& arena);
  void TakeScratch(const DecoderArenas& arenas);

  struct NormArgs {
    const void* x;
    const void* residual;
    void* residual_out;
    const float* w;
    void* y;
    float* rstd;
  };
  void Norm(const LayerContext& ctx, const NormArgs& args) const;
  struct NormBackwardArgs {
    const void* h;
    const float* w;
    const float* rstd;
    const void* dy;
    const void* d_residual;
    void* dx;
    float* dw;
  };
  void NormBackward(const LayerContext& ctx, const NormBackwardArgs& args) const;
  absl::Status ForwardLayer(LayerContext& ctx, Layer& layer, std::int32_t index, DecoderPass* pass);
  absl::Status RecomputeLayer(const LayerContext& ctx, Layer& layer);
  absl::Status BackwardLayer(LayerContext& ctx, std::int32_t index, const DecoderPass& pass);

  const ModelConfig model_;
  const RunConfig run_;
  const Backend backend_;
  const bool mx_;
  const std::int64_t tokens_;
  Exchange* const world_;

  std::vector<Layer> layers_;
  std::vector<std::unique_ptr<Saved>> saved_;
  std::unique_ptr<MoeDispatch> dispatch_;
  LateWgrad late_;
  std::unique_ptr<LmHead> head_;
  const float* embedding_ = nullptr;
  float* embedding_grad_ = nullptr;
  const float* final_norm_ = nullptr;
  float* final_norm_grad_ = nullptr;

  // Stream ends.
  void* x_final_ = nullptr;  // [T, H]
  float* rstd_final_ = nullptr;
  void* h_ = nullptr;         // [T, H] normed, the head's input
  void* branch_ = nullptr;    // [T, H] output of the last attention or MLP
  void* d_stream_ = nullptr;  // [T, H] gradient of the stream
  void* d_normed_ = nullptr;  // [T, H]

  AttentionScratch attention_scratch_;
  MoeScratch moe_scratch_;
  DenseMlpScratch mlp_scratch_;
  LmHeadScratch head_scratch_;
  QBuffer shadow_row_, shadow_col_;
  void* norm_workspace_ = nullptr;
  void* embedding_workspace_ = nullptr;

  std::vector<std::int64_t> step_counts_;
  std::int64_t multi_round_layers_ = 0;
};

}  // namespace octavo
