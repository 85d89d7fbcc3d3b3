// Decoder's creation: shapes from the configuration, weights from the table, memory from the
// arenas.
#include <algorithm>
#include <cmath>

#include "base/str.h"
#include "worker/model/decoder.h"

namespace octavo {
namespace {

WeightRef Ref(Parameters& parameters, const std::string& name) {
  Parameter& p = parameters.At(name);
  return {.master = p.master, .copy = p.copy, .grad = p.grad, .state = &p.state};
}

AuxScope ScopeOf(AuxLossScope scope) {
  switch (scope) {
    case AuxLossScope::kNone:
      break;
    case AuxLossScope::kMicrobatch:
      return AuxScope::kMicrobatch;
    case AuxLossScope::kSequence:
      return AuxScope::kSequence;
    case AuxLossScope::kGlobal:
      return AuxScope::kGlobal;
  }
  return AuxScope::kNone;
}

std::int64_t CapacityOf(const ModelConfig& model, const RunConfig& run) {
  const std::int64_t rows = run.tokens() * model.experts_per_token;
  if (run.expert_parallel == 1) {
    return rows;
  }
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(
             std::ceil(static_cast<double>(run.recv_capacity) * static_cast<double>(rows))));
}

std::string Prefix(std::int32_t layer) { return StrCat("layers.", layer, "."); }

}  // namespace

AttentionShape Decoder::ShapeOfAttention(std::int32_t layer, Parameters& parameters) const {
  const std::string prefix = Prefix(layer);
  AttentionShape shape{.layer = layer,
                       .hidden = model_.hidden,
                       .batch = run_.microbatch_sequences,
                       .sequence = run_.sequence_length,
                       .heads = model_.heads,
                       .kv_heads = model_.kv_heads,
                       .head_dim = model_.head_dim,
                       .qk_norm = model_.qk_norm,
                       .norm_eps = model_.norm_eps,
                       .rope_theta = model_.rope_theta,
                       .qkv = Ref(parameters, prefix + "attn.qkv.weight"),
                       .out = Ref(parameters, prefix + "attn.out.weight")};
  if (model_.qk_norm) {
    const Parameter& q = parameters.At(prefix + "attn.q_norm.weight");
    const Parameter& k = parameters.At(prefix + "attn.k_norm.weight");
    shape.q_norm = q.master;
    shape.k_norm = k.master;
    shape.q_norm_grad = q.grad;
    shape.k_norm_grad = k.grad;
  }
  return shape;
}

DenseMlpShape Decoder::ShapeOfMlp(std::int32_t layer, const std::string& part, std::int64_t ffn,
                                  Parameters& parameters) const {
  const std::string prefix = Prefix(layer) + part;
  return {.layer = layer,
          .hidden = model_.hidden,
          .ffn = ffn,
          .tokens = tokens_,
          .fc1 = Ref(parameters, prefix + ".fc1.weight"),
          .fc2 = Ref(parameters, prefix + ".fc2.weight")};
}

