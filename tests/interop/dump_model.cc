// Trains a small model for some steps and writes what an independent implementation needs to repeat
// it:
//   interop_dump_model DIRECTORY FAMILY AUX STEPS [DEVICE RECIPE]
//     FAMILY mixtral | qwen3_moe; AUX: coefficient of the auxiliary loss (0: off)
//     DEVICE cpu | cuda (default cpu); RECIPE fp32 | bf16 | … (default fp32)
//   config.txt   "key value" lines
//   weights.txt  "name offset dim dim …" lines, elements of weights.bin (FP32, before the first
//   step) batches.bin  int32 [steps, microbatches, ranks, 2 (input, target), sequences · length]
//   losses.txt   one line a step: mean token loss, weighted auxiliary loss, gradient norm
// FP32: two ranks as threads with expert-parallel size 2, two microbatches. Otherwise one rank on
// the device, four microbatches: the same sequences.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "kernels/arena.h"
#include "tests/unit/worker/model/model_harness.h"
#include "worker/comm/self.h"
#include "worker/rank/backend_loader.h"

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

// Input (shift 0) or target (1) tokens of a block: sequences in global order.
std::vector<std::int32_t> Block(const Case& c, int step, int block, int shift) {
  std::vector<std::int32_t> part;
  for (int s = 0; s < c.run.microbatch_sequences; ++s) {
    const auto tokens = Sequence(c.model.vocab, c.run.sequence_length, step,
                                 block * c.run.microbatch_sequences + s);
    part.insert(part.end(), tokens.begin() + shift, tokens.end() - 1 + shift);
  }
  return part;
}

void WriteBatches(const Case& c) {
  std::ofstream out(c.directory + "/batches.bin", std::ios::binary);
  for (int step = 0; step < c.steps; ++step) {
    for (int block = 0; block < c.run.microbatches * c.run.world_size; ++block) {
      for (int shift = 0; shift < 2; ++shift) {
        const std::vector<std::int32_t> part = Block(c, step, block, shift);
        out.write(reinterpret_cast<const char*>(part.data()),
                  static_cast<std::streamsize>(part.size() * sizeof(std::int32_t)));
      }
    }
  }
}

// From a model that holds all experts; initial values do not depend on the number of ranks.
void WriteWeights(const Case& c) {
  RunConfig alone = c.run;
  alone.world_size = alone.expert_parallel = 1;
  alone.fp32 = true;
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

absl::StatusOr<std::vector<StepOutcome>> TrainOn(const std::string& device, const Case& c,
                                                 RecipeKind recipe) {
  ASSIGN_OR_RETURN(const std::unique_ptr<LoadedBackend> loaded, LoadedBackend::Open(device, 0));
  const Backend backend = loaded->backend();
  const auto self = CreateSelfCommunicator();
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Transformer> model,
      Transformer::Create(
          {.model = c.model,
           .run = c.run,
           .optimizer = {},
           .backend = backend,
           .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
           .plan = Uniform(c.model, recipe)}));
  model->InitializeParameters();
  Arena arena(backend, "tokens");
  const std::int64_t count = c.run.tokens();
  auto* tokens = arena.Take<std::int32_t>(2 * count);
  if (tokens == nullptr) {
    return ResourceExhaustedError("no memory for tokens");
  }
  std::vector<StepOutcome> outcomes;
  for (int step = 0; step < c.steps; ++step) {
    model->BeginStep({.target_tokens = count * c.run.microbatches, .sample_sqnr = false});
    for (int block = 0; block < c.run.microbatches; ++block) {
      for (int shift = 0; shift < 2; ++shift) {
        const std::vector<std::int32_t> part = Block(c, step, block, shift);
        backend.ops->copy(backend.context,
                          {.dst = tokens + shift * count,
                           .src = part.data(),
                           .bytes = count * static_cast<std::int64_t>(sizeof(std::int32_t)),
                           .kind = CopyKind::kToDevice});
        backend.ops->synchronize(backend.context);  // `part` ends here
      }
      RETURN_IF_ERROR(model->ForwardBackward(tokens, tokens + count));
    }
    ASSIGN_OR_RETURN(const PassResult pass, model->FinishPass());
    outcomes.push_back({.loss = pass.loss_sum / static_cast<double>(pass.tokens),
                        .aux = pass.aux_loss,
                        .z = pass.z_loss,
                        .grad_norm = std::sqrt(pass.grad_norm_squared)});
    model->ApplyOptimizer({.lr = 0.002,
                           .t = step + 1,
                           .grad_factor = ClipFactor(pass.grad_norm_squared, 1.0),
                           .skip = false});
    RETURN_IF_ERROR(model->EndStep(true));
  }
  return outcomes;
}

int Main(int argc, char** argv) {
  if (argc != 5 && argc != 7) {
    std::fprintf(stderr, "usage: %s DIRECTORY mixtral|qwen3_moe AUX STEPS [cpu|cuda RECIPE]\n",
                 argv[0]);
    return 2;
  }
  const std::string device = argc == 7 ? argv[5] : "cpu";
  const auto recipe = ParseRecipeKind(argc == 7 ? argv[6] : "fp32");
  if (!recipe.has_value()) {
    std::fprintf(stderr, "unknown recipe %s\n", argv[6]);
    return 2;
  }
  const bool fp32 = *recipe == RecipeKind::kFp32;
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
  c.run = SmallRun(fp32);
  c.run.world_size = c.run.expert_parallel = fp32 ? 2 : 1;
  c.run.microbatches = fp32 ? 2 : 4;
  WriteConfig(c);
  WriteBatches(c);
  WriteWeights(c);
  std::vector<StepOutcome> outcomes;
  if (fp32) {
    outcomes = Train(c.model, c.run, Uniform(c.model, RecipeKind::kFp32), c.steps, 0.002);
  } else {
    absl::StatusOr<std::vector<StepOutcome>> trained = TrainOn(device, c, *recipe);
    if (!trained.ok()) {
      std::fprintf(stderr, "%s\n", ToString(trained.status()).c_str());
      return 1;
    }
    outcomes = *std::move(trained);
  }
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
