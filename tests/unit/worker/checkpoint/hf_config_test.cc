#include "worker/checkpoint/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "tests/unit/worker/checkpoint/hf_fixture.h"
#include "worker/checkpoint/manifest.h"

namespace octavo {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> Described(const ModelConfig& model) {
  std::vector<std::string> out;
  for (const NamedValue& v : DescribeModel(model)) {
    out.push_back(v.name + "=" + v.value);
  }
  return out;
}

std::string Refusal(const ModelConfig& model) { return Message(CheckHfExpressible(model)); }

// A folder's config.json of a model with one field changed or added.
std::string ParseError(const ModelConfig& model, const char* field, const json& value) {
  json config = json::parse(WriteHfConfig(model, {.max_positions = 64}));
  config[field] = value;
  return Message(ParseHfConfig(config.dump(), "config.json").status());
}

TEST(HfConfigTest, WhatIsWrittenIsReadBackFieldByField) {
  for (const ModelConfig& model : {SmallMixtral(), SmallQwen()}) {
    for (const HfFormat format : {HfFormat::kBf16, HfFormat::kFp8}) {
      ASSERT_TRUE(CheckHfExpressible(model).ok());
      const auto read = ParseHfConfig(WriteHfConfig(model, {.format = format, .max_positions = 64}),
                                      "config.json");
      ASSERT_TRUE(read.ok()) << ToString(read.status());
      EXPECT_EQ(Described(read->model), Described(model));
      EXPECT_EQ(read->fp8, format == HfFormat::kFp8);
    }
  }
}

TEST(HfConfigTest, MoreChosenExpertsThanExpertsAreRefusedByName) {
  EXPECT_THAT(ParseError(SmallQwen(), "num_experts_per_tok", 5),
              HasSubstr("num_experts_per_tok is 5; valid is 1 to 4"));
  EXPECT_EQ(ParseError(SmallQwen(), "num_experts_per_tok", 4), "");
}

TEST(HfConfigTest, TheLongestSequenceIsReadAndMayBeAbsent) {
  const std::string text = WriteHfConfig(SmallQwen(), {.max_positions = 64});
  EXPECT_EQ(ParseHfConfig(text, "c")->max_positions, 64);
  json config = json::parse(text);
  config.erase("max_position_embeddings");
  EXPECT_EQ(ParseHfConfig(config.dump(), "c")->max_positions, 0);
}

TEST(HfConfigTest, FloatsKeepTheirShortDecimals) {
  EXPECT_THAT(WriteHfConfig(SmallMixtral(), {.max_positions = 64}),
              HasSubstr("\"rms_norm_eps\": 2e-05"));
}

TEST(HfConfigTest, TopKThenSoftmaxIsWrittenAsNormalised) {
  ModelConfig model = SmallQwen();
  model.router.score = RouterScore::kTopKSoftmax;
  model.router.normalize_topk = false;
  ASSERT_TRUE(CheckHfExpressible(model).ok());
  EXPECT_TRUE(ParseHfConfig(WriteHfConfig(model, {}), "c")->model.router.normalize_topk);
  model.family = ModelFamily::kMixtral;
  model.qk_norm = false;
  model.dense_layers = {};
  EXPECT_TRUE(CheckHfExpressible(model).ok());
}

TEST(HfConfigTest, EachThingThatAFamilyCannotExpressIsNamed) {
  struct Case {
    const char* expected;
    void (*change)(ModelConfig& m);
  };
  const Case both[] = {
      {"sigmoid scores", [](ModelConfig& m) { m.router.score = RouterScore::kSigmoid; }},
      {"selection bias", [](ModelConfig& m) { m.router.bias_update_rate = 1e-3f; }},
      {"factor of 2.5", [](ModelConfig& m) { m.router.routed_scaling_factor = 2.5f; }},
      {"group-limited", [](ModelConfig& m) { m.router.n_group = m.router.topk_group = 2; }},
      {"shared experts", [](ModelConfig& m) { m.shared_experts = 1; }},
      {"norms", [](ModelConfig& m) { m.qk_norm = !m.qk_norm; }},
  };
  for (const Case& c : both) {
    for (ModelConfig model : {SmallMixtral(), SmallQwen()}) {
      c.change(model);
      EXPECT_THAT(Refusal(model), HasSubstr(c.expected));
    }
  }
  const Case mixtral[] = {
      {"dense layers", [](ModelConfig& m) { m.dense_layers = {0}; }},
      {"not normalised", [](ModelConfig& m) { m.router.normalize_topk = false; }},
  };
  for (const Case& c : mixtral) {
    ModelConfig model = SmallMixtral();
    c.change(model);
    EXPECT_THAT(Refusal(model), HasSubstr(c.expected));
    EXPECT_THAT(Refusal(model), HasSubstr("Mixtral"));
  }
  // All of them at once.
  ModelConfig model = SmallMixtral();
  model.shared_experts = 1;
  model.router.score = RouterScore::kSigmoid;
  EXPECT_THAT(Refusal(model), HasSubstr("sigmoid"));
  EXPECT_THAT(Refusal(model), HasSubstr("shared"));
}

TEST(HfConfigTest, WhatOctavoCannotComputeIsRefused) {
  const ModelConfig qwen = SmallQwen(), mixtral = SmallMixtral();
  EXPECT_THAT(ParseError(qwen, "attention_bias", true), HasSubstr("attention_bias"));
  EXPECT_THAT(ParseError(qwen, "hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(ParseError(mixtral, "sliding_window", 4096), HasSubstr("sliding_window is 4096"));
  EXPECT_EQ(ParseError(qwen, "sliding_window", 4096), "") << "use_sliding_window is false";
  EXPECT_THAT(ParseError(qwen, "rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}),
              HasSubstr("rope_scaling.rope_type is \"yarn\""));
  EXPECT_THAT(ParseError(qwen, "model_type", "llama"), HasSubstr("model_type is \"llama\""));
  EXPECT_THAT(ParseError(qwen, "quantization_config", {{"quant_method", "gptq"}}),
              HasSubstr("not FP8 blockwise"));
  EXPECT_THAT(ParseError(qwen, "hidden_size", nullptr), HasSubstr("hidden_size is missing"));
  EXPECT_THAT(ParseError(qwen, "hidden_size", "large"), HasSubstr("hidden_size is \"large\""));
  EXPECT_THAT(ParseError(qwen, "quantization_config", 7), HasSubstr("not FP8 blockwise"));
  EXPECT_FALSE(ParseHfConfig("{", "config.json").ok());
  EXPECT_FALSE(ParseHfConfig("[]", "config.json").ok());
}

TEST(HfConfigTest, KeysOfTransformers4And5AreUnderstood) {
  json config = json::parse(WriteHfConfig(SmallQwen(), {.max_positions = 64}));
  config.erase("rope_theta");
  config["num_local_experts"] = config["num_experts"];
  config.erase("num_experts");
  auto read = ParseHfConfig(config.dump(), "c");
  ASSERT_TRUE(read.ok()) << ToString(read.status());
  EXPECT_EQ(read->model.rope_theta, 5e5f);
  EXPECT_EQ(read->model.experts, 4);

  config["rope_theta"] = 1e6;
  config.erase("rope_parameters");
  config.erase("head_dim");
  config.erase("mlp_only_layers");
  config["decoder_sparse_step"] = 2;
  read = ParseHfConfig(config.dump(), "c");
  ASSERT_TRUE(read.ok()) << ToString(read.status());
  EXPECT_EQ(read->model.rope_theta, 1e6f);
  EXPECT_EQ(read->model.head_dim, 16);
  EXPECT_EQ(read->model.dense_layers, (std::vector<std::int32_t>{0, 2}));
}

TEST(HfConfigTest, Fp8FoldersSayWhatTheyDoNotQuantise) {
  const json config =
      json::parse(WriteHfConfig(SmallMixtral(), {.format = HfFormat::kFp8, .max_positions = 64}));
  const json& q = config["quantization_config"];
  EXPECT_EQ(q["quant_method"], "fp8");
  EXPECT_EQ(q["weight_block_size"], json({128, 128}));
  EXPECT_EQ(q["modules_to_not_convert"], json({"lm_head", "model.layers.0.block_sparse_moe.gate",
                                               "model.layers.1.block_sparse_moe.gate"}));
  EXPECT_FALSE(json::parse(WriteHfConfig(SmallMixtral(), {})).contains("quantization_config"));
}

}  // namespace
}  // namespace octavo
