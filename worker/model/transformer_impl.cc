#include "worker/model/transformer_impl.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/ops_range.h"
#include "worker/model/execution_order.h"
#include "worker/model/model_check.h"
#include "worker/model/precision_sync.h"

namespace octavo {
namespace {

TensorStatesOptions StatesOptions(const ModelConfig& model, const RunConfig& run) {
  TensorStatesOptions options;
  for (std::int32_t l = 0; l < model.layers; ++l) {
    const bool dense = model.is_dense(l);
    options.layers.push_back({.moe = !dense, .dense_mlp = dense || model.shared_experts > 0});
  }
  options.expert_count = model.experts / run.expert_parallel;
  options.expert_first = options.expert_count * (run.rank % run.expert_parallel);
  return options;
}

// Elements before the first parameter of each layer in the region, counted from the region's start;
// at the end of the list: before what follows the layers.
std::vector<std::int64_t> LayerBegins(const Parameters& parameters, ParameterRegion region,
                                      std::int64_t region_begin, std::int64_t elements,
                                      std::int32_t layers) {
  std::vector<std::int64_t> begins(static_cast<std::size_t>(layers) + 1, elements);
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.region != region) {
      continue;
    }
    const std::int64_t at = parameter.offset - region_begin;
    for (std::int32_t l = 0; l < layers; ++l) {
      if (parameter.name.starts_with(StrCat("layers.", l, "."))) {
        begins[static_cast<std::size_t>(l)] = std::min(begins[static_cast<std::size_t>(l)], at);
      }
    }
    if (parameter.name == "final_norm.weight") {
      begins.back() = at;
    }
  }
  // A layer without parameters in the region begins where the next does.
  for (std::size_t l = begins.size() - 1; l-- > 0;) {
    begins[l] = std::min(begins[l], begins[l + 1]);
  }
  return begins;
}

// Largest message that a communicator carries for us, for staging.
std::int64_t MessageBytes(const ModelConfig& model, const RunConfig& run) {
  const std::int64_t record = model.hidden * DTypeBytes(run.act_dtype()) + 64;
  const double rows = static_cast<double>(run.tokens() * model.experts_per_token) *
                      std::max(1.0f, run.recv_capacity);
  return static_cast<std::int64_t>(rows) * record + record;
}

}  // namespace