MoeShape Decoder::ShapeOfMoe(std::int32_t layer, Parameters& parameters, Exchange& ep,
                             float* bias) const {
  const std::string prefix = Prefix(layer);
  const RouterOptions& options = model_.router;
  const Parameter& router = parameters.At(prefix + "router.weight");
  MoeShape shape;
  // Two parts leave half of dispatch and combine uncovered; with four, what smaller products and
  // more messages cost was more than what they hid (two H200, bench_train_step_ranks --parts).
  constexpr std::int32_t kParts = 2;
  const std::int32_t parts = run_.dispatch_parts > 0 ? run_.dispatch_parts
                             : ep.overlaps()         ? kParts
                                                     : 1;
  shape.parts = ep.size() == 1 ? 1 : std::min(parts, model_.experts / ep.size());
  shape.router = {.layer = layer,
                  .config = {.experts = model_.experts,
                             .experts_per_token = model_.experts_per_token,
                             .score = options.score,
                             .normalize_topk = options.normalize_topk,
                             .routed_scaling_factor = options.routed_scaling_factor,
                             .n_group = options.n_group,
                             .topk_group = options.topk_group},
                  .hidden = model_.hidden,
                  .tokens = tokens_,
                  .sequence = run_.sequence_length,
                  .aux_scope = ScopeOf(options.aux_scope),
                  .aux_coefficient = options.aux_coefficient,
                  .z_coefficient = options.z_coefficient,
                  .loss_weight = 1.0f / static_cast<float>(run_.microbatches * run_.world_size),
                  .align = ep.size() == 1 ? kRowAlign : 1,
                  .weight = router.master,
                  .weight_grad = router.grad,
                  .bias = bias};
  const std::int32_t local = model_.experts / ep.size();
  shape.experts = {.layer = layer,
                   .hidden = model_.hidden,
                   .ffn = model_.expert_hidden,
                   .local_experts = local,
                   .padded_capacity = PaddedCapacity(CapacityOf(model_, run_), local),
                   .fc1 = Ref(parameters, prefix + "experts.fc1.weight"),
                   .fc2 = Ref(parameters, prefix + "experts.fc2.weight")};
  shape.shared = model_.shared_experts > 0;
  if (shape.shared) {
    shape.shared_mlp = ShapeOfMlp(layer, "shared",
                                  model_.shared_experts * model_.shared_expert_hidden, parameters);
  }
  return shape;
}

void Decoder::TakeSaved(Saved* saved, bool moe, bool mlp, const AttentionShape& attention,
                        const MoeShape& moe_shape, const DenseMlpShape& mlp_shape, Arena& arena) {
  const std::int64_t stream_bytes = tokens_ * model_.hidden * DTypeBytes(run_.act_dtype());
  const DType act = run_.act_dtype();
  saved->normed1 = arena.TakeBytes(stream_bytes);
  saved->rstd1 = arena.Take<float>(tokens_);
  saved->attention = Attention::TakeSaved(attention, act, mx_, arena);
  saved->x_mid = arena.TakeBytes(stream_bytes);
  saved->normed2 = arena.TakeBytes(stream_bytes);
  saved->rstd2 = arena.Take<float>(tokens_);
  if (moe) {
    saved->moe.experts = Experts::TakeSaved(moe_shape.experts, act, mx_, arena);
    if (moe_shape.shared) {
      saved->moe.shared = DenseMlp::TakeSaved(moe_shape.shared_mlp, act, mx_, arena);
    }
  }
  if (mlp) {
    saved->mlp = DenseMlp::TakeSaved(mlp_shape, act, mx_, arena);
  }
}

