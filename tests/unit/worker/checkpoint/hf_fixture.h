// Small models of both families and checkpoints of them with random weights.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/checkpoint/hf_import.h"
#include "worker/checkpoint/store.h"
#include "worker/checkpoint/writer.h"

namespace octavo {

inline ModelConfig SmallMixtral() {
  ModelConfig m;
  m.family = ModelFamily::kMixtral;
  m.layers = 2;
  m.hidden = 96;
  m.heads = 6;
  m.kv_heads = 2;
  m.head_dim = 16;
  m.vocab = 200;
  m.rope_theta = 5e5f;
  m.norm_eps = 2e-5f;
  m.experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 160;
  m.router.aux_coefficient = 0.02f;
  return m;
}

inline ModelConfig SmallQwen() {
  ModelConfig m = SmallMixtral();
  m.family = ModelFamily::kQwen3Moe;
  m.qk_norm = true;
  m.layers = 3;
  m.dense_layers = {1};
  m.dense_hidden = 224;
  m.tied_embeddings = true;
  m.router.normalize_topk = false;
  return m;
}

// Every stored tensor with its values.
using Weights = std::map<std::string, std::vector<float>>;

inline Weights RandomWeights(const ModelConfig& model, unsigned seed) {
  std::mt19937 rng(seed);
  Weights weights;
  for (const HfSources& source : HfSourcesOf(model)) {
    std::int64_t n = 1;
    for (const std::int64_t d : source.shape) {
      n *= d;
    }
    std::vector<float>& values = weights[source.stored];
    values.resize(static_cast<std::size_t>(n));
    // Blocks of different size and some zeros, so that scales differ.
    std::normal_distribution<float> normal(0.0f, 0.02f * static_cast<float>(1 + rng() % 50));
    for (float& v : values) {
      v = rng() % 16 == 0 ? 0.0f : normal(rng);
    }
  }
  return weights;
}

// Writes a checkpoint of step 12 as a job would, in two shards, and returns its folder.
inline std::string WriteCheckpoint(FileSystem& fs, const std::string& root,
                                   const ModelConfig& model, const Weights& weights) {
  CheckpointStore store(fs, root, "uid", 1);
  Manifest manifest{.job_uid = "uid", .job_name = "job", .attempt = 1, .model = model};
  manifest.state.step = 12;
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    ShardWriteRequest request{.folder = store.PartialPath(12), .rank = rank};
    std::int32_t i = 0;
    for (const HfSources& source : HfSourcesOf(model)) {
      if (i++ % 2 != rank) {
        continue;
      }
      const std::vector<float>& values = weights.at(source.stored);
      for (const char* suffix : {"/master", "/m", "/v"}) {
        OwnedTensor t{.name = source.stored + suffix, .shape = source.shape};
        t.bytes.resize(values.size() * sizeof(float));
        std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
        request.tensors.push_back(std::move(t));
      }
    }
    manifest.shards.push_back(*WriteShard(fs, request));
  }
  const absl::Status published = store.Publish(manifest);
  OCTAVO_CHECK(published.ok(), "%s", ToString(published).c_str());
  return store.FinalPath(12);
}

}  // namespace octavo
