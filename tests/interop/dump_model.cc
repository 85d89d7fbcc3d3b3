// Trains a small model for some steps and writes what an independent implementation needs to repeat
// it:
//   interop_dump_model DIRECTORY FAMILY AUX STEPS
//     FAMILY mixtral | qwen3_moe; AUX: coefficient of the auxiliary loss (0: off)
//   config.txt   "key value" lines
//   weights.txt  "name offset dim dim …" lines, elements of weights.bin (FP32, before the first
//   step) batches.bin  int32 [steps, microbatches, ranks, 2 (input, target), sequences · length]
//   losses.txt   one line a step: mean token loss, weighted auxiliary loss, gradient norm
// Two ranks as threads with expert-parallel size 2, two microbatches, FP32.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

struct Case {
  std::string directory;
  ModelConfig model;
  RunConfig run;
  int steps = 0;
};

void WriteConfig(const Case& c) {
  std::ofstream out(c.directory + "/config.txt");
  const ModelConfig& m = c.model;
  out << "layers " << m.layers << "\nhidden " << m.hidden << "\nheads " << m.heads << "\nkv_heads "
      << m.kv_heads << "\nhead_dim " << m.head_dim << "\nvocab " << m.vocab << "\nexperts "
      << m.experts << "\ntopk " << m.experts_per_token << "\nqk_norm " << m.qk_norm
      << "\nrope_theta " << m.rope_theta << "\nnorm_eps " << m.norm_eps << "\naux "
      << m.router.aux_coefficient << "\nz " << m.router.z_coefficient << "\nsequence "
      << c.run.sequence_length << "\nsequences " << c.run.microbatch_sequences << "\nmicrobatches "
      << c.run.microbatches << "\nranks " << c.run.world_size << "\nsteps " << c.steps
      << "\nlr 0.002\n";
}

void WriteBatches(const Case& c) {
  std::ofstream out(c.directory + "/batches.bin", std::ios::binary);
  for (int step = 0; step < c.steps; ++step) {
    for (int block = 0; block < c.run.microbatches * c.run.world_size; ++block) {
      std::vector<std::int32_t> input, target;
      for (int s = 0; s < c.run.microbatch_sequences; ++s) {
        const auto tokens = Sequence(c.model.vocab, c.run.sequence_length, step,
                                     block * c.run.microbatch_sequences + s);
        input.insert(input.end(), tokens.begin(), tokens.end() - 1);
        target.insert(target.end(), tokens.begin() + 1, tokens.end());
      }
      for (const auto* part : {&input, &target}) {
        out.write(reinterpret_cast<const char*>(part->data()),
                  static_cast<std::streamsize>(part->size() * sizeof(std::int32_t)));
      }
    }
  }
}

// From a model that holds all experts; initial values do not depend on the number of ranks.
void WriteWeights(const Case& c) {
  RunConfig alone = c.run;
  alone.world_size = alone.expert_parallel = 1;
  InprocRanks ranks = InprocRanks::Make(1, 1);
  ModelRank rank(c.model, alone, Uniform(c.model, RecipeKind::kFp32), &ranks.ranks[0]);
  std::ofstream index(c.directory + "/weights.txt");
  std::ofstream out(c.directory + "/weights.bin", std::ios::binary);
  std::int64_t offset = 0;
  for (const Parameter& p : rank.model().parameters().all()) {
    index << p.name << " " << offset;
    for (std::int64_t d : p.shape) {
      index << " " << d;
    }
    index << "\n";
    out.write(reinterpret_cast<const char*>(p.master),
              static_cast<std::streamsize>(p.count * static_cast<std::int64_t>(sizeof(float))));
    offset += p.count;
  }
}

int Main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s DIRECTORY mixtral|qwen3_moe AUX STEPS\n", argv[0]);
    return 2;
  }
  Case c;
  c.directory = argv[1];
  c.model = SmallModel();
  c.model.hidden = 64;
  c.model.head_dim = 16;
  c.model.expert_hidden = 48;
  c.model.experts = 8;
  if (std::string(argv[2]) == "qwen3_moe") {
    c.model.family = ModelFamily::kQwen3Moe;
    c.model.qk_norm = true;
    c.model.rope_theta = 1e6f;
    c.model.norm_eps = 1e-6f;
  }
  c.model.router.aux_scope = AuxLossScope::kMicrobatch;
  c.model.router.aux_coefficient = static_cast<float>(std::atof(argv[3]));
  c.steps = std::atoi(argv[4]);
  c.run = SmallRun(true);
  c.run.world_size = c.run.expert_parallel = 2;
  c.run.microbatches = 2;
  WriteConfig(c);
  WriteBatches(c);
  WriteWeights(c);
  const auto outcomes = Train(c.model, c.run, Uniform(c.model, RecipeKind::kFp32), c.steps, 0.002);
  std::FILE* losses = std::fopen((c.directory + "/losses.txt").c_str(), "w");
  if (losses == nullptr) {
    std::perror(c.directory.c_str());
    return 1;
  }
  for (const StepOutcome& outcome : outcomes) {
    std::fprintf(losses, "%.9g %.9g %.9g\n", outcome.loss, outcome.aux, outcome.grad_norm);
  }
  std::fclose(losses);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) { return octavo::testing::Main(argc, argv); }