void Decoder::TakeScratch(const DecoderArenas& arenas) {
  Arena& arena = arenas.workspace;
  const DType act = run_.act_dtype();
  const std::int64_t bytes = DTypeBytes(act), hidden = model_.hidden;
  const std::int64_t width = model_.qkv_width();
  const std::int64_t attended = static_cast<std::int64_t>(model_.heads) * model_.head_dim;
  const std::int64_t shared = model_.shared_experts * model_.shared_expert_hidden;
  const std::int64_t ffn = std::max(shared, model_.dense_hidden);

  WorkspaceSizes sizes{};
  backend_.ops->workspace_sizes(backend_.context,
                                WorkspaceQuery{.tokens = tokens_,
                                               .hidden = hidden,
                                               .vocab = model_.vocab,
                                               .batch = run_.microbatch_sequences,
                                               .sequence = run_.sequence_length,
                                               .parameters = 0,
                                               .experts = model_.experts,
                                               .experts_per_token = model_.experts_per_token,
                                               .heads = model_.heads,
                                               .kv_heads = model_.kv_heads,
                                               .head_dim = model_.head_dim,
                                               .dtype = act},
                                &sizes);
  norm_workspace_ = arena.TakeBytes(sizes.rms_norm_backward);
  embedding_workspace_ = arena.TakeBytes(sizes.embedding_backward);
  if (sizes.gemm > 0) {
    backend_.ops->set_gemm_workspace(backend_.context, arena.TakeBytes(sizes.gemm), sizes.gemm);
  }

  const std::int64_t widest = std::max({hidden, width, attended, 2 * ffn});
  std::int64_t most_rows = tokens_, shadow_widest = widest;
  const LinearScratch linear{.row = QBuffer::Take(arena, tokens_, widest, 1, mx_),
                             .col = QBuffer::Take(arena, tokens_, widest, 1, mx_)};
  attention_scratch_ = {
      .linear = linear,
      .d_qkv = arena.TakeBytes(tokens_ * width * bytes),
      .d_attended = arena.TakeBytes(tokens_ * attended * bytes),
      .workspace = arena.TakeBytes(std::max(sizes.attention_forward, sizes.attention_backward)),
      .workspace_bytes = std::max(sizes.attention_forward, sizes.attention_backward),
      .norm_workspace = norm_workspace_};
  if (ffn > 0) {
    mlp_scratch_ = {.linear = linear,
                    .d_act = arena.TakeBytes(tokens_ * ffn * bytes),
                    .d_gate_up = arena.TakeBytes(tokens_ * 2 * ffn * bytes)};
  }
  for (Layer& layer : layers_) {
    if (layer.moe == nullptr) {
      continue;
    }
    const MoeShape& shape = layer.moe->shape();
    most_rows = std::max(most_rows, shape.experts.padded_capacity);
    shadow_widest = std::max(shadow_widest, 2 * model_.expert_hidden);
    moe_scratch_ = {
        .router = Router::TakeScratch(shape.router, model_.layers, act, sizes.route_index, arena,
                                      arenas.pinned),
        .experts = Experts::TakeScratch(shape.experts, act, mx_, arena),
        .shared = mlp_scratch_,
        .wire_x = QBuffer::Take(arena, tokens_, hidden, 1, mx_),
        .wire_dy = QBuffer::Take(arena, tokens_, hidden, 1, mx_),
        .sum = arena.Take<float>(tokens_ * hidden),
        .shared_rows = shape.shared ? arena.TakeBytes(tokens_ * hidden * bytes) : nullptr,
        .d_topk_weight = arena.Take<float>(tokens_ * model_.experts_per_token)};
    break;  // all MoE layers have one shape
  }
  shadow_row_ = QBuffer::Take(arena, most_rows, shadow_widest, model_.experts, mx_);
  shadow_col_ = QBuffer::Take(arena, most_rows, shadow_widest, model_.experts, mx_);
}

