#include "worker/rank/assignment.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

RouterOptions RouterFromSpec(const v1::RouterSpec& spec) {
  RouterOptions r;
  r.score = spec.score() == "sigmoid"        ? RouterScore::kSigmoid
            : spec.score() == "topk_softmax" ? RouterScore::kTopKSoftmax
                                             : RouterScore::kSoftmax;
  r.normalize_topk = spec.normalize_topk();
  r.routed_scaling_factor = spec.routed_scaling_factor();
  r.n_group = spec.n_group();
  r.topk_group = spec.topk_group();
  r.aux_scope = spec.aux_loss() == "sequence" ? AuxLossScope::kSequence
                : spec.aux_loss() == "global" ? AuxLossScope::kGlobal
                : spec.aux_loss() == "none"   ? AuxLossScope::kNone
                                              : AuxLossScope::kMicrobatch;
  r.aux_coefficient = r.aux_scope == AuxLossScope::kNone ? 0.0f : spec.aux_loss_coefficient();
  r.bias_update_rate = spec.bias_update_rate();
  r.z_coefficient = spec.z_loss_coefficient();
  return r;
}

ModelConfig ModelFromSpec(const v1::ModelSpec& spec) {
  ModelConfig m;
  m.family = spec.family() == "qwen3_moe" ? ModelFamily::kQwen3Moe : ModelFamily::kMixtral;
  m.layers = spec.layers();
  m.hidden = spec.hidden();
  m.heads = spec.heads();
  m.kv_heads = spec.kv_heads();
  m.head_dim = spec.head_dim();
  m.qk_norm = spec.qk_norm();
  m.vocab = spec.vocab_size();
  m.rope_theta = spec.rope_theta();
  m.norm_eps = spec.norm_eps();
  m.tied_embeddings = spec.tied_embeddings();
  m.init_std = spec.init_std();
  m.experts = spec.moe().num_experts();
  m.experts_per_token = spec.moe().experts_per_token();
  m.expert_hidden = spec.moe().expert_hidden();
  m.shared_experts = spec.moe().shared_experts();
  m.shared_expert_hidden = spec.moe().shared_expert_hidden();
  m.dense_layers.assign(spec.dense_layers().begin(), spec.dense_layers().end());
  m.dense_hidden = spec.dense_hidden();
  m.router = RouterFromSpec(spec.moe().router());
  return m;
}

std::vector<bool> RecomputeFromSpec(const v1::TrainSpec& spec, std::int32_t layers) {
  std::vector<bool> recompute(static_cast<std::size_t>(layers),
                              spec.recompute() == "full" && spec.recompute_layers().empty());
  if (spec.recompute() == "full") {
    for (const std::int32_t layer : spec.recompute_layers()) {
      recompute[static_cast<std::size_t>(layer)] = true;
    }
  }
  return recompute;
}

LrSchedule ScheduleFromSpec(const v1::ScheduleSpec& spec, std::int64_t steps) {
  return {.decay = spec.kind() == "wsd"        ? LrDecay::kWsd
                   : spec.kind() == "constant" ? LrDecay::kConstant
                                               : LrDecay::kCosine,
          .peak = spec.lr(),
          .final = spec.min_lr(),
          .warmup_steps = spec.warmup_steps(),
          .total_steps = steps,
          .decay_steps = spec.decay_steps()};
}

}  // namespace

