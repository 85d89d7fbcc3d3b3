#include "proto/spec/job_spec.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <random>

#include "base/str.h"
#include "proto/convert/error_detail.h"
#include "proto/limits.h"
#include "tests/unit/proto/spec/spec_text.h"

namespace octavo {
namespace {

using testing::HasSubstr;

v1::JobSpec Good() {
  ParsedJobSpec parsed = ParseJobSpec(kGoodSpec, "job.yaml");
  EXPECT_TRUE(parsed.ok()) << parsed.Text();
  return parsed.spec;
}

TEST(JobSpecTest, FillsDefaultsThatDependOnOtherFields) {
  const v1::JobSpec spec = Good();
  EXPECT_EQ(spec.model().head_dim(), 32);
  EXPECT_FALSE(spec.model().qk_norm());
  EXPECT_EQ(spec.train().microbatch(), 4);
  EXPECT_EQ(spec.train().optimizer().beta2(), 0.95f);
  EXPECT_TRUE(spec.model().moe().router().normalize_topk());
  EXPECT_TRUE(spec.precision().policy().enabled());
  EXPECT_EQ(StrJoin(spec.precision().policy().ladder(), ","), "fp8_flow,bf16");
  EXPECT_EQ(spec.restart().max(), 5);
  EXPECT_EQ(spec.checkpoint().interval_steps(), 500);
  const ParsedJobSpec qwen = ParseJobSpec(Edited("mixtral", "qwen3_moe"), "q.yaml");
  EXPECT_TRUE(qwen.spec.model().qk_norm());
}

TEST(JobSpecTest, AnExplicitZeroIsNotReplacedByTheDefault) {
  const ParsedJobSpec parsed =
      ParseJobSpec(Edited("path: /ckpt/demo", "path: /ckpt/demo\n  interval_steps: 0"), "j.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  EXPECT_EQ(parsed.spec.checkpoint().interval_steps(), 0);
  const ParsedJobSpec no_decay = ParseJobSpec(
      Edited("steps: 100", "steps: 100\n  optimizer: {weight_decay: 0, clip: 0}"), "j.yaml");
  ASSERT_TRUE(no_decay.ok()) << no_decay.Text();
  EXPECT_EQ(no_decay.spec.train().optimizer().weight_decay(), 0.0f);
}

TEST(JobSpecTest, ASmallLearningRateLowersTheDefaultOfMinLr) {
  const ParsedJobSpec parsed = ParseJobSpec(Edited("lr: 1e-3", "lr: 1e-5"), "j.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  EXPECT_FLOAT_EQ(parsed.spec.train().schedule().min_lr(), 1e-6f);
}

TEST(JobSpecTest, ApplyDefaultsGivesWhatTheParserGives) {
  v1::JobSpec built;
  built.set_name("demo");
  v1::ModelSpec* model = built.mutable_model();
  model->set_family("mixtral");
  model->set_layers(6);
  model->set_hidden(128);
  model->set_heads(4);
  model->set_kv_heads(2);
  model->set_vocab_size(256);
  model->mutable_moe()->set_num_experts(8);
  model->mutable_moe()->set_experts_per_token(2);
  model->mutable_moe()->set_expert_hidden(256);
  built.mutable_parallel()->set_ranks(2);
  built.mutable_train()->set_steps(100);
  built.mutable_train()->set_sequence_length(64);
  built.mutable_train()->set_global_batch(8);
  built.mutable_train()->mutable_schedule()->set_lr(1e-3f);
  built.mutable_train()->mutable_schedule()->set_warmup_steps(10);
  built.mutable_data()->set_path("/data/text");
  built.mutable_checkpoint()->set_path("/ckpt/demo");
  built.mutable_precision()->set_recipe("fp8_flow");
  ApplyDefaults(&built);
  EXPECT_EQ(built.DebugString(), Good().DebugString());
  EXPECT_TRUE(ValidateJobSpec(built).empty());
}

TEST(JobSpecTest, ASpecFromTheWireIsCheckedAsAFileIs) {
  v1::JobSpec spec = Good();
  EXPECT_TRUE(ValidateJobSpec(spec).empty());
  spec.mutable_parallel()->set_expert_parallel(3);
  spec.mutable_train()->set_steps(0);
  spec.mutable_precision()->set_recipe("fp9");
  const std::vector<SpecViolation> violations = ValidateJobSpec(spec);
  ASSERT_EQ(violations.size(), 3u);
  EXPECT_EQ(
      violations[0].Text(""),
      "train.steps: missing; it is required (optimizer steps); valid: an integer, at least 1");
  EXPECT_THAT(violations[1].Text(""), HasSubstr("precision.recipe: found \"fp9\""));
  EXPECT_EQ(violations[2].Text(""),
            "parallel.expert_parallel: found 3; does not divide parallel.ranks (2); valid: 1, 2");
}

TEST(JobSpecTest, AllErrorsComeAtOnceInTheOrderOfTheFile) {
  std::string yaml = Edited("family: mixtral", "family: mistral");
  yaml.replace(yaml.find("steps: 100"), 10, "steps: -1 ");
  yaml.replace(yaml.find("name: demo"), 10, "name: De!o");
  yaml += "restart: {maxx: 3}\n";
  const ParsedJobSpec parsed = ParseJobSpec(yaml, "job.yaml");
  ASSERT_EQ(parsed.violations.size(), 4u) << parsed.Text();
  for (std::size_t i = 1; i < parsed.violations.size(); ++i) {
    EXPECT_LT(parsed.violations[i - 1].mark.line, parsed.violations[i].mark.line);
  }
  EXPECT_THAT(std::string(parsed.status().message()),
              HasSubstr("job.yaml: 4 errors\njob.yaml:1:7"));
}

TEST(JobSpecTest, BuildsThePlanOfTheSpec) {
  const ParsedJobSpec parsed =
      ParseJobSpec(Edited("recipe: fp8_flow",
                          "recipe: fp8_delayed\n"
                          "  parameters: {history_len: 16, amax_algo: most_recent}\n"
                          "  overrides:\n"
                          "    - {layers: 2-3, ops: [fc1, fc2], recipe: fp8_blockwise}\n"
                          "    - {layers: 4, recipe: bf16}"),
                   "job.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  const PrecisionPlan plan = BuildPlanFromSpec(parsed.spec);
  EXPECT_EQ(plan.version, 1);
  EXPECT_EQ(plan.layers, 6);
  EXPECT_EQ(plan.Resolve(0, Op::kFc1).kind, RecipeKind::kBf16);
  EXPECT_EQ(plan.Resolve(1, Op::kFc1).history_len, 16);
  EXPECT_EQ(plan.Resolve(1, Op::kFc1).amax_algo, AmaxAlgorithm::kMostRecent);
  EXPECT_EQ(plan.Resolve(1, Op::kDispatch).kind, RecipeKind::kFp8Blockwise);
  EXPECT_TRUE(plan.Resolve(1, Op::kDispatch).pow2_scales);
  EXPECT_EQ(plan.Resolve(2, Op::kFc2).kind, RecipeKind::kFp8Blockwise);
  EXPECT_EQ(plan.Resolve(2, Op::kAttnQkv).kind, RecipeKind::kFp8Delayed);
  EXPECT_EQ(plan.Resolve(4, Op::kAttnOut).kind, RecipeKind::kBf16);
}

TEST(JobSpecTest, AutoBeginsInBf16WithCandidatesThatFitTheModel) {
  const ParsedJobSpec parsed = ParseJobSpec(Edited("recipe: fp8_flow", "recipe: auto"), "j.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  EXPECT_EQ(StrJoin(parsed.spec.precision().candidates(), ","),
            "fp8_flow,fp8_blockwise,fp8_current,bf16");
  EXPECT_EQ(BuildPlanFromSpec(parsed.spec).Resolve(3, Op::kFc1).kind, RecipeKind::kBf16);
  std::string narrow = Edited("recipe: fp8_flow", "recipe: auto");
  narrow.replace(narrow.find("expert_hidden: 256"), 18, "expert_hidden: 208");
  const ParsedJobSpec fewer = ParseJobSpec(narrow, "j.yaml");
  ASSERT_TRUE(fewer.ok()) << fewer.Text();
  EXPECT_EQ(StrJoin(fewer.spec.precision().candidates(), ","), "fp8_current,bf16");
}

TEST(JobSpecTest, OverridesOfAnOperatorGetTheSameChecks) {
  const v1::JobSpec spec = Good();
  v1::JobSpec scratch;
  auto* overrides = scratch.mutable_precision()->mutable_overrides();
  v1::PrecisionOverride* change = overrides->Add();
  change->set_layers("2");
  change->mutable_recipe()->set_kind("bf16");
  EXPECT_TRUE(ValidateOverrides(spec, *overrides).empty());
  change->set_layers("7");
  const std::vector<SpecViolation> violations = ValidateOverrides(spec, *overrides);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].Text(""),
            "precision.overrides[0].layers: found \"7\"; valid: one layer or a range within 0-5, "
            "e.g. 3 or 2-5");
}

TEST(JobSpecTest, HostileFilesAreRefusedQuickly) {
  EXPECT_EQ(ParseJobSpec("", "j.yaml").Text(), "j.yaml: the file is empty\n");
  EXPECT_EQ(ParseJobSpec("# only a comment\n", "j.yaml").Text(), "j.yaml: the file is empty\n");
  EXPECT_EQ(ParseJobSpec("- a\n- b\n", "j.yaml").Text(),
            "j.yaml:1:1: found no map at the top level; valid: keys such as name, model, train, "
            "data, checkpoint\n");
  EXPECT_EQ(ParseJobSpec("name: \xff\n", "j.yaml").Text(), "j.yaml: the file is not UTF-8 text\n");
  EXPECT_EQ(ParseJobSpec(std::string(kMaxSpecBytes + 1, '#'), "j.yaml").Text(),
            "j.yaml: the file has 262145 bytes; valid is at most 262144\n");
  EXPECT_THAT(ParseJobSpec(std::string(2000, '['), "j.yaml").Text(),
              HasSubstr("nested deeper than 32 levels"));
  EXPECT_THAT(ParseJobSpec("? [a, b]\n: c\n", "j.yaml").Text(),
              HasSubstr("j.yaml:1:3: a key must be plain text"));
  EXPECT_THAT(ParseJobSpec("a: &x [*x]\n", "j.yaml").Text(), HasSubstr("alias"));
  std::string bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n";
  for (int i = 1; i < 12; ++i) {
    StrAppend(&bomb, "a", i, ": &a", i, " [");
    for (int j = 0; j < 10; ++j) {
      StrAppend(&bomb, j == 0 ? "" : ",", "*a", i - 1);
    }
    bomb += "]\n";
  }
  EXPECT_THAT(ParseJobSpec(bomb, "j.yaml").Text(), HasSubstr("more than 20000 values"));
  // A layer count far out of range must not be iterated over.
  std::string huge = Edited("recipe: fp8_flow", "recipe: auto");
  huge.replace(huge.find("layers: 6"), 9, "layers: 2000000000");
  EXPECT_THAT(ParseJobSpec(huge, "j.yaml").Text(), HasSubstr("found 2000000000"));
}

TEST(JobSpecTest, AliasesOfMapsWork) {
  const ParsedJobSpec parsed =
      ParseJobSpec(Edited("recipe: fp8_flow",
                          "recipe: fp8_flow\n  overrides:\n    - {layers: 1, recipe: &r {kind: "
                          "fp8_blockwise, pow2_scales: true}}\n    - {layers: 3, recipe: *r}"),
                   "j.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.Text();
  EXPECT_TRUE(parsed.spec.precision().overrides(1).recipe().pow2_scales());
}

TEST(JobSpecTest, RandomEditsNeverCrashAndValidOnesStayValid) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(StrCat("seed ", seed));
  std::mt19937 rng(seed);
  const std::string pieces[] = {
      ":",    "\n", "  ",        "-",   "[", "]",  "{",     "}",
      "\"",   "&a", "*a",        "#",   "0", "-1", "1e400", "99999999999999999999",
      "null", "~",  "\xc3",      "!!x", "|", ">",  "'",     "? ",
      "%",    "@",  "layers: 2", "auto"};
  int valid = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = kGoodSpec;
    const int edits = 1 + static_cast<int>(rng() % 3);
    for (int i = 0; i < edits; ++i) {
      const std::size_t at = rng() % text.size();
      switch (rng() % 3) {
        case 0:
          text.erase(at, 1 + rng() % 8);
          break;
        case 1:
          text.insert(at, pieces[rng() % std::size(pieces)]);
          break;
        default:
          text[at] = static_cast<char>(rng() % 256);
          break;
      }
    }
    const ParsedJobSpec parsed = ParseJobSpec(text, "fuzz.yaml");
    for (const SpecViolation& violation : parsed.violations) {
      EXPECT_TRUE(IsValidUtf8(violation.Text("fuzz.yaml"))) << text;
      EXPECT_FALSE(violation.message.empty()) << text;
    }
    if (parsed.ok()) {
      ++valid;
      EXPECT_TRUE(ValidateJobSpec(parsed.spec).empty()) << text;
      EXPECT_EQ(BuildPlanFromSpec(parsed.spec).layers, parsed.spec.model().layers());
    }
  }
  EXPECT_GT(valid, 0) << "the edits are too rough to test anything but the YAML parser";
}

TEST(JobSpecTest, RandomWireSpecsNeverCrashTheValidator) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(StrCat("seed ", seed));
  std::mt19937 rng(seed);
  const std::string bytes = Good().SerializeAsString();
  const google::protobuf::LogSilencer silencer;  // it reports every invalid string it refuses
  for (int round = 0; round < 2000; ++round) {
    std::string mutated = bytes;
    for (int i = 0; i < 3; ++i) {
      mutated[rng() % mutated.size()] = static_cast<char>(rng() % 256);
    }
    v1::JobSpec spec;
    if (spec.ParseFromString(mutated)) {
      ValidateJobSpec(spec);
    }
  }
}

TEST(SpecReferenceTest, NamesEveryFieldWithItsHelp) {
  const std::string text = SpecReference();
  EXPECT_THAT(text, HasSubstr("  family:                           # model family [required; "
                              "mixtral, qwen3_moe]\n"));
  EXPECT_THAT(text, HasSubstr("# AdamW beta2 [a number, 0 to 0.99999; default 0.95]\n"));
  EXPECT_THAT(text, HasSubstr("REFUSED: LoRA is not supported"));
  EXPECT_THAT(text, HasSubstr("  overrides:                        # recipes for layer ranges and "
                              "ops, in order [list]\n      layers:"));
}

}  // namespace
}  // namespace octavo