Decoder::Decoder(const DecoderOptions& options, Parameters& parameters, WeightCache& cache,
                 DenseGroups& dense, Exchange* world, Exchange* expert_parallel,
                 const DecoderArenas& arenas)
    : model_(options.model),
      run_(options.run),
      backend_(options.backend),
      mx_(options.mx),
      tokens_(options.run.tokens()),
      world_(world) {
  const DType act = run_.act_dtype();
  const std::int64_t stream_bytes = tokens_ * model_.hidden * DTypeBytes(act);
  dense.Prepare(tokens_);
  layers_.resize(static_cast<std::size_t>(model_.layers));
  step_counts_.assign(layers_.size() * static_cast<std::size_t>(model_.experts), 0);

  AttentionShape attention_shape;
  MoeShape moe_shape;
  DenseMlpShape mlp_shape;
  bool recompute_moe = false, recompute_mlp = false;
  for (std::int32_t l = 0; l < model_.layers; ++l) {
    Layer& layer = layers_[static_cast<std::size_t>(l)];
    const std::string prefix = Prefix(l);
    layer.name = StrCat("layer ", l);
    layer.recompute = static_cast<std::size_t>(l) < run_.recompute.size() &&
                      run_.recompute[static_cast<std::size_t>(l)];
    const Parameter& norm1 = parameters.At(prefix + "attn_norm.weight");
    const Parameter& norm2 = parameters.At(prefix + "mlp_norm.weight");
    layer.norm1 = norm1.master;
    layer.norm1_grad = norm1.grad;
    layer.norm2 = norm2.master;
    layer.norm2_grad = norm2.grad;
    layer.x_in = arenas.activations.TakeBytes(stream_bytes);
    attention_shape = ShapeOfAttention(l, parameters);
    layer.attention = std::make_unique<Attention>(attention_shape, cache);
    if (model_.is_dense(l)) {
      mlp_shape = ShapeOfMlp(l, "mlp", model_.dense_hidden, parameters);
      layer.mlp = std::make_unique<DenseMlp>(mlp_shape, cache);
      recompute_mlp |= layer.recompute;
    } else {
      if (model_.router.bias_update_rate > 0) {
        layer.bias = arenas.activations.Take<float>(model_.experts);
      }
      moe_shape = ShapeOfMoe(l, parameters, *expert_parallel, layer.bias);
      layer.moe = std::make_unique<Moe>(moe_shape, cache);
      layer.routing.router = Router::TakeSaved(moe_shape.router, arenas.activations);
      layer.aux_history.assign(static_cast<std::size_t>(model_.experts), 0);
      recompute_moe |= layer.recompute;
    }
    if (!layer.recompute) {
      layer.saved = saved_.emplace_back(std::make_unique<Saved>()).get();
      TakeSaved(layer.saved, layer.moe != nullptr, layer.mlp != nullptr, attention_shape, moe_shape,
                mlp_shape, arenas.activations);
    }
  }
  if (recompute_moe || recompute_mlp) {
    Saved* shared = saved_.emplace_back(std::make_unique<Saved>()).get();
    TakeSaved(shared, recompute_moe, recompute_mlp, attention_shape, moe_shape, mlp_shape,
              arenas.activations);
    for (Layer& layer : layers_) {
      layer.saved = layer.recompute ? shared : layer.saved;
    }
  }
  const bool any_moe = std::any_of(layers_.begin(), layers_.end(),
                                   [](const Layer& layer) { return layer.moe != nullptr; });
  if (any_moe) {
    dispatch_ = std::make_unique<MoeDispatch>(
        backend_,
        DispatchShape{.tokens = tokens_,
                      .hidden = model_.hidden,
                      .experts = model_.experts,
                      .experts_per_token = model_.experts_per_token,
                      .capacity = CapacityOf(model_, run_),
                      .layers = model_.layers},
        expert_parallel, act, mx_, arenas.communication, arenas.pinned);
  }

  const Parameter& embedding = parameters.At("embedding.weight");
  embedding_ = embedding.master;
  embedding_grad_ = embedding.grad;
  const Parameter& final_norm = parameters.At("final_norm.weight");
  final_norm_ = final_norm.master;
  final_norm_grad_ = final_norm.grad;
  const LmHeadShape head{
      .tokens = tokens_,
      .hidden = model_.hidden,
      .vocab = model_.vocab,
      .weight = Ref(parameters, model_.tied_embeddings ? "embedding.weight" : "lm_head.weight")};
  head_ = std::make_unique<LmHead>(head);
  head_scratch_ = LmHead::TakeScratch(head, act, arenas.workspace);

  x_final_ = arenas.activations.TakeBytes(stream_bytes);
  rstd_final_ = arenas.activations.Take<float>(tokens_);
  h_ = arenas.activations.TakeBytes(stream_bytes);
  branch_ = arenas.workspace.TakeBytes(stream_bytes);
  d_stream_ = arenas.workspace.TakeBytes(stream_bytes);
  d_normed_ = arenas.workspace.TakeBytes(stream_bytes);
  TakeScratch(arenas);
}

}  // namespace octavo
