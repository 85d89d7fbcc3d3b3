// Faults in octavo-rank-test, by labels of the job: `inject.NAME: "KIND LAYER OP FROM TO
// ARGUMENT"`.
//
//   scale 1 attn_qkv 20 60 20     steps 20 to 60: input × 2^20, weight × 2^-20: the same function
//                                 (attn_qkv, attn_out, fc1, fc2)
//   inf 1 attn_qkv 20 20 1        an infinite element in the input, in this many passes (1: not in
//                                 the retry); nan: a NaN (attn_qkv, attn_out, fc1, fc2)
//   inf_grad, nan_grad            the same in the gradient of the op's output (attn_qkv, fc1)
//   inf_wgrad, nan_wgrad          the same in the gradient of its weight
//   freeze 1 attn_qkv 20 60 6     the input's delayed window stands still, at 2^-6 of its values
//   starve 1 fc1 20 60 2          no token is routed to expert 2 (needs a balance bias)
//
// A fault goes into a tensor, never into a metric: what Octavo decides comes through its real path.
// Parameters are changed before a pass and back after it, gradients with them, so that the
// optimizer sees the run without the fault; tensors that no parameter makes are reached through the
// operations (op_faults.h). CPU only (masters and gradients are host memory there).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/str.h"
#include "tests/support/inject/fault.h"
#include "tests/support/inject/op_faults.h"
#include "worker/rank/hooks_main.h"

