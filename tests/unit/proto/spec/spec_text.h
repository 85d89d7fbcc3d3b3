// A valid job file and small edits of it.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace octavo {

inline constexpr char kGoodSpec[] = R"(name: demo
device: cpu
model:
  family: mixtral
  layers: 6
  hidden: 128
  heads: 4
  kv_heads: 2
  vocab_size: 256
  moe:
    num_experts: 8
    experts_per_token: 2
    expert_hidden: 256
parallel:
  ranks: 2
  expert_parallel: 2
train:
  steps: 100
  sequence_length: 64
  global_batch: 8
  schedule:
    lr: 1e-3
    warmup_steps: 10
data:
  path: /data/text
checkpoint:
  path: /ckpt/demo
precision:
  recipe: fp8_flow
)";

// kGoodSpec with the first `from` replaced by `to`.
inline std::string Edited(const std::string& from, const std::string& to) {
  std::string text = kGoodSpec;
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

}  // namespace octavo
