// Runs a test once for every instruction set of this machine, down to no vectors at all.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hwy/targets.h"

namespace octavo {

// Fixture whose parameter is the one instruction set that the kernels may use. One that they were
// not compiled for falls back to the portable target.
class OnTarget : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(static_cast<int64_t>(GetParam())); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

inline std::vector<std::int64_t> Targets() {
  std::vector<std::int64_t> targets;
  std::int64_t supported = hwy::SupportedTargets();
  while (supported != 0) {
    targets.push_back(supported & -supported);
    supported &= supported - 1;
  }
  return targets;
}

inline std::string TargetName(const testing::TestParamInfo<std::int64_t>& test) {
  return hwy::TargetName(static_cast<int64_t>(test.param));
}

}  // namespace octavo
