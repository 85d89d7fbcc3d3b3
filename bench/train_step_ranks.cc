// Whole training steps over several ranks, expert-parallel: tokens/s of a GPU, how it scales from
// one rank to N, what share of a step is communication, memory.
//
//   bench_train_step_ranks [--ranks 1,2] [--device cuda|cpu] [--config A,B] [--recipe bf16,…]
//                          [--steps N] [--overlap on,off] [--parts N]
//
// Every rank trains the same number of tokens whatever their number (weak scaling); the experts are
// spread over all ranks. The step is bench_train_step_gpu's: forward, backward, reductions,
// gradient norm, AdamW, precision windows, on 16 batches of random tokens in turn. Times are
// medians of the slowest rank. Then
//   in comm.  of one more step with a wait before and after every collective, the part that passed
//             inside them, waiting for the others included: what hiding communication could win
//   exposed   of one more step that runs as the timed ones, the part in which the compute lane
//   stood
//             and waited for a message, on the rank that waited least (the others wait for it too)
//   host      of that step, the part in which the host did not wait for the device: near 100 % the
//             device waits for the host
//   bubble    of that step, what passes on the compute lane between the last sum of squares and the
//             first AdamW, in µs: the host learns the sums, ranks agree, the host goes on
// --overlap off: every message is waited for where it is sent. Peers and goals of A and B on one
// GPU: bench_train_step_gpu.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "bench/bench_ranks.h"
#include "worker/layers/exchange.h"
#include "worker/model/transformer.h"

namespace octavo::bench {
namespace {

constexpr double kGiB = 1073741824.0;
constexpr std::int64_t kBatches = 16;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Flags {
  std::string device = "cuda";
  std::vector<int> ranks = {1, 2};
  std::vector<std::string> configs = {"A", "B"}, recipes = {"bf16", "fp8_blockwise", "fp8_flow"};
  std::int64_t sequence = 2048;
  std::int32_t sequences = 8;
  int steps = 8, warmup = 3;
  std::vector<std::string> overlap = {"on"};
  std::int32_t parts = 0, layers = 0;
  bool reduce_early = true;
};

// A table that, while it watches, notes how long the host waits and where the step's bubble is. One
// a thread, for the rank whose thread it is.
class WatchedOps {
 public:
  explicit WatchedOps(const Backend& backend) : inner_(backend.ops), context_(backend.context) {
    current = this;
    table_ = *inner_;
    table_.synchronize = [](OpsContext* c) {
      current->Waiting([c] { current->inner_->synchronize(c); });
    };
    table_.synchronize_lane = [](OpsContext* c, Lane lane) {
      current->Waiting([c, lane] { current->inner_->synchronize_lane(c, lane); });
    };
    table_.sum_squares = [](OpsContext* c, const SumSquaresArgs& args) {
      current->inner_->sum_squares(c, args);
      if (current->watching_) {
        current->inner_->mark(c, kSquares, Lane::kCompute);
      }
    };
    table_.adamw = [](OpsContext* c, const AdamWArgs& args) {
      if (current->watching_ && !std::exchange(current->stepped_, true)) {
        current->inner_->mark(c, kAdamW, Lane::kCompute);
      }
      current->inner_->adamw(c, args);
    };
    (void)inner_->reserve_marks(context_, kMarks);
  }
  ~WatchedOps() { current = nullptr; }
  WatchedOps(const WatchedOps&) = delete;
  WatchedOps& operator=(const WatchedOps&) = delete;

  const Ops* table() const { return &table_; }
  void Watch(bool on) {
    watching_ = on;
    if (on) {
      stepped_ = false;
      waited_ = 0;
      waits_ = 0;
    }
  }
  // What the compute lane does between the two is added up.
  template <class Call>
  auto Exposed(const Call& call) {
    const bool fits = watching_ && kFirstWait + 2 * waits_ + 1 < kMarks;
    if (fits) {
      inner_->mark(context_, kFirstWait + 2 * waits_, Lane::kCompute);
    }
    struct After {
      WatchedOps* ops;
      bool fits;
      ~After() {
        if (fits) {
          ops->inner_->mark(ops->context_, kFirstWait + 2 * ops->waits_++ + 1, Lane::kCompute);
        }
      }
    } const after{this, fits};
    return call();
  }

  // After a wait for the device.
  double exposed_seconds() const {
    double sum = 0;
    for (int i = 0; i < waits_; ++i) {
      sum += inner_->mark_seconds(context_, kFirstWait + 2 * i, kFirstWait + 2 * i + 1);
    }
    return sum;
  }
  double bubble_seconds() const { return inner_->mark_seconds(context_, kSquares, kAdamW); }
  double waited_seconds() const { return waited_; }

