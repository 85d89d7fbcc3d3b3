#include "worker/model/transformer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/ops_range.h"
#include "worker/model/execution_order.h"
#include "worker/model/precision_sync.h"
#include "worker/model/transformer_impl.h"

namespace octavo {

Transformer::Transformer(std::unique_ptr<TransformerImpl> impl) : impl_(std::move(impl)) {}
Transformer::~Transformer() = default;

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Create(
    const TransformerOptions& options) {
  auto impl = std::make_unique<TransformerImpl>(options);
  RETURN_IF_ERROR(impl->Build());
  return std::unique_ptr<Transformer>(new Transformer(std::move(impl)));
}

Parameters& Transformer::parameters() { return impl_->parameters_; }

void Transformer::InitializeParameters() {
  impl_->parameters_.Initialize(impl_->options_.run.seed);
  impl_->weights_->Invalidate();
}

void Transformer::ParametersLoaded() {
  impl_->parameters_.MastersChanged();
  impl_->weights_->Invalidate();
}

absl::Status Transformer::SetPlan(const PrecisionPlan& plan) { return impl_->SetPlan(plan); }
const PrecisionPlan& Transformer::plan() const { return impl_->plan_; }

void Transformer::BeginStep(const StepOptions& options) {
  OCTAVO_CHECK_GT(options.target_tokens, 0);
  impl_->step_ = options;
  std::fill(impl_->carried_nonfinite_.begin(), impl_->carried_nonfinite_.end(), 0);
  impl_->StartPass();
}

absl::Status Transformer::ForwardBackward(const std::int32_t* tokens, const std::int32_t* targets,
                                          std::int64_t target_count) {
  impl_->tokens_counted_ += target_count < 0 ? impl_->options_.run.tokens() : target_count;
  return impl_->Run(tokens, targets, true);
}

absl::StatusOr<PassResult> Transformer::FinishPass() { return impl_->FinishPass(); }

void Transformer::RestartPass(std::span<const std::int32_t> bf16_layers) {
  impl_->CarryNonfinite();
  if (bf16_layers.empty()) {
    std::fill(impl_->context_.held.begin(), impl_->context_.held.end(), 1);
  }
  for (std::int32_t layer : bf16_layers) {
    impl_->context_.held[static_cast<std::size_t>(layer)] = 1;
  }
  impl_->StartPass();
}

void Transformer::ApplyOptimizer(const OptimizerStep& step) {
  const OpsRange range(impl_->options_.backend, "optimizer");
  impl_->optimizer_->SetControl(step.grad_factor, step.skip);
  impl_->optimizer_->Apply(impl_->parameters_, step.lr, step.t);
  impl_->weights_->Invalidate();
}

absl::Status Transformer::EndStep(bool applied) { return impl_->EndStep(applied); }

absl::Status Transformer::Evaluate(const std::int32_t* tokens, const std::int32_t* targets,
                                   double* loss_sum) {
  return impl_->Evaluate(tokens, targets, loss_sum);
}

absl::Status Transformer::Logits(const std::int32_t* tokens, std::int64_t first, std::int64_t rows,
                                 float* out) {
  const Backend& backend = impl_->options_.backend;
  const std::int64_t vocab = impl_->options_.model.vocab;
  RETURN_IF_ERROR(impl_->Run(tokens, nullptr, false));
  for (std::int64_t at = 0; at < rows;) {
    const std::int64_t part = std::min(rows - at, impl_->decoder_->logits_rows_max());
    backend.ops->copy(backend.context,
                      {.dst = out + at * vocab,
                       .src = impl_->decoder_->Logits(impl_->context_, first + at, part),
                       .bytes = part * vocab * static_cast<std::int64_t>(sizeof(float)),
                       .kind = CopyKind::kToHost});
    backend.ops->synchronize(backend.context);  // the next part overwrites the device's copy
    at += part;
  }
  return impl_->CheckDevice();
}

std::span<const StatSlot> Transformer::stats() const { return impl_->stats_; }
const std::vector<TensorSite>& Transformer::stat_sites() const { return impl_->states_->sites(); }
std::span<const SqnrSlot> Transformer::sqnr() const { return impl_->states_->host_energies(); }
const std::vector<TensorSite>& Transformer::sqnr_sites() const {
  return impl_->states_->energy_sites();
}
const std::vector<ShadowResult>& Transformer::shadows() const { return impl_->shadows_->results(); }
NonfiniteSite Transformer::SiteOfExecution(std::int64_t position) const {
  return DecodeExecution(position, impl_->plan_.layers);
}
const ExecutedCounters& Transformer::executed() const { return impl_->executed_; }
std::vector<ExpertLoad> Transformer::expert_load() const { return impl_->Load(); }
std::int64_t Transformer::multi_round_layers() const {
  return impl_->decoder_->multi_round_layers();
}

Transformer::PhaseSeconds Transformer::phase_seconds() const { return impl_->phase_seconds_; }

std::vector<StateTensor> Transformer::ExportState() const {
  std::vector<StateTensor> state = ExportWindows(*impl_->states_);
  const Backend& backend = impl_->options_.backend;
  for (std::int32_t l = 0; l < impl_->options_.model.layers; ++l) {
    if (!impl_->decoder_->is_moe(l) || impl_->decoder_->bias(l) == nullptr) {
      continue;
    }
    StateTensor bias{.name = StrCat("layers.", l, ".router.bias")};
    bias.values.resize(static_cast<std::size_t>(impl_->options_.model.experts));
    backend.ops->copy(backend.context,
                      {.dst = bias.values.data(),
                       .src = impl_->decoder_->bias(l),
                       .bytes = static_cast<std::int64_t>(bias.values.size() * sizeof(float)),
                       .kind = CopyKind::kToHost});
    backend.ops->synchronize(backend.context);
    state.push_back(std::move(bias));
  }
  return state;
}

absl::Status Transformer::ImportState(std::span<const StateTensor> state) {
  RETURN_IF_ERROR(ImportWindows(state, impl_->plan_, *impl_->states_));
  impl_->states_->UploadQuantScales();
  const Backend& backend = impl_->options_.backend;
  for (const StateTensor& tensor : state) {
    for (std::int32_t l = 0; l < impl_->options_.model.layers; ++l) {
      if (!impl_->decoder_->is_moe(l) || impl_->decoder_->bias(l) == nullptr ||
          tensor.name != StrCat("layers.", l, ".router.bias")) {
        continue;
      }
      if (tensor.values.size() != static_cast<std::size_t>(impl_->options_.model.experts)) {
        return InvalidArgumentError(StrCat(tensor.name, " holds ", tensor.values.size(),
                                           " values; the model has ", impl_->options_.model.experts,
                                           " experts"));
      }
      backend.ops->copy(backend.context,
                        {.dst = impl_->decoder_->bias(l),
                         .src = tensor.values.data(),
                         .bytes = static_cast<std::int64_t>(tensor.values.size() * sizeof(float)),
                         .kind = CopyKind::kToDevice});
    }
  }
  backend.ops->synchronize(backend.context);
  return absl::OkStatus();
}

ModelMemory Transformer::memory() const {
  return {.parameters = impl_->parameter_arena_.reserved_bytes(),
          .activations = impl_->activation_arena_.reserved_bytes(),
          .workspace = impl_->workspace_arena_.reserved_bytes(),
          .communication = impl_->communication_arena_.reserved_bytes(),
          .precision = impl_->precision_arena_.reserved_bytes()};
}

}  // namespace octavo
