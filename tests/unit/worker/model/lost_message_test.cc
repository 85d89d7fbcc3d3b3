// A message that was aborted ends like one that arrived: only the communicator knows. Nothing that
// was computed from it may be believed.
#include <utility>

#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

// From its nth all-to-all on, calls end at once, move nothing and report success, as operations of
// a communicator that only enqueues do when they are aborted; Check tells.
class AbortedComm final : public Communicator {
 public:
  AbortedComm(Communicator* inner, int aborted_from) : inner_(inner), aborted_from_(aborted_from) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool device_pointers() const override { return inner_->device_pointers(); }
  CommResult AllToAllV(const AllToAllVArgs& args) override {
    ++all_to_alls_;
    return aborted() ? CommResult{} : inner_->AllToAllV(args);
  }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    return aborted() ? CommResult{} : inner_->AllReduce(data, count, dtype, op);
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    return aborted() ? CommResult{} : inner_->AllGather(send, receive, bytes);
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    return inner_->Broadcast(data, bytes, root);
  }
  CommResult Barrier() override { return inner_->Barrier(); }
  void Abort() override { inner_->Abort(); }
  CommResult Check() override {
    return aborted() ? CommResult{CommResult::Code::kTimeout, "all_to_all_v did not complete"}
                     : inner_->Check();
  }

  int all_to_alls() const { return all_to_alls_; }

 private:
  bool aborted() const { return aborted_from_ > 0 && all_to_alls_ >= aborted_from_; }

  Communicator* const inner_;
  const int aborted_from_;
  int all_to_alls_ = 0;
};

// One pass of four ranks in expert-parallel groups of two, whose gradients other groups share.
// aborted_from 0: never. Calls per rank, and what became of the pass and of an evaluation.
struct PassEnd {
  int all_to_alls = 0;
  absl::Status pass, evaluation;
};
std::vector<PassEnd> RunPass(int aborted_from) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.world_size = 4;
  run.expert_parallel = 2;
  InprocRanks ranks = InprocRanks::Make(run.world_size, run.expert_parallel);
  std::vector<PassEnd> ends(4);
  InprocRanks::Run(run.world_size, [&](int r) {
    RunConfig mine = run;
    mine.rank = r;
    InprocRanks::Comms& comms = ranks.ranks[static_cast<std::size_t>(r)];
    Backend backend = CreateCpuBackend();
    AbortedComm expert_parallel(comms.expert_parallel.get(), aborted_from);
    {
      auto made = Transformer::Create({.model = model,
                                       .run = mine,
                                       .optimizer = {},
                                       .backend = backend,
                                       .comms = {.world = comms.world.get(),
                                                 .expert_parallel = &expert_parallel,
                                                 .expert_data = comms.expert_data.get()},
                                       .plan = Uniform(model, RecipeKind::kBf16)});
      ASSERT_TRUE(made.ok()) << ToString(made.status());
      Transformer& transformer = **made;
      transformer.InitializeParameters();
      std::vector<std::int32_t> input, target;
      for (std::int32_t s = 0; s < run.microbatch_sequences; ++s) {
        const auto sequence =
            Sequence(model.vocab, run.sequence_length, 0, r * run.microbatch_sequences + s);
        input.insert(input.end(), sequence.begin(), sequence.end() - 1);
        target.insert(target.end(), sequence.begin() + 1, sequence.end());
      }
      transformer.BeginStep({.target_tokens = run.tokens() * run.world_size});
      PassEnd& end = ends[static_cast<std::size_t>(r)];
      end.pass = transformer.ForwardBackward(input.data(), target.data());
      end.all_to_alls = expert_parallel.all_to_alls();
      if (end.pass.ok()) {
        end.pass = transformer.FinishPass().status();
      }
      double loss = 0;
      end.evaluation = transformer.Evaluate(input.data(), target.data(), &loss);
    }
    DestroyCpuBackend(&backend);
  });
  return ends;
}

TEST(LostMessage, TheLastOneOfAPassFailsThePassBeforeTheOptimizer) {
  const std::vector<PassEnd> whole = RunPass(0);
  for (const PassEnd& end : whole) {
    ASSERT_TRUE(end.pass.ok()) << ToString(end.pass);
    ASSERT_TRUE(end.evaluation.ok()) << ToString(end.evaluation);
  }
  const int last = whole[0].all_to_alls;
  ASSERT_GT(last, 0);
  for (const PassEnd& end : RunPass(last)) {
    EXPECT_EQ(end.pass.code(), absl::StatusCode::kDeadlineExceeded) << ToString(end.pass);
    EXPECT_NE(ToString(end.pass).find("messages between experts"), std::string::npos)
        << ToString(end.pass);
    EXPECT_FALSE(end.evaluation.ok());
  }
}

TEST(LostMessage, TheLastOneOfAnEvaluationFailsIt) {
  const int of_pass = RunPass(0)[0].all_to_alls;
  // A forward pass sends half of what a whole pass does.
  for (const PassEnd& end : RunPass(of_pass + of_pass / 2)) {
    EXPECT_TRUE(end.pass.ok()) << ToString(end.pass);
    EXPECT_EQ(end.evaluation.code(), absl::StatusCode::kDeadlineExceeded)
        << ToString(end.evaluation);
  }
}

}  // namespace
}  // namespace octavo::testing