absl::Status TransformerImpl::Build() {
  const ModelConfig& model = options_.model;
  const RunConfig& run = options_.run;
  const Backend& backend = options_.backend;
  RETURN_IF_ERROR(CheckModel(model, run));
  RETURN_IF_ERROR(CheckPlan(options_.plan, model, run, backend));
  const ModelComms& comms = options_.comms;
  OCTAVO_CHECK(comms.world != nullptr && comms.expert_parallel != nullptr &&
               comms.expert_data != nullptr);
  if (comms.world->size() != run.world_size || comms.world->rank() != run.rank ||
      comms.expert_parallel->size() != run.expert_parallel ||
      comms.expert_data->size() != run.world_size / run.expert_parallel) {
    return InvalidArgumentError(
        StrCat("communicators of ", comms.world->size(), ", ", comms.expert_parallel->size(),
               " and ", comms.expert_data->size(), " ranks do not fit ", run.world_size,
               " ranks with expert_parallel ", run.expert_parallel));
  }

  ASSIGN_OR_RETURN(parameters_, Parameters::Create(model, run, options_.optimizer.moment_dtype,
                                                   backend, parameter_arena_));
  dense_begin_ = LayerBegins(parameters_, ParameterRegion::kDense, 0, parameters_.dense_elements(),
                             model.layers);
  expert_begin_ = LayerBegins(parameters_, ParameterRegion::kExpert, parameters_.dense_elements(),
                              parameters_.expert_elements(), model.layers);
  optimizer_ =
      std::make_unique<Optimizer>(backend, options_.optimizer, parameter_arena_, pinned_arena_);
  const auto exchange = [&](Communicator* comm, std::int64_t bytes) {
    return std::make_unique<Exchange>(backend, comm, bytes, communication_arena_, pinned_arena_,
                                      run.overlap);
  };
  constexpr std::int64_t kReduceStage = 16 << 20;
  world_ = exchange(comms.world, kReduceStage);
  expert_data_ = exchange(comms.expert_data, kReduceStage);
  expert_parallel_ = exchange(comms.expert_parallel, MessageBytes(model, run));

  const bool mx = run.allow_emulation;
  states_ = std::make_unique<TensorStates>(backend, StatesOptions(model, run), precision_arena_,
                                           pinned_arena_);
  shadows_ = std::make_unique<ShadowStates>(backend, *states_, model.experts / run.expert_parallel,
                                            precision_arena_, pinned_arena_);
  dense_groups_ = std::make_unique<DenseGroups>(backend, precision_arena_, pinned_arena_);
  weights_ = std::make_unique<WeightCache>(backend, states_.get(), dense_groups_.get(), mx,
                                           precision_arena_);
  decoder_ = std::make_unique<Decoder>(
      DecoderOptions{.model = model, .run = run, .backend = backend, .mx = mx}, parameters_,
      *weights_, *dense_groups_, world_.get(), expert_parallel_.get(),
      DecoderArenas{.activations = activation_arena_,
                    .workspace = workspace_arena_,
                    .communication = communication_arena_,
                    .pinned = pinned_arena_});

  sums_ = workspace_arena_.Take<double>(3);
  host_sums_ = pinned_arena_.Take<double>(3);
  device_counts_ = workspace_arena_.Take<std::int64_t>(model.experts);
  host_counts_ =
      pinned_arena_.Take<std::int64_t>(static_cast<std::int64_t>(model.experts) * model.layers);
  WorkspaceSizes sizes{};
  backend.ops->workspace_sizes(
      backend.context,
      WorkspaceQuery{.parameters = parameters_.total_elements(), .dtype = DType::kF32}, &sizes);
  squares_workspace_ = workspace_arena_.TakeBytes(sizes.sum_squares);
  for (const Arena* arena : {&parameter_arena_, &activation_arena_, &workspace_arena_,
                             &communication_arena_, &precision_arena_, &pinned_arena_}) {
    if (arena->failed()) {
      return ResourceExhaustedError(StrCat("memory for ", arena->name(), ": ",
                                           HumanBytes(static_cast<double>(arena->failed_bytes())),
                                           " refused after ",
                                           HumanBytes(static_cast<double>(arena->reserved_bytes())),
                                           "; a smaller microbatch or recompute takes less"));
    }
  }

  context_.backend = backend;
  context_.act = run.act_dtype();
  context_.states = states_.get();
  context_.weights = weights_.get();
  context_.executed = &executed_;
  context_.dense_groups = dense_groups_.get();
  context_.plan = &plan_;
  context_.shadows = shadows_.get();
  context_.shadow_row = decoder_->shadow_row();
  context_.shadow_col = decoder_->shadow_col();
  context_.held.assign(static_cast<std::size_t>(model.layers), 0);
  carried_nonfinite_.assign(states_->sites().size(), 0);
  stats_.resize(states_->sites().size());
  reduced_counts_.assign(decoder_->step_counts().size(), 0);
  states_->ApplyPlan(options_.plan, options_.plan, true);
  states_->UploadQuantScales();
  plan_ = options_.plan;
  shadows_->SetPlan(WithValidShadows(plan_, options_.model, options_.run, options_.backend),
                    *states_);
  backend.ops->synchronize(backend.context);
  return CheckDevice();
}

absl::Status TransformerImpl::CheckDevice() {
  char message[512] = "";
  if (options_.backend.ops->poll_error(options_.backend.context, message, sizeof(message)) != 0) {
    return InternalError(StrCat("device fault: ", message));
  }
  return absl::OkStatus();
}

absl::Status TransformerImpl::CheckResults() {
  RETURN_IF_ERROR(CheckDevice());
  RETURN_IF_ERROR(Annotate(expert_parallel_->Check(), "messages between experts"));
  RETURN_IF_ERROR(Annotate(expert_data_->Check(), "reducing the experts' gradients"));
  return Annotate(world_->Check(), "reducing dense gradients");
}

absl::Status TransformerImpl::SetPlan(const PrecisionPlan& plan) {
  RETURN_IF_ERROR(CheckPlan(plan, options_.model, options_.run, options_.backend));
  states_->ApplyPlan(plan_, plan, false);
  states_->UploadQuantScales();
  options_.backend.ops->synchronize(options_.backend.context);
  weights_->Invalidate();
  plan_ = plan;
  shadows_->SetPlan(WithValidShadows(plan_, options_.model, options_.run, options_.backend),
                    *states_);
  return absl::OkStatus();
}

