#include "worker/rank/assignment.h"

#include <gtest/gtest.h>

#include "base/status.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

constexpr char kYaml[] = R"(
name: demo
model:
  family: qwen3_moe
  layers: 4
  hidden: 256
  heads: 8
  kv_heads: 2
  vocab_size: 256
  dense_layers: [0]
  dense_hidden: 512
  moe:
    num_experts: 8
    experts_per_token: 2
    expert_hidden: 128
    router: {score: sigmoid, aux_loss: sequence, aux_loss_coefficient: 0.02}
parallel: {ranks: 2, expert_parallel: 2}
train:
  steps: 100
  sequence_length: 64
  global_batch: 16
  microbatch: 2
  seed: 9
  recompute: full
  recompute_layers: [1, 3]
  optimizer: {moments: bf16, clip: 0.5}
  schedule: {kind: wsd, lr: 0.002, min_lr: 0.0001, warmup_steps: 10, decay_steps: 20}
  validation: {interval_steps: 50, batches: 3}
data: {path: /data/text.octd}
checkpoint: {path: /ckpt, interval_steps: 25, keep: 3}
precision: {recipe: fp8_flow, policy: {stale_after: 77}}
)";

TEST(AssignmentTest, EveryFieldOfTheSpecArrives) {
  const ParsedJobSpec parsed = ParseJobSpec(kYaml, "demo.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  internal::v1::RankAssignment assignment;
  *assignment.mutable_spec() = parsed.spec;
  assignment.set_job_uid("1234");
  assignment.set_job_name("jobs/demo");
  assignment.set_attempt(3);
  assignment.set_rank(1);
  assignment.set_world_size(2);
  const auto config = ConfigFromAssignment(assignment);
  ASSERT_TRUE(config.ok()) << ToString(config.status());
  EXPECT_EQ(config->model.family, ModelFamily::kQwen3Moe);
  EXPECT_TRUE(config->model.qk_norm);  // default of the family
  EXPECT_EQ(config->model.head_dim, 32);
  EXPECT_EQ(config->model.dense_layers, (std::vector<std::int32_t>{0}));
  EXPECT_EQ(config->model.router.score, RouterScore::kSigmoid);
  EXPECT_EQ(config->model.router.aux_scope, AuxLossScope::kSequence);
  EXPECT_FLOAT_EQ(config->model.router.aux_coefficient, 0.02f);
  EXPECT_TRUE(config->model.router.normalize_topk);
  EXPECT_EQ(config->run.microbatches, 4);
  EXPECT_EQ(config->run.microbatch_sequences, 2);
  EXPECT_EQ(config->global_batch(), 16);
  EXPECT_EQ(config->run.rank, 1);
  EXPECT_EQ(config->run.recompute, (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(config->optimizer.moment_dtype, DType::kBF16);
  EXPECT_EQ(config->clip, 0.5);
  EXPECT_EQ(config->schedule.decay, LrDecay::kWsd);
  EXPECT_EQ(config->schedule.decay_steps, 20);
  EXPECT_EQ(config->schedule.total_steps, 100);
  EXPECT_EQ(config->validation_interval, 50);
  EXPECT_EQ(config->validation_batches, 3);
  EXPECT_EQ(config->checkpoint.root, "/ckpt/demo-1234");
  EXPECT_EQ(config->checkpoint.keep, 3);
  EXPECT_EQ(config->max_skips_in_a_row, 3);
  EXPECT_EQ(config->run.stale_after, 77);
  EXPECT_TRUE(config->checkpoint_before_switch);
  EXPECT_EQ(config->attempt, 3);
}

TEST(AssignmentTest, AnAssignmentThatDoesNotFitItsSpecIsRefused) {
  const ParsedJobSpec parsed = ParseJobSpec(kYaml, "demo.yaml");
  internal::v1::RankAssignment assignment;
  *assignment.mutable_spec() = parsed.spec;
  assignment.set_world_size(4);
  EXPECT_EQ(ConfigFromAssignment(assignment).status().code(), absl::StatusCode::kInvalidArgument);
  assignment.set_world_size(2);
  assignment.set_rank(2);
  EXPECT_FALSE(ConfigFromAssignment(assignment).ok());
  assignment.set_rank(0);
  assignment.mutable_spec()->mutable_train()->set_global_batch(15);
  EXPECT_FALSE(ConfigFromAssignment(assignment).ok());
}

TEST(AssignmentTest, CheckpointFoldersOfTwoJobsNeverMeet) {
  EXPECT_EQ(CheckpointRoot("/c", "jobs/a", "u/../1"), "/c/a-u____1");
  EXPECT_NE(CheckpointRoot("/c", "jobs/a", "1"), CheckpointRoot("/c", "jobs/a", "2"));
}

}  // namespace
}  // namespace octavo
