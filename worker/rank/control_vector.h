// The control vector (NUMERICS 11): one SUM and one MAX all-reduce in FP64 per pass, in which all
// ranks agree on everything that must be the same on all of them.
//
//   ControlVector mine = …;                         // what this rank saw
//   ASSIGN_OR_RETURN(ControlVector all, ReduceControl(mine, collectives));
//
// Sums: gradient norm squared, loss, tokens, auxiliary losses, non-finite elements. Maxima: wishes,
// newest plan held, unfinished save; minima travel as maxima of negatives: oldest "newest plan
// held", first non-finite op. All integers here are below 2^53, so FP64 holds them exactly.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/model/transformer.h"
#include "worker/rank/host_collectives.h"
#include "worker/rank/training_host.h"

namespace octavo {

struct ControlVector {
  // Summed over ranks.
  double grad_norm_squared = 0;
  double loss_sum = 0;
  std::int64_t tokens = 0;
  double aux_loss = 0, z_loss = 0;
  std::int64_t nonfinite_elements = 0;
  // Any rank.
  bool stop = false, suspend = false, stop_without_checkpoint = false;
  std::int64_t checkpoint_wish = 0;  // newest sequence at which a checkpoint was asked for
  bool save_busy = false;            // a shard is still being written
  // Extremes over ranks of the newest plan version each holds.
  std::int64_t plan_held_min = 0, plan_held_max = 0;
  // Smallest position of a non-finite op; kNoNonfinite: none.
  std::int64_t first_nonfinite = kNoNonfinite;

  void SetWishes(const RankWishes& wishes);
  void SetPass(const PassResult& pass);
  void SetPlanHeld(std::int64_t version) { plan_held_min = plan_held_max = version; }
  bool leaving() const { return stop || suspend || stop_without_checkpoint; }
  // A non-finite value anywhere in the pass.
  bool nonfinite() const;
};

inline constexpr std::size_t kControlSums = 6;
inline constexpr std::size_t kControlMaxima = 8;

struct PackedControl {
  std::array<double, kControlSums> sums;
  std::array<double, kControlMaxima> maxima;
};
PackedControl Pack(const ControlVector& control);
ControlVector Unpack(const PackedControl& packed);

// The values over all ranks, the same on every rank. Errors: the collective failed.
absl::StatusOr<ControlVector> ReduceControl(const ControlVector& mine, HostCollectives& world);

}  // namespace octavo