void TransformerImpl::StartPass() {
  const OpsRange range(options_.backend, "begin");
  microbatch_ = 0;
  tokens_counted_ = 0;
  aux_loss_ = z_loss_ = 0;
  parameters_.BeginGradients();
  dense_reduced_ = parameters_.dense_elements();
  expert_reduced_ = parameters_.expert_elements();
  states_->Reset(step_.sample_sqnr);
  if (step_.sample_sqnr) {
    shadows_->Reset();
  }
  weights_->Invalidate();
  decoder_->ResetStepCounts();
  options_.backend.ops->zero(options_.backend.context, sums_, 3 * sizeof(double));
}

absl::Status TransformerImpl::Run(const std::int32_t* tokens, const std::int32_t* targets,
                                  bool training) {
  context_.record = training;
  context_.energies = training && step_.sample_sqnr && microbatch_ == 0;
  DecoderPass pass{
      .tokens = tokens,
      .targets = targets,
      .dloss = training ? static_cast<float>(1.0 / static_cast<double>(step_.target_tokens)) : 0.0f,
      .loss_sum = sums_,
      .training = training};
  const auto begin = std::chrono::steady_clock::now();
  {
    const OpsRange range(options_.backend, training ? "forward" : "evaluate");
    RETURN_IF_ERROR(decoder_->Forward(context_, &pass));
  }
  if (!training) {
    return absl::OkStatus();
  }
  aux_loss_ += pass.aux_loss;
  z_loss_ += pass.z_loss;
  OCTAVO_CHECK_LT(microbatch_, options_.run.microbatches);
  if (options_.run.overlap && options_.run.reduce_early &&
      microbatch_ + 1 == options_.run.microbatches) {
    pass.final_from = [this](std::int32_t layer) { return ReduceFrom(layer); };
  }
  const auto middle = std::chrono::steady_clock::now();
  {
    const OpsRange range(options_.backend, "backward");
    RETURN_IF_ERROR(decoder_->Backward(context_, pass));
  }
  phase_seconds_.forward += std::chrono::duration<double>(middle - begin).count();
  phase_seconds_.backward +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - middle).count();
  ++microbatch_;
  return absl::OkStatus();
}

double TransformerImpl::ReadLoss() {
  const Backend& backend = options_.backend;
  backend.ops->order(backend.context, Lane::kCompute, Lane::kCopy);
  backend.ops->copy(backend.context, {.dst = host_sums_,
                                      .src = sums_,
                                      .bytes = 3 * sizeof(double),
                                      .kind = CopyKind::kToHost,
                                      .lane = Lane::kCopy});
  backend.ops->synchronize_lane(backend.context, Lane::kCopy);
  return host_sums_[0];
}

absl::Status TransformerImpl::ReduceFrom(std::int32_t layer) {
  const auto reduce = [layer](Exchange& group, float* gradients,
                              const std::vector<std::int64_t>& begins, std::int64_t* reduced) {
    const std::int64_t begin = layer < 0 ? 0 : begins[static_cast<std::size_t>(layer)];
    const std::int64_t count = *reduced - begin;
    *reduced = begin;
    return group.StartAllReduce(gradients + begin, count, DType::kF32, ReduceOp::kSum);
  };
  RETURN_IF_ERROR(Annotate(reduce(*world_, parameters_.dense_grad(), dense_begin_, &dense_reduced_),
                           "reducing dense gradients"));
  return Annotate(reduce(*expert_data_, parameters_.expert_grad(), expert_begin_, &expert_reduced_),
                  "reducing the experts' gradients");
}