 private:
  static constexpr int kSquares = 0, kAdamW = 1, kFirstWait = 2, kMarks = 4096;

  template <class Wait>
  void Waiting(const Wait& wait) {
    const double begin = Now();
    wait();
    waited_ += Now() - begin;
  }

  static thread_local WatchedOps* current;
  const Ops* const inner_;
  OpsContext* const context_;
  Ops table_;
  bool watching_ = false, stepped_ = false;
  double waited_ = 0;
  int waits_ = 0;
};
thread_local WatchedOps* WatchedOps::current = nullptr;

// While it measures, waits for the device around every call and adds up the time between.
class MeasuredCommunicator final : public Communicator {
 public:
  MeasuredCommunicator(Communicator& inner, const Backend& backend, WatchedOps& watched)
      : inner_(inner), backend_(backend), watched_(watched) {}

  void Measure(bool on) {
    measuring_ = on;
    seconds_ = 0;
  }
  double seconds() const { return seconds_; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool device_pointers() const override { return inner_.device_pointers(); }
  CommResult AllToAllV(const AllToAllVArgs& args) override {
    return Timed([&] { return inner_.AllToAllV(args); });
  }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    return Timed([&] { return inner_.AllReduce(data, count, dtype, op); });
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    return Timed([&] { return inner_.AllGather(send, receive, bytes); });
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    return Timed([&] { return inner_.Broadcast(data, bytes, root); });
  }
  CommResult StartAllToAllV(const AllToAllVArgs& args) override {
    return measuring_ ? AllToAllV(args) : inner_.StartAllToAllV(args);
  }
  CommResult StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    return measuring_ ? AllReduce(data, count, dtype, op)
                      : inner_.StartAllReduce(data, count, dtype, op);
  }
  CommResult StartAllGather(const void* send, void* receive, std::int64_t bytes) override {
    return measuring_ ? AllGather(send, receive, bytes)
                      : inner_.StartAllGather(send, receive, bytes);
  }
  void Join() override {
    watched_.Exposed([&] { inner_.Join(); });
  }
  CommResult Barrier() override { return inner_.Barrier(); }
  void Abort() override { inner_.Abort(); }
  CommResult Check() override { return inner_.Check(); }

 private:
  template <class Call>
  CommResult Timed(const Call& call) {
    if (!measuring_) {
      return watched_.Exposed(call);
    }
    backend_.ops->synchronize(backend_.context);
    const double begin = Now();
    CommResult result = call();
    backend_.ops->synchronize(backend_.context);
    seconds_ += Now() - begin;
    counters_ = inner_.counters();
    return result;
  }

  Communicator& inner_;
  const Backend backend_;
  WatchedOps& watched_;
  bool measuring_ = false;
  double seconds_ = 0;
};

// The shapes of bench_train_step_gpu, and one to try the program with.
ModelConfig ConfigOf(const std::string& name, std::int32_t layers) {
  ModelConfig model;
  model.layers = layers > 0 ? layers : name == "A" ? 16 : name == "B" ? 8 : 2;
  model.hidden = name == "A" ? 1024 : name == "B" ? 2048 : 256;
  model.heads = 16;
  model.kv_heads = 4;
  model.head_dim = name == "A" ? 64 : name == "B" ? 128 : 16;
  model.vocab = 32768;
  model.experts = name == "A" ? 32 : name == "B" ? 64 : 8;
  model.experts_per_token = name == "A" ? 4 : name == "B" ? 8 : 2;
  model.expert_hidden = name == "A" ? 512 : name == "B" ? 1024 : 128;
  model.router.aux_scope = AuxLossScope::kMicrobatch;
  model.router.aux_coefficient = 0.01f;
  return model;
}

// What rank 0 writes down for comparisons: tokens/s of a rank by "config recipe ranks".
using Speeds = std::map<std::string, double>;

class Runner {
 public:
  Runner(const Flags& flags, BenchRank& rank, MeasuredCommunicator& comm, Transformer& model,
         WatchedOps& watched, const std::int32_t* tokens, std::int64_t count)
      : flags_(flags),
        rank_(rank),
        comm_(comm),
        watched_(watched),
        model_(model),
        tokens_(tokens),
        count_(count),
        arena_(rank.backend, "runner"),
        pinned_(rank.backend, "runner pinned", Memory::kHostPinned),
        exchange_(rank.backend, &comm, 0, arena_, pinned_) {}

