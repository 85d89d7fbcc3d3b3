// Every kind of wrong job file with the whole text of its message.
#include <gtest/gtest.h>

#include "proto/convert/error_detail.h"
#include "proto/spec/job_spec.h"
#include "tests/unit/proto/spec/spec_text.h"

namespace octavo {
namespace {

struct BadSpec {
  const char* name;
  const char* from;  // kGoodSpec with `from` replaced by `to`, and before that other_from
  const char* to;
  const char* other_from;
  const char* other_to;
  const char* text;
};

void PrintTo(const BadSpec& bad, std::ostream* out) { *out << bad.name; }

// clang-format off: one message a line, as the user reads it.
const BadSpec kBadSpecs[] =
    {
        {"UnknownKeyAtTheTop", "device: cpu", "devise: cpu", "", "",
         R"(job.yaml:2:1: devise: found an unknown key; valid: name, owner, priority, labels, device, model, parallel, train, data, checkpoint, precision, restart, telemetry; did you mean "device"?)"},
        {"UnknownKeyInside", "  heads: 4\n", "  head: 4\n", "", "",
         R"(job.yaml:7:3: model.head: found an unknown key; valid: family, layers, hidden, heads, kv_heads, head_dim, qk_norm, vocab_size, rope_theta, norm_eps, tied_embeddings, init_std, moe, dense_layers, dense_hidden, attention_precision, lora; did you mean "heads"?)"},
        {"DuplicateKey", "  layers: 6\n", "  layers: 6\n  layers: 8\n", "", "",
         R"(job.yaml:6:3: duplicate key "layers"; it stands first at 5:3, and each key may stand once)"},
        {"WrongTypeInteger", "steps: 100", "steps: many", "", "",
         R"(job.yaml:18:10: train.steps: found "many"; valid: an integer, at least 1)"},
        {"FloatForInteger", "steps: 100", "steps: 1e2", "", "",
         R"(job.yaml:18:10: train.steps: found 1e2; valid: an integer, at least 1)"},
        {"QuotedNumber", "steps: 100", "steps: \"100\"", "", "",
         R"(job.yaml:18:10: train.steps: found "100"; valid: an integer, at least 1; did you mean 100 without quotes?)"},
        {"ListForMap", "parallel:\n  ranks: 2\n  expert_parallel: 2\n", "parallel: [2, 2]\n", "",
         "",
         R"(job.yaml:14:11: parallel: found a list; valid: a map with the keys ranks, expert_parallel, tensor_parallel, pipeline_parallel, context_parallel, recv_capacity)"},
        {"YesForTrue", "kv_heads: 2\n", "kv_heads: 2\n  tied_embeddings: yes\n", "", "",
         R"(job.yaml:9:20: model.tied_embeddings: found "yes"; valid: true or false; did you mean true?)"},
        {"OutOfRange", "layers: 6", "layers: 0", "", "",
         R"(job.yaml:5:11: model.layers: found 0; valid: an integer, 1 to 1024)"},
        {"AboveTheMaximum", "layers: 6", "layers: 4000", "", "",
         R"(job.yaml:5:11: model.layers: found 4000; valid: an integer, 1 to 1024)"},
        {"NotOneOf", "family: mixtral", "family: mixtrl", "", "",
         R"(job.yaml:4:11: model.family: found "mixtrl"; valid: mixtral, qwen3_moe; did you mean "mixtral"?)"},
        {"NotOneOfRecipe", "recipe: fp8_flow", "recipe: fp8_flw", "", "",
         R"(job.yaml:29:11: precision.recipe: found "fp8_flw"; valid: fp32, bf16, fp8_delayed, fp8_current, fp8_blockwise, fp8_flow, mxfp8, auto; did you mean "fp8_flow"?)"},
        {"Nvfp4", "recipe: fp8_flow", "recipe: nvfp4", "", "",
         R"(job.yaml:29:11: precision.recipe: found "nvfp4"; NVFP4 is not supported; valid: fp32, bf16, fp8_delayed, fp8_current, fp8_blockwise, fp8_flow, mxfp8, auto)"},
        {"TensorParallelRefused", "ranks: 2\n", "ranks: 2\n  tensor_parallel: 2\n", "", "",
         R"(job.yaml:16:3: parallel.tensor_parallel: found 2; tensor parallelism is not supported; use expert_parallel and data parallelism)"},
        {"PipelineParallelRefused", "ranks: 2\n", "ranks: 2\n  pipeline_parallel: 4\n", "", "",
         R"(job.yaml:16:3: parallel.pipeline_parallel: found 4; pipeline parallelism is not supported; use expert_parallel and data parallelism)"},
        {"ContextParallelRefused", "ranks: 2\n", "ranks: 2\n  context_parallel: 2\n", "", "",
         R"(job.yaml:16:3: parallel.context_parallel: found 2; context parallelism is not supported; shorten sequence_length or use recompute)"},
        {"Fp8AttentionRefused", "kv_heads: 2\n", "kv_heads: 2\n  attention_precision: fp8\n", "",
         "",
         R"(job.yaml:9:3: model.attention_precision: found "fp8"; FP8 attention is not supported; attention scores run in bf16 or better)"},
        {"LoraRefused", "kv_heads: 2\n", "kv_heads: 2\n  lora: {rank: 8}\n", "", "",
         R"(job.yaml:9:3: model.lora: found a map; LoRA is not supported; Octavo trains full weights)"},
        {"Nvfp4KeyRefused", "recipe: fp8_flow", "recipe: fp8_flow\n  nvfp4: true", "", "",
         R"(job.yaml:30:3: precision.nvfp4: found "true"; NVFP4 is not supported; use an fp8 recipe)"},
        {"MissingRequiredText", "  family: mixtral\n", "", "", "",
         R"(job.yaml:3:1: model.family: missing; it is required (model family); valid: mixtral, qwen3_moe)"},
        {"MissingRequiredNumber", "  layers: 6\n", "", "", "",
         R"(job.yaml:3:1: model.layers: missing; it is required (decoder layers); valid: an integer, 1 to 1024)"},
        {"MissingRequiredMap", "data:\n  path: /data/text\n", "", "", "",
         R"(job.yaml:1:1: data: missing; it is required (datasets); valid: a map with the keys path, validation_path, validation_fraction, documents)"},
        {"BadName", "name: demo", "name: Demo_1", "", "",
         R"(job.yaml:1:7: name: found "Demo_1"; valid: 1 to 63 lower-case letters, digits and '-', not beginning or ending in '-')"},
        {"EmptyName", "name: demo", "name: \"\"", "", "",
         R"(job.yaml:1:7: name: found ""; it is required; valid: text that is not empty)"},
        {"RelativePath", "path: /data/text", "path: data/text", "", "",
         R"(job.yaml:25:9: data.path: found "data/text"; valid: an absolute path, the same on every worker (a worker does not run in your folder))"},
        {"SamePathTwice", "path: /ckpt/demo", "path: /data/text", "", "",
         R"(job.yaml:27:9: checkpoint.path: found "/data/text"; is the dataset's path too; valid: a folder of its own)"},
        {"StartStateOfNothing", "path: /ckpt/demo", "path: /ckpt/demo\n  start_state: all", "", "",
         R"(job.yaml:28:16: checkpoint.start_state: found "all"; has no meaning without checkpoint.start_from; valid: name one, or leave it out)"},
        {"ExpertParallelAgainstRanks", "expert_parallel: 2", "expert_parallel: 3", "", "",
         R"(job.yaml:16:20: parallel.expert_parallel: found 3; does not divide parallel.ranks (2); valid: 1, 2)"},
        {"ExpertParallelAgainstExperts", "num_experts: 8", "num_experts: 7", "", "",
         R"(job.yaml:16:20: parallel.expert_parallel: found 2; does not divide model.moe.num_experts (7); valid: 1)"},
        {"TopKAboveExperts", "experts_per_token: 2", "experts_per_token: 9", "", "",
         R"(job.yaml:12:24: model.moe.experts_per_token: found 9; valid: 1 to num_experts (8))"},
        {"KvHeads", "kv_heads: 2", "kv_heads: 3", "", "",
         R"(job.yaml:8:13: model.kv_heads: found 3; does not divide model.heads (4); valid: 1, 2, 4)"},
        {"HeadsAgainstHidden", "heads: 4\n  kv_heads: 2", "heads: 6", "", "",
         R"(job.yaml:7:10: model.heads: found 6; does not divide model.hidden (128), so there is no default for model.head_dim; set it, or choose one of 1, 2, 4, 8, 16, 32, 64, 128)"},
        {"OddHeadDim", "kv_heads: 2", "kv_heads: 2\n  head_dim: 33", "", "",
         R"(job.yaml:9:13: model.head_dim: found 33; rotary embedding turns pairs; valid: an even number, e.g. 34)"},
        {"GroupsDivideExperts", "expert_hidden: 256",
         "expert_hidden: 256\n    router: {n_group: 3}", "", "",
         R"(job.yaml:14:23: model.moe.router.n_group: found 3; does not divide model.moe.num_experts (8); valid: 1, 2, 4, 8)"},
        {"TopkGroupAboveGroups", "expert_hidden: 256",
         "expert_hidden: 256\n    router: {n_group: 4, topk_group: 5}", "", "",
         R"(job.yaml:14:38: model.moe.router.topk_group: found 5; valid: 1 to n_group (4))"},
        {"TooFewExpertsInGroups", "experts_per_token: 2\n",
         "experts_per_token: 4\n    router: {n_group: 4, topk_group: 1}\n", "", "",
         R"(job.yaml:13:38: model.moe.router.topk_group: found 1; gives 2 experts to choose from (2 a group), fewer than experts_per_token (4); valid: 2 to 4)"},
        {"GlobalBatch", "global_batch: 8", "global_batch: 7", "", "",
         R"(job.yaml:20:17: train.global_batch: found 7; is not a multiple of ranks (2); next valid: 6 or 8)"},
        {"GlobalBatchWithMicrobatch", "global_batch: 8", "global_batch: 8\n  microbatch: 3", "", "",
         R"(job.yaml:20:17: train.global_batch: found 8; is not a multiple of ranks · microbatch (2 · 3 = 6); next valid: 6 or 12)"},
        {"DenseLayerOutside", "kv_heads: 2",
         "kv_heads: 2\n  dense_hidden: 256\n  dense_layers: [0, 6]", "", "",
         R"(job.yaml:10:21: model.dense_layers[1]: found 6; valid: 0 to 5 (model.layers is 6))"},
        {"DenseLayerTwice", "kv_heads: 2",
         "kv_heads: 2\n  dense_hidden: 256\n  dense_layers: [1, 1]", "", "",
         R"(job.yaml:10:21: model.dense_layers[1]: found 1; the layer stands twice; valid: each once)"},
        {"DenseHiddenMissing", "kv_heads: 2", "kv_heads: 2\n  dense_layers: [0]", "", "",
         R"(job.yaml:3:1: model.dense_hidden: missing; model.dense_layers needs it)"},
        {"DenseHiddenAlone", "kv_heads: 2", "kv_heads: 2\n  dense_hidden: 256", "", "",
         R"(job.yaml:9:17: model.dense_hidden: found 256; has no meaning without dense layers; valid: leave it out, or set model.dense_layers)"},
        {"DimensionForBlockwise", "expert_hidden: 256", "expert_hidden: 200", "", "",
         R"(job.yaml:13:20: model.moe.expert_hidden: found 200; recipe fp8_flow (layer 1 fc1) needs a multiple of 128; next valid: 128 or 256)"},
        {"ProjectionDimension", "kv_heads: 2", "kv_heads: 2\n  head_dim: 34", "", "",
         R"(job.yaml:9:13: model.head_dim: found 34; (heads + 2 · kv_heads) · head_dim is 272; recipe fp8_flow (layer 1 attn_qkv) needs a multiple of 128; next valid: 256 or 384)"
         "\n"
         R"(job.yaml:9:13: model.head_dim: found 34; heads · head_dim is 136; recipe fp8_flow (layer 1 attn_out) needs a multiple of 128; next valid: 128 or 256)"},
        {"ProtectCoversAll", "recipe: fp8_flow", "recipe: fp8_flow\n  protect: 3", "", "",
         R"(job.yaml:30:12: precision.protect: found 3; keeps all 6 layers in bf16 (the first and the last 3), so recipe fp8_flow would never run; valid: 0 to 2)"},
        {"Mxfp8NeedsEmulation", "recipe: fp8_flow",
         "recipe: mxfp8", "", "", R"(job.yaml:29:11: precision.recipe: found "mxfp8"; recipe mxfp8 has tensor cores from SM 100 on; this device (CPU) would emulate it: set allow_emulation: true to accept that)"},
        {"Fp32OnCuda", "device: cpu", "device: cuda", "recipe: fp8_flow", "recipe: fp32",
         R"(job.yaml:29:11: precision.recipe: found "fp32"; recipe fp32 is an oracle for the CPU backend; a GPU runs bf16 or FP8)"},
        {"OverrideRecipe", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides:\n    - {layers: 1, recipe: bf16}\n    - {layers: 2, "
         "recipe: bf16}\n    - layers: 3\n      recipe: {kind: fp8_blok}",
         "", "",
         R"(job.yaml:34:22: precision.overrides[2].recipe.kind: found "fp8_blok"; valid: fp32, bf16, fp8_delayed, fp8_current, fp8_blockwise, fp8_flow, mxfp8; did you mean "fp8_blockwise"?)"},
        {"OverrideLayers", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides: [{layers: 4-9, recipe: bf16}]", "", "",
         R"(job.yaml:30:24: precision.overrides[0].layers: found "4-9"; valid: one layer or a range within 0-5, e.g. 3 or 2-5)"},
        {"OverrideLayersBackwards", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides: [{layers: 4-2, recipe: bf16}]", "", "",
         R"(job.yaml:30:24: precision.overrides[0].layers: found "4-2"; the range ends before it begins; valid: one layer or a range within 0-5, e.g. 3 or 2-5)"},
        {"OverrideOp", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides: [{layers: 2, ops: [fc3], recipe: bf16}]", "", "",
         R"(job.yaml:30:33: precision.overrides[0].ops[0]: found "fc3"; valid: attn_qkv, attn_out, mlp_fc1, mlp_fc2, fc1, fc2, dispatch; did you mean "fc1"?)"},
        {"DispatchPerTensor", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides: [{layers: 2, ops: [dispatch], recipe: fp8_current}]", "",
         "",
         R"(job.yaml:30:52: precision.overrides[0].recipe: recipe fp8_current cannot carry the dispatch payload (one scale per tensor does not travel); valid for dispatch: bf16, fp32, fp8_blockwise, fp8_flow, mxfp8)"},
        {"Fp32Mixed", "recipe: fp8_flow",
         "recipe: fp8_flow\n  overrides: [{layers: 2, recipe: fp32}]", "", "",
         R"(job.yaml:30:35: precision.overrides[0].recipe: found "fp32"; fp32 is for whole jobs (the residual stream is FP32 too) and does not mix; valid: precision.recipe: fp32 without other recipes, or bf16 here)"},
        {"HistoryTooLong", "recipe: fp8_flow",
         "recipe: fp8_delayed\n  parameters: {history_len: 5000}", "", "",
         R"(job.yaml:30:29: precision.parameters.history_len: found 5000; valid: an integer, 1 to 4096)"},
        {"ParameterWithoutMeaning", "recipe: fp8_flow",
         "recipe: fp8_flow\n  parameters: {history_len: 64}", "", "",
         R"(job.yaml:30:29: precision.parameters.history_len: has no meaning for recipe fp8_flow; valid: leave it out, or recipe fp8_delayed (fp8_flow takes accumulate, min_dequant_scale, wgrad))"},
        {"HybridFlow", "recipe: fp8_flow", "recipe: fp8_flow\n  parameters: {format: hybrid}", "",
         "",
         R"(job.yaml:30:3: precision.parameters: recipe fp8_flow uses E4M3 for gradients too; format: hybrid is valid for fp8_delayed, fp8_current, fp8_blockwise)"},
        {"CandidatesWithoutAuto", "recipe: fp8_flow", "recipe: fp8_flow\n  candidates: [bf16]", "",
         "",
         R"(job.yaml:30:3: precision.candidates: has no meaning with recipe: fp8_flow; valid: leave it out, or recipe: auto)"},
        {"LadderEnd", "recipe: fp8_flow",
         "recipe: fp8_flow\n  policy: {ladder: [fp8_flow, fp8_blockwise]}", "", "",
         R"(job.yaml:30:12: precision.policy.ladder: found "fp8_blockwise" as the last rung; valid: bf16 as the last rung (what never overflows))"},
        {"WarmupTooLong", "warmup_steps: 10", "warmup_steps: 100", "", "",
         R"(job.yaml:23:19: train.schedule.warmup_steps: found 100; valid: below train.steps (100))"},
        {"MinLrAboveLr", "lr: 1e-3", "lr: 1e-3\n    min_lr: 1e-2", "", "",
         R"(job.yaml:23:13: train.schedule.min_lr: found 0.01; is above the peak lr (0.001); valid: 0 to 0.001)"},
        {"NegativeLrAlone", "lr: 1e-3", "lr: -1", "", "",
         R"(job.yaml:22:9: train.schedule.lr: found -1; valid: a number, 0 to 100)"},
        {"DecayWithCosine", "lr: 1e-3", "lr: 1e-3\n    decay_steps: 5", "", "",
         R"(job.yaml:23:18: train.schedule.decay_steps: found 5; has no meaning for schedule cosine; valid: leave it out, or kind: wsd)"},
        {"NotANumber", "lr: 1e-3", "lr: .nan", "", "",
         R"(job.yaml:22:9: train.schedule.lr: found ".nan"; valid: a number, 0 to 100)"},
        {"RecomputeLayersAlone", "steps: 100", "steps: 100\n  recompute_layers: [1]", "", "",
         R"(job.yaml:19:3: train.recompute_layers: has no meaning with recompute: none; valid: leave it out, or recompute: full)"},
        {"NoValidationData", "path: /data/text", "path: /data/text\n  validation_fraction: 0",
         "  schedule:", "  validation: {interval_steps: 10}\n  schedule:",
         R"(job.yaml:27:24: data.validation_fraction: found 0; leaves no data for train.validation; valid: above 0, or set validation_path, or interval_steps: 0)"},
        {"LabelKey", "device: cpu", "labels: {\"a b\": c}", "", "",
         R"(job.yaml:2:17: labels.a b: found "a b"; valid as a key: 1 to 63 letters, digits and . _ / -)"},
        {"BrokenYaml", "device: cpu", "device: [cpu", "", "",
         R"(job.yaml:3:6: not valid YAML: end of sequence flow not found)"},
        {"TwoDocuments", "device: cpu", "device: cpu\n---\nname: b", "", "",
         R"(job.yaml:3:1: a second YAML document begins here; valid is one document in a file)"},
};
// clang-format on

class BadSpecTest : public testing::TestWithParam<BadSpec> {};

TEST_P(BadSpecTest, GivesThisText) {
  const BadSpec& bad = GetParam();
  std::string yaml = Edited(bad.other_from, bad.other_to);
  const std::size_t at = yaml.find(bad.from);
  ASSERT_NE(at, std::string::npos);
  yaml.replace(at, std::string(bad.from).size(), bad.to);
  const ParsedJobSpec parsed = ParseJobSpec(yaml, "job.yaml");
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.Text(), std::string(bad.text) + "\n") << yaml;
  // The same on the wire: the detail carries every violation with its place.
  const auto detail = GetErrorDetail(parsed.status());
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->reason(), "SPEC_INVALID");
  EXPECT_EQ(static_cast<std::size_t>(detail->violations_size()), parsed.violations.size());
  for (const v1::FieldViolation& violation : detail->violations()) {
    EXPECT_GT(violation.line(), 0);
    EXPECT_GT(violation.column(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, BadSpecTest, testing::ValuesIn(kBadSpecs),
                         [](const testing::TestParamInfo<BadSpec>& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace octavo
