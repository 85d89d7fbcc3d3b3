// A named part of a step, for profilers: NVTX on the GPU, places of `octavo profile` everywhere.
#pragma once

#include "kernels/ops.h"

namespace octavo {

// The name outlives the range (a literal).
class OpsRange {
 public:
  OpsRange(const Backend& backend, const char* name) : backend_(backend) {
    backend_.ops->range_push(backend_.context, name);
  }
  ~OpsRange() { backend_.ops->range_pop(backend_.context); }
  OpsRange(const OpsRange&) = delete;
  OpsRange& operator=(const OpsRange&) = delete;

 private:
  const Backend backend_;
};

}  // namespace octavo
