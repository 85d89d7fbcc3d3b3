// Builds histories for policy tests: healthy tensors by default, with one thing wrong on request.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "controller/policy/fallback.h"

namespace octavo {

inline TensorHealth HealthyTensor(OpSite site, Tensor tensor) {
  TensorHealth t;
  t.site = site;
  t.tensor = tensor;
  t.amax = 3.0f;
  t.dequant_scale_min = 0.002f;
  t.dequant_scale_max = 0.01f;
  t.elements = t.nonzero = 1000000;
  t.signal_energy = 1e6;
  t.noise_energy = 1e6 / 1412.5;  // 31.5 dB: Gaussian data in E4M3
  return t;
}

// A job of `layers` layers in `recipe`, driven snapshot by snapshot. Ranks apply plans at once.
struct PolicyRun {
  PolicyConfig config;
  PolicyState state;
  PrecisionPlan plan;
  std::int64_t step = 0;
  std::int64_t interval = 10;
  std::vector<PolicyDecision> decisions;
  std::vector<std::string> alerts;
  // Spoils a tensor before the policy sees it (executed ones and shadows alike).
  std::function<void(TensorHealth&)> spoil = [](TensorHealth&) {};

  PolicyRun(std::int32_t layers, RecipeKind kind) {
    plan = BuildPlan(layers, DefaultRecipe(kind), 0, {});
    PolicyOnStart(config, state, 0);
  }

  void Take(PolicyOutput out) {
    for (PolicyDecision& d : out.decisions) {
      decisions.push_back(d);
    }
    for (std::string& a : out.alerts) {
      alerts.push_back(a);
    }
    if (out.changed) {
      plan = out.plan;
      PolicyOnApplied(config, state, plan.version, step);
    }
  }

  HealthSnapshot Snapshot() {
    HealthSnapshot s;
    s.first_step = step + 1;
    s.last_step = step + interval;
    s.plan_version = plan.version;
    for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
      for (Op op : {Op::kAttnQkv, Op::kAttnOut, Op::kFc1, Op::kFc2}) {
        const OpSite site{layer, op};
        const Recipe& recipe = plan.Resolve(layer, op);
        for (Tensor tensor : {Tensor::kInput, Tensor::kWeight, Tensor::kGrad}) {
          if (recipe.is_fp8()) {
            s.tensors.push_back(HealthyTensor(site, tensor));
            spoil(s.tensors.back());
          }
          const auto shadows = plan.shadows.find(site);
          if (shadows == plan.shadows.end()) {
            continue;
          }
          for (const Recipe& shadow : shadows->second) {
            s.tensors.push_back(HealthyTensor(site, tensor));
            s.tensors.back().shadow = true;
            s.tensors.back().shadow_recipe = shadow.kind;
            spoil(s.tensors.back());
          }
        }
      }
    }
    return s;
  }

  void Run(int snapshots) {
    for (int i = 0; i < snapshots; ++i) {
      const HealthSnapshot s = Snapshot();
      step += interval;
      Take(PolicyOnSnapshot(config, state, plan, s));
    }
  }
};

}  // namespace octavo