absl::StatusOr<TrainingConfig> ConfigFromSpec(const v1::JobSpec& spec) {
  RETURN_IF_ERROR(
      Annotate(ToStatus(ValidateJobSpec(spec), "assignment"), "checking the job's spec"));
  TrainingConfig c;
  c.job_name = spec.name();
  c.model = ModelFromSpec(spec.model());
  const v1::TrainSpec& train = spec.train();
  const std::int32_t ranks = spec.parallel().ranks();
  const std::int32_t pass = ranks * train.microbatch();
  if (pass <= 0 || train.global_batch() % pass != 0) {
    return InvalidArgumentError(StrCat("train.global_batch ", train.global_batch(),
                                       " is not a multiple of ranks · microbatch = ", pass));
  }
  c.run = {.sequence_length = train.sequence_length(),
           .microbatch_sequences = train.microbatch(),
           .microbatches = train.global_batch() / pass,
           .world_size = ranks,
           .rank = 0,
           .expert_parallel = spec.parallel().expert_parallel(),
           .fp32 = spec.precision().recipe() == "fp32",
           .recompute = RecomputeFromSpec(train, spec.model().layers()),
           .recv_capacity = spec.parallel().recv_capacity(),
           .seed = train.seed(),
           .allow_emulation = spec.precision().allow_emulation(),
           .strict_precision = spec.precision().strict(),
           .stale_after = static_cast<std::int32_t>(
               std::clamp<std::int64_t>(spec.precision().policy().stale_after(), 1, INT32_MAX))};
  const v1::OptimizerSpec& optimizer = train.optimizer();
  c.optimizer = {.beta1 = optimizer.beta1(),
                 .beta2 = optimizer.beta2(),
                 .eps = optimizer.eps(),
                 .weight_decay = optimizer.weight_decay(),
                 .moment_dtype = optimizer.moments() == "bf16" ? DType::kBF16 : DType::kF32};
  c.clip = optimizer.clip();
  c.steps = train.steps();
  c.schedule = ScheduleFromSpec(train.schedule(), train.steps());
  c.data = {.path = spec.data().path(),
            .validation_path = spec.data().validation_path(),
            .validation_fraction = spec.data().validation_fraction(),
            .documents = spec.data().documents() == "masked"     ? DocumentMode::kMasked
                         : spec.data().documents() == "separate" ? DocumentMode::kSeparate
                                                                 : DocumentMode::kPacked};
  c.checkpoint = {.root = spec.checkpoint().path(),
                  .interval_steps = spec.checkpoint().interval_steps(),
                  .keep = spec.checkpoint().keep(),
                  .start_from = spec.checkpoint().start_from(),
                  .start_all = spec.checkpoint().start_state() == "all"};
  c.validation_interval = train.validation().interval_steps();
  c.validation_batches = train.validation().batches();
  c.telemetry_interval = spec.telemetry().interval_steps();
  c.sqnr_interval = spec.telemetry().sqnr_interval();
  c.max_skips_in_a_row = spec.precision().policy().max_skips_in_a_row();
  c.checkpoint_before_switch = !spec.precision().policy().has_checkpoint_before_switch() ||
                               spec.precision().policy().checkpoint_before_switch();
  c.gang_timeout_seconds = spec.restart().gang_timeout_seconds();
  c.collective_timeout_seconds = spec.restart().collective_timeout_seconds();
  return c;
}

std::string CheckpointRoot(const std::string& path, const std::string& job_name,
                           const std::string& job_uid) {
  std::string folder = StrCat(BaseName(job_name), "-", job_uid);
  std::replace_if(
      folder.begin(), folder.end(),
      [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  return JoinPath(path, folder);
}

absl::StatusOr<TrainingConfig> ConfigFromAssignment(
    const internal::v1::RankAssignment& assignment) {
  ASSIGN_OR_RETURN(TrainingConfig c, ConfigFromSpec(assignment.spec()));
  if (assignment.world_size() != c.run.world_size || assignment.rank() < 0 ||
      assignment.rank() >= assignment.world_size()) {
    return InvalidArgumentError(StrCat("the assignment is rank ", assignment.rank(), " of ",
                                       assignment.world_size(), ", the spec says parallel.ranks ",
                                       c.run.world_size));
  }
  c.job_uid = assignment.job_uid();
  c.job_name = assignment.job_name();
  c.attempt = assignment.attempt();
  c.run.rank = assignment.rank();
  c.checkpoint.known_step = assignment.newest_checkpoint_step();
  c.checkpoint.known_path = assignment.newest_checkpoint_path();
  c.checkpoint.root =
      CheckpointRoot(c.checkpoint.root, assignment.job_name(), assignment.job_uid());
  return c;
}

}  // namespace octavo