  absl::StatusOr<double> Step() {
    const double begin = Now();
    model_.BeginStep({.target_tokens = count_ * rank_.size});
    const std::int32_t* batch = tokens_ + step_ % kBatches * 2 * count_;
    RETURN_IF_ERROR(model_.ForwardBackward(batch, batch + count_));
    ASSIGN_OR_RETURN(const PassResult pass, model_.FinishPass());
    double sums[3] = {pass.grad_norm_squared, pass.loss_sum,
                      pass.first_nonfinite == kNoNonfinite ? 0.0 : 1.0};
    RETURN_IF_ERROR(exchange_.AllReduceHost(sums, 3, DType::kF64, ReduceOp::kSum));
    loss_ = sums[1] / static_cast<double>(count_ * rank_.size);
    model_.ApplyOptimizer(
        {.lr = 1e-4, .t = ++step_, .grad_factor = ClipFactor(sums[0], 1.0), .skip = sums[2] > 0});
    RETURN_IF_ERROR(model_.EndStep(true));
    rank_.backend.ops->synchronize(rank_.backend.context);
    return Now() - begin;
  }

  absl::Status Recipe(const std::string& config, const std::string& recipe,
                      const std::string& overlap, Speeds* speeds) {
    const auto kind = ParseRecipeKind(recipe);
    if (!kind.has_value()) {
      return InvalidArgumentError(StrCat("unknown recipe ", recipe));
    }
    PrecisionPlan plan =
        BuildPlan(ConfigOf(config, flags_.layers).layers, DefaultRecipe(*kind), 0, {});
    plan.version = model_.plan().version + 1;
    RETURN_IF_ERROR(model_.SetPlan(plan));
    for (int i = 0; i < flags_.warmup; ++i) {
      RETURN_IF_ERROR(Step().status());
    }
    std::vector<double> seconds;
    for (int i = 0; i < flags_.steps; ++i) {
      ASSIGN_OR_RETURN(const double one, Step());
      seconds.push_back(one);
    }
    std::nth_element(seconds.begin(), seconds.begin() + flags_.steps / 2, seconds.end());
    watched_.Watch(true);
    const absl::StatusOr<double> watched = Step();
    watched_.Watch(false);
    RETURN_IF_ERROR(watched.status());
    const double exposed = watched_.exposed_seconds() / *watched;
    const double host = 1 - watched_.waited_seconds() / *watched;
    comm_.Measure(true);
    const absl::StatusOr<double> measured = Step();
    double values[6] = {seconds[static_cast<std::size_t>(flags_.steps / 2)],
                        measured.ok() ? comm_.seconds() / *measured : 0,
                        static_cast<double>(model_.memory().total()) / kGiB,
                        -exposed,
                        host,
                        watched_.bubble_seconds()};
    comm_.Measure(false);
    RETURN_IF_ERROR(measured.status());
    RETURN_IF_ERROR(exchange_.AllReduceHost(values, 6, DType::kF64, ReduceOp::kMax));
    char message[512] = {};
    if (rank_.backend.ops->poll_error(rank_.backend.context, message, sizeof(message)) != 0) {
      return InternalError(message);
    }
    if (rank_.rank != 0) {
      return absl::OkStatus();
    }
    const double speed = static_cast<double>(count_) / values[0];
    const auto beside = [&](const std::string& other, int ranks) {
      const auto it = speeds->find(StrCat(config, " ", other, " ", ranks, " ", overlap));
      char text[32] = "-";
      if (it != speeds->end()) {
        std::snprintf(text, sizeof(text), "%.3f", speed / it->second);
      }
      return std::string(text);
    };
    std::printf(
        "%-6s %5d %-9s %-7s %-14s %12.0f %9.2f %8.1f%% %7.1f%% %6.1f%% %8.0f %8.1f %9.4f %9s %9s\n",
        config.c_str(), rank_.size, rank_.transport.c_str(), overlap.c_str(), recipe.c_str(), speed,
        1e3 * values[0], 100 * values[1], -100 * values[3], 100 * values[4], 1e6 * values[5],
        values[2], loss_, beside(recipe, 1).c_str(), beside("bf16", rank_.size).c_str());
    std::fflush(stdout);
    (*speeds)[StrCat(config, " ", recipe, " ", rank_.size, " ", overlap)] = speed;
    return absl::OkStatus();
  }

