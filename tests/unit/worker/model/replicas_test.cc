// Delayed scaling over data-parallel replicas (NUMERICS 5): one window a tensor, filled with the
// maximum over its replicas, and never with another expert's.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/str.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

TEST(Replicas, AmaxIsTheMaximumOverReplicasAndNeverOverExperts) {
  const ModelConfig model = SmallModel();
  for (const int expert_parallel : {1, 2}) {
    RunConfig run = SmallRun(false);
    run.world_size = 4;
    run.expert_parallel = expert_parallel;
    run.microbatch_sequences = 1;
    run.microbatches = 2;
    std::mutex mu;
    std::map<std::string, std::vector<float>> pushed, local;  // by tensor, one value a rank
    Train(model, run, Uniform(model, RecipeKind::kFp8Delayed), 1, 0.0,
          [&](int, ModelRank& rank, InprocRanks::Comms&) {
            const std::lock_guard lock(mu);
            for (const StateTensor& state : rank.model().ExportState()) {
              ASSERT_EQ(state.values.size(), 3u) << state.name;
              pushed[state.name].push_back(state.values[2]);
            }
            for (std::size_t i = 0; i < rank.model().stat_sites().size(); ++i) {
              const TensorSite& site = rank.model().stat_sites()[i];
              const std::string name =
                  StrCat("precision.", site.site.layer, ".", Name(site.site.op), ".",
                         Name(site.tensor), site.expert < 0 ? "" : StrCat(".", site.expert));
              local[name].push_back(rank.model().stats()[i].amax);
            }
          });
    const std::size_t replicas = 4 / static_cast<std::size_t>(expert_parallel);
    int differing = 0;
    ASSERT_FALSE(pushed.empty());
    for (const auto& [name, values] : pushed) {
      const bool expert =
          name.find(".fc1.") != std::string::npos || name.find(".fc2.") != std::string::npos;
      EXPECT_EQ(values.size(), expert ? replicas : 4u) << name;
      const std::vector<float>& seen = local[name];
      ASSERT_EQ(seen.size(), values.size()) << name;
      const float largest = *std::max_element(seen.begin(), seen.end());
      for (float value : values) {
        EXPECT_EQ(value, largest) << name << ", expert_parallel " << expert_parallel;
      }
      differing += largest != *std::min_element(seen.begin(), seen.end()) ? 1 : 0;
    }
    EXPECT_GT(differing, 10) << "replicas that saw the same prove nothing";
    // Inputs of fc2 leave SwiGLU with values of their own for every expert.
    EXPECT_NE(pushed["precision.0.fc2.input.0"].at(0), pushed["precision.0.fc2.input.1"].at(0));
    EXPECT_NE(pushed["precision.0.fc2.input.2"].at(0), pushed["precision.0.fc2.input.3"].at(0));
  }
}

}  // namespace
}  // namespace octavo::testing