namespace octavo {
namespace {

constexpr std::string_view kKinds[] = {"scale",     "inf",       "nan",    "inf_grad", "nan_grad",
                                       "inf_wgrad", "nan_wgrad", "freeze", "starve"};
constexpr std::string_view kOps[] = {"attn_qkv", "attn_out", "fc1", "fc2"};

template <class List>
bool Holds(const List& list, std::string_view word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

Fault ParseFault(const std::string& text) {
  const std::vector<std::string> words = StrSplit(text, ' ');
  Fault fault;
  bool good = words.size() == 6;
  if (good) {
    fault.kind = words[0];
    fault.op = words[2];
    const std::pair<const std::string*, std::int64_t*> numbers[] = {{&words[1], &fault.layer},
                                                                    {&words[3], &fault.from},
                                                                    {&words[4], &fault.to},
                                                                    {&words[5], &fault.argument}};
    for (const auto& [word, number] : numbers) {
      const auto value = ParseInt64(*word);
      good = good && value.has_value();
      *number = value.value_or(0);
    }
    good = good && Holds(kKinds, fault.kind) && Holds(kOps, fault.op) &&
           (!fault.kind.ends_with("_grad") || fault.op == "attn_qkv" || fault.op == "fc1");
  }
  if (!good) {
    std::fprintf(stderr, "octavo-rank-test: cannot read the fault \"%s\"\n", text.c_str());
    std::exit(2);
  }
  return fault;
}

class Injector {
 public:
  explicit Injector(std::vector<Fault> faults) : faults_(std::move(faults)) {}

  void Before(std::int64_t step, int pass, Transformer& model) {
    op_faults::BeginPass(step, pass);
    for (const Fault& fault : faults_) {
      if (!fault.IsOn(step, pass)) {
        continue;
      }
      if (fault.kind == "scale") {
        AddFactors(model, fault);
      } else if ((fault.kind == "inf" || fault.kind == "nan") && HasGain(fault)) {
        Parameter& gain = Gain(model, fault);
        saved_.emplace_back(gain.master, gain.master[0]);
        gain.master[0] = fault.value();
        model.ParametersLoaded();
      } else if (fault.kind == "freeze" || fault.kind == "starve") {
        Overwrite(model, fault);
      }
    }
    for (const auto& [name, factor] : factors_) {
      Parameter& parameter = model.parameters().At(name);
      for (std::int64_t i = 0; i < parameter.count; ++i) {
        parameter.master[i] *= factor;
      }
    }
    if (!factors_.empty()) {
      model.ParametersLoaded();
    }
  }

  void After(std::int64_t step, int pass, Transformer& model) {
    op_faults::EndPass();
    for (const auto& [address, value] : saved_) {
      *address = value;
    }
    for (const auto& [name, factor] : factors_) {
      Parameter& parameter = model.parameters().At(name);
      for (std::int64_t i = 0; i < parameter.count; ++i) {
        parameter.master[i] /= factor;
        parameter.grad[i] *= factor;  // dL/dw = factor · dL/d(factor · w)
      }
    }
    if (!saved_.empty() || !factors_.empty()) {
      saved_.clear();
      factors_.clear();
      model.ParametersLoaded();
    }
    for (const Fault& fault : faults_) {
      if (fault.kind.ends_with("_wgrad") && fault.IsOn(step, pass)) {
        model.parameters().At(WeightName(model, fault)).grad[0] = fault.value();
      }
    }
  }

  const std::vector<Fault>& faults() const { return faults_; }

 private:
  // Whether a norm makes the op's input.
  static bool HasGain(const Fault& fault) { return fault.op == "attn_qkv" || fault.op == "fc1"; }
  Parameter& Gain(Transformer& model, const Fault& fault) {
    return model.parameters().At(fault.Prefix() +
                                 (fault.op == "attn_qkv" ? "attn_norm.weight" : "mlp_norm.weight"));
  }
  std::string WeightName(Transformer& model, const Fault& fault) {
    if (fault.op == "attn_qkv" || fault.op == "attn_out") {
      return fault.Prefix() + (fault.op == "attn_qkv" ? "attn.qkv.weight" : "attn.out.weight");
    }
    const std::string end = fault.op.ends_with("1") ? "fc1.weight" : "fc2.weight";
    const std::string experts = fault.Prefix() + "experts." + end;
    return model.parameters().Find(experts) != nullptr ? experts : fault.Prefix() + "mlp." + end;
  }

  // Where the norm before the op makes its input, everything else that reads it is divided as well;
  // the inputs of the other ops are multiplied by op_faults.
  void AddFactors(Transformer& model, const Fault& fault) {
    const float factor = std::ldexp(1.0F, static_cast<int>(fault.argument));
    if (HasGain(fault)) {
      factors_[Gain(model, fault).name] = factor;
    }
    std::vector<std::string> readers = {WeightName(model, fault)};
    if (fault.op == "fc1") {
      for (const char* other : {"router.weight", "shared.fc1.weight"}) {
        readers.push_back(fault.Prefix() + other);
      }
    }
    for (const std::string& reader : readers) {
      if (model.parameters().Find(reader) != nullptr) {
        factors_[reader] = 1 / factor;
      }
    }
  }

  void Overwrite(Transformer& model, const Fault& fault) {
    std::vector<StateTensor> state = model.ExportState();
    const std::string window = StrCat("precision.", fault.layer, ".", fault.op, ".input");
    for (StateTensor& tensor : state) {
      if (fault.kind == "starve" && tensor.name == fault.Prefix() + "router.bias") {
        tensor.values[static_cast<std::size_t>(fault.argument)] = -1e6F;
      } else if (fault.kind == "freeze" && tensor.name.starts_with(window)) {
        const auto [frozen, fresh] = frozen_.emplace(tensor.name, tensor.values);
        if (fresh) {  // [quant_scale, age, window…]
          const float factor = std::ldexp(1.0F, static_cast<int>(fault.argument));
          frozen->second[0] *= factor;
          for (std::size_t i = 2; i < frozen->second.size(); ++i) {
            frozen->second[i] /= factor;
          }
        }
        tensor.values = frozen->second;
      }
    }
    if (const absl::Status status = model.ImportState(state); !status.ok()) {
      LogError("inject_failed", {{"error", status}});
    }
  }

  const std::vector<Fault> faults_;
  std::map<std::string, float> factors_;
  std::vector<std::pair<float*, float>> saved_;
  std::map<std::string, std::vector<float>> frozen_;
};

}  // namespace

TrainingHooks HooksOf(const internal::v1::RankAssignment& assignment) {
  std::vector<Fault> faults;
  for (const auto& [key, value] : assignment.spec().labels()) {
    if (key.starts_with("inject.")) {
      faults.push_back(ParseFault(value));
      LogInfo("fault_planned", {{"fault", value}});
    }
  }
  if (faults.empty()) {
    return {};
  }
  const auto injector = std::make_shared<Injector>(std::move(faults));
  return {
      .ops =
          [injector](const Backend& backend) {
            return op_faults::Install(backend, injector->faults());
          },
      .before_pass = [injector](std::int64_t step, int pass,
                                Transformer& model) { injector->Before(step, pass, model); },
      .before_finish_pass = [injector](std::int64_t step, int pass,
                                       Transformer& model) { injector->After(step, pass, model); }};
}

}  // namespace octavo