 private:
  const Flags& flags_;
  BenchRank& rank_;
  MeasuredCommunicator& comm_;
  WatchedOps& watched_;
  Transformer& model_;
  const std::int32_t* const tokens_;
  const std::int64_t count_;
  Arena arena_, pinned_;
  Exchange exchange_;
  std::int64_t step_ = 0;
  double loss_ = 0;
};

absl::Status BenchConfig(const Flags& flags, const std::string& config, const std::string& overlap,
                         BenchRank& given, Speeds* speeds) {
  const ModelConfig shape = ConfigOf(config, flags.layers);
  const auto self = CreateSelfCommunicator();
  WatchedOps watched(given.backend);
  BenchRank rank = given;
  rank.backend.ops = watched.table();
  MeasuredCommunicator comm(*rank.comm, rank.backend, watched);
  RunConfig run;
  run.overlap = overlap == "on";
  run.dispatch_parts = flags.parts;
  run.reduce_early = flags.reduce_early;
  run.sequence_length = flags.sequence;
  run.microbatch_sequences = flags.sequences;
  run.world_size = run.expert_parallel = rank.size;
  run.rank = rank.rank;
  run.seed = 1;
  const std::int64_t count = run.tokens();
  Arena arena(rank.backend, "tokens");
  auto* tokens = arena.Take<std::int32_t>(kBatches * 2 * count);
  if (tokens == nullptr) {
    return ResourceExhaustedError("no memory for tokens");
  }
  std::vector<std::int32_t> host(static_cast<std::size_t>(kBatches * 2 * count));
  std::mt19937 random(static_cast<std::uint32_t>(7 + rank.rank));
  for (std::int32_t& token : host) {
    token = static_cast<std::int32_t>(random() % static_cast<unsigned>(shape.vocab));
  }
  rank.backend.ops->copy(rank.backend.context, {.dst = tokens,
                                                .src = host.data(),
                                                .bytes = kBatches * 2 * count * 4,
                                                .kind = CopyKind::kToDevice});
  rank.backend.ops->synchronize(rank.backend.context);
  PrecisionPlan plan = BuildPlan(shape.layers, DefaultRecipe(RecipeKind::kBf16), 0, {});
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Transformer> model,
      Transformer::Create(
          {.model = shape,
           .run = run,
           .optimizer = {},
           .backend = rank.backend,
           .comms = {.world = &comm, .expert_parallel = &comm, .expert_data = self.get()},
           .plan = plan}));
  model->InitializeParameters();
  rank.backend.ops->synchronize(rank.backend.context);
  Runner runner(flags, rank, comm, *model, watched, tokens, count);
  for (const std::string& recipe : flags.recipes) {
    RETURN_IF_ERROR(runner.Recipe(config, recipe, overlap, speeds));
  }
  return absl::OkStatus();
}

absl::Status Bench(const Flags& flags) {
  std::printf("%-6s %5s %-9s %-7s %-14s %12s %9s %9s %8s %7s %8s %8s %9s %9s %9s\n", "config",
              "ranks", "transport", "overlap", "recipe", "tokens/s/GPU", "ms/step", "in comm.",
              "exposed", "host", "bubble", "GiB", "loss", "of 1 rank", "x bf16");
  std::fflush(stdout);
  for (const std::string& config : flags.configs) {
    Speeds speeds;  // rank 0 of each run writes, one run after the other
    for (const int ranks : flags.ranks) {
      for (const std::string& overlap : flags.overlap) {
        RETURN_IF_ERROR(RunRanks({.ranks = ranks, .device = flags.device}, [&](BenchRank& rank) {
          return BenchConfig(flags, config, overlap, rank, &speeds);
        }));
      }
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"tokens/s a GPU of expert-parallel training steps"};
  app.add_option("--device", flags.device, "cuda or cpu")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--ranks", flags.ranks, "numbers of ranks, one after the other")->delimiter(',');
  app.add_option("--config", flags.configs, "A, B or tiny")
      ->delimiter(',')
      ->check(CLI::IsMember({"A", "B", "tiny"}));
  app.add_option("--recipe", flags.recipes, "recipes to run")->delimiter(',');
  app.add_option("--overlap", flags.overlap, "on, off or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--parts", flags.parts, "parts of a forward dispatch; 0: as training chooses");
  app.add_option("--reduce-early", flags.reduce_early, "gradients are reduced within backward");
  app.add_option("--layers", flags.layers, "other than the configuration's; 0: its own");
  app.add_option("--sequence", flags.sequence, "tokens per sequence");
  app.add_option("--sequences", flags.sequences, "sequences of a rank per step");
  app.add_option("--steps", flags.steps, "timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warmup", flags.warmup, "steps before them")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Bench(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_train_step_ranks: %s\n", ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace octavo::bench

int main(int argc, char** argv) { return octavo::bench::Main(argc, argv); }