absl::StatusOr<PassResult> TransformerImpl::FinishPass() {
  const Backend& backend = options_.backend;
  const OpsRange range(backend, "gradients");
  parameters_.FinishGradients();
  RETURN_IF_ERROR(ReduceFrom(-1));
  // Beside the last reductions; the host waits for both below.
  states_->FetchStats(step_.sample_sqnr);
  if (step_.sample_sqnr) {
    shadows_->Fetch();
  }
  world_->Join();
  expert_data_->Join();
  const auto squares = [&](const float* x, std::int64_t n, double* out) {
    backend.ops->sum_squares(backend.context,
                             {.x = x, .n = n, .out = out, .workspace = squares_workspace_});
  };
  squares(parameters_.dense_grad(), parameters_.dense_elements(), sums_ + 1);
  squares(parameters_.expert_grad(), parameters_.expert_elements(), sums_ + 2);
  PassResult result;
  result.loss_sum = ReadLoss();
  RETURN_IF_ERROR(CheckResults());
  states_->Publish(step_.sample_sqnr);
  if (step_.sample_sqnr) {
    shadows_->Publish();
  }
  reduced_counts_ = decoder_->step_counts();
  // Every layer's counts were gathered within the expert-parallel group.
  RETURN_IF_ERROR(
      Annotate(expert_data_->AllReduceHost(reduced_counts_.data(),
                                           static_cast<std::int64_t>(reduced_counts_.size()),
                                           DType::kI64, ReduceOp::kSum),
               "reducing expert counts"));

  result.tokens = tokens_counted_;
  result.aux_loss = aux_loss_;
  result.z_loss = z_loss_;
  // Replicas hold equal sums: one of them reports.
  result.grad_norm_squared = (world_->rank() == 0 ? host_sums_[1] : 0.0) +
                             (expert_data_->rank() == 0 ? host_sums_[2] : 0.0);
  result.first_nonfinite = FirstNonfinite(states_->sites(), states_->host_stats(), plan_.layers);
  stats_ = states_->host_stats();
  for (std::size_t i = 0; i < stats_.size(); ++i) {
    stats_[i].nonfinite += carried_nonfinite_[i];
  }
  if (options_.run.strict_precision && executed_.mismatches() > 0) {
    for (const ExecutedEntry& entry : executed_.entries()) {
      if (entry.mismatch()) {
        return FailedPreconditionError(
            StrCat("strict precision: layer ", entry.site.layer, ", ", Name(entry.site.op),
                   " was planned as ", DebugString(entry.planned), " and ran as ",
                   DebugString(entry.executed), " (", entry.reason, ")"));
      }
    }
  }
  return result;
}

void TransformerImpl::CarryNonfinite() {
  const std::vector<StatSlot>& failed = states_->host_stats();
  for (std::size_t i = 0; i < failed.size(); ++i) {
    carried_nonfinite_[i] += failed[i].nonfinite;
  }
}

absl::Status TransformerImpl::EndStep(bool applied) {
  const Backend& backend = options_.backend;
  const ModelConfig& model = options_.model;
  const OpsRange range(backend, "windows");
  std::fill(context_.held.begin(), context_.held.end(), 0);
  weights_->Invalidate();
  if (!applied) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(PushAmax(*states_, plan_, *world_, *expert_data_, options_.run.stale_after));
  states_->UploadQuantScales();
  for (std::int32_t l = 0; l < model.layers; ++l) {
    if (decoder_->is_moe(l) && decoder_->bias(l) != nullptr) {
      std::int64_t* host = host_counts_ + static_cast<std::int64_t>(l) * model.experts;
      std::copy_n(reduced_counts_.begin() + static_cast<std::int64_t>(l) * model.experts,
                  model.experts, host);
      backend.ops->copy(backend.context, {.dst = device_counts_,
                                          .src = host,
                                          .bytes = model.experts * 8,
                                          .kind = CopyKind::kToDevice});
      backend.ops->router_bias_update(backend.context, {.counts = device_counts_,
                                                        .experts = model.experts,
                                                        .rate = model.router.bias_update_rate,
                                                        .bias = decoder_->bias(l)});
    }
  }
  return absl::OkStatus();
}

absl::Status TransformerImpl::Evaluate(const std::int32_t* tokens, const std::int32_t* targets,
                                       double* loss_sum) {
  options_.backend.ops->zero(options_.backend.context, sums_, 3 * sizeof(double));
  RETURN_IF_ERROR(Run(tokens, targets, false));
  *loss_sum += ReadLoss();
  return CheckResults();
}

std::vector<ExpertLoad> TransformerImpl::Load() const {
  std::vector<ExpertLoad> loads;
  const std::int32_t experts = options_.model.experts;
  for (std::int32_t l = 0; l < options_.model.layers; ++l) {
    if (!decoder_->is_moe(l)) {
      continue;
    }
    const auto begin = reduced_counts_.begin() + static_cast<std::int64_t>(l) * experts;
    ExpertLoad load{.layer = l};
    double sum = 0, squares = 0;
    for (auto count = begin; count != begin + experts; ++count) {
      const double c = static_cast<double>(*count);
      sum += c;
      squares += c * c;
    }
    load.max = static_cast<double>(*std::max_element(begin, begin + experts));
    load.min = static_cast<double>(*std::min_element(begin, begin + experts));
    load.mean = sum / experts;
    const double variance = std::max(squares / experts - load.mean * load.mean, 0.0);
    load.cv = load.mean > 0 ? std::sqrt(variance) / load.mean : 0;
    loads.push_back(load);
  }
  return loads;
}

}  // namespace octavo
