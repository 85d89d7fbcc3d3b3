#include "worker/rank/control_vector.h"

#include <cmath>

#include "base/status.h"

namespace octavo {
namespace {

constexpr double kNothing = 9007199254740992.0;  // 2^53: beyond every position

}  // namespace

void ControlVector::SetWishes(const RankWishes& wishes) {
  stop = wishes.stop;
  suspend = wishes.suspend;
  stop_without_checkpoint = wishes.stop_without_checkpoint;
  checkpoint_wish = wishes.checkpoint ? wishes.sequence : 0;
}

void ControlVector::SetPass(const PassResult& pass) {
  grad_norm_squared = pass.grad_norm_squared;
  loss_sum = pass.loss_sum;
  tokens = pass.tokens;
  aux_loss = pass.aux_loss;
  z_loss = pass.z_loss;
  first_nonfinite = pass.first_nonfinite;
}

bool ControlVector::nonfinite() const {
  return first_nonfinite != kNoNonfinite || !std::isfinite(grad_norm_squared) ||
         !std::isfinite(loss_sum) || !std::isfinite(aux_loss) || !std::isfinite(z_loss);
}

PackedControl Pack(const ControlVector& c) {
  return {
      .sums = {c.grad_norm_squared, c.loss_sum, static_cast<double>(c.tokens), c.aux_loss, c.z_loss,
               static_cast<double>(c.nonfinite_elements)},
      .maxima = {
          c.stop ? 1.0 : 0.0, c.suspend ? 1.0 : 0.0, c.stop_without_checkpoint ? 1.0 : 0.0,
          static_cast<double>(c.checkpoint_wish), c.save_busy ? 1.0 : 0.0,
          -static_cast<double>(c.plan_held_min), static_cast<double>(c.plan_held_max),
          c.first_nonfinite == kNoNonfinite ? -kNothing : -static_cast<double>(c.first_nonfinite)}};
}

ControlVector Unpack(const PackedControl& packed) {
  ControlVector c;
  const auto& s = packed.sums;
  c.grad_norm_squared = s[0];
  c.loss_sum = s[1];
  c.tokens = static_cast<std::int64_t>(s[2]);
  c.aux_loss = s[3];
  c.z_loss = s[4];
  c.nonfinite_elements = static_cast<std::int64_t>(s[5]);
  const auto& m = packed.maxima;
  c.stop = m[0] > 0;
  c.suspend = m[1] > 0;
  c.stop_without_checkpoint = m[2] > 0;
  c.checkpoint_wish = static_cast<std::int64_t>(m[3]);
  c.save_busy = m[4] > 0;
  c.plan_held_min = static_cast<std::int64_t>(-m[5]);
  c.plan_held_max = static_cast<std::int64_t>(m[6]);
  c.first_nonfinite = m[7] <= -kNothing ? kNoNonfinite : static_cast<std::int64_t>(-m[7]);
  return c;
}

absl::StatusOr<ControlVector> ReduceControl(const ControlVector& mine, HostCollectives& world) {
  PackedControl packed = Pack(mine);
  RETURN_IF_ERROR(Annotate(world.AllReduce(packed.sums, packed.maxima), "control vector"));
  return Unpack(packed);
}

}  // namespace octavo
