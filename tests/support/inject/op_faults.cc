#include "tests/support/inject/op_faults.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <string>

#include "base/check.h"

namespace octavo::op_faults {
namespace {

// Of the one rank of this process, whose one thread calls the operations.
struct State {
  const Ops* real = nullptr;
  std::vector<Fault> faults;
  std::int64_t step = 0;
  int pass = 0;
  bool in_pass = false;
  std::int64_t layer = -1;

  template <class Function>
  void ForEach(std::string_view op, const Function& apply) const {
    for (const Fault& fault : faults) {
      if (in_pass && fault.layer == layer && fault.op == op && fault.IsOn(step, pass)) {
        apply(fault);
      }
    }
  }
};
State state;

float Load(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kF32) {
    return static_cast<const float*>(data)[i];
  }
  return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[i])
                              << 16);
}

// The value is one that BF16 holds: a power of two times a BF16 value, an infinity or a NaN.
void Store(void* data, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
}

void Multiply(const void* data, DType dtype, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) {
    Store(const_cast<void*>(data), dtype, i, Load(data, dtype, i) * factor);
  }
}

float FactorOf(const Fault& fault) { return std::ldexp(1.0F, static_cast<int>(fault.argument)); }

// The first row that is not padding; −1 when no token came.
std::int64_t FirstRow(const RowGroups& groups) {
  for (std::int32_t g = 0; g < groups.count; ++g) {
    if (groups.rows[g] > 0) {
      return groups.begin[g];
    }
  }
  return -1;
}

void RangePush(OpsContext* context, const char* name) {
  const std::string text = name;
  if (text.starts_with("layer ")) {
    state.layer = std::atoll(text.c_str() + 6);
  }
  state.real->range_push(context, name);
}

void AttentionForward(OpsContext* context, const AttentionForwardArgs& args) {
  state.real->attention_forward(context, args);
  const std::int64_t count = args.batch * args.sequence * args.heads * args.head_dim;
  state.ForEach("attn_out", [&](const Fault& fault) {
    if (fault.kind == "scale") {
      Multiply(args.out, args.dtype, count, FactorOf(fault));
    } else if (fault.kind == "inf" || fault.kind == "nan") {
      Store(args.out, args.dtype, 0, fault.value());
    }
  });
}

void AttentionBackward(OpsContext* context, const AttentionBackwardArgs& args) {
  const std::int64_t count = args.batch * args.sequence * args.heads * args.head_dim;
  // attn_out's weight was divided: its dX is too small by that factor, its X still too large.
  state.ForEach("attn_out", [&](const Fault& fault) {
    if (fault.kind == "scale") {
      Multiply(args.out, args.dtype, count, 1 / FactorOf(fault));
      Multiply(args.d_out, args.dtype, count, FactorOf(fault));
    }
  });
  state.real->attention_backward(context, args);
  state.ForEach("attn_qkv", [&](const Fault& fault) {
    if (fault.kind == "inf_grad" || fault.kind == "nan_grad") {
      Store(args.d_qkv, args.dtype, 0, fault.value());
    }
  });
}

void SwigluForward(OpsContext* context, const SwigluForwardArgs& args) {
  const bool experts = args.weight != nullptr;
  float factor = 1;
  state.ForEach("fc2", [&](const Fault& fault) {
    if (experts && fault.kind == "scale") {
      factor *= FactorOf(fault);
    } else if (const std::int64_t row = FirstRow(args.groups);
               experts && row >= 0 && (fault.kind == "inf" || fault.kind == "nan")) {
      Store(const_cast<void*>(args.gate_up), args.dtype, row * 2 * args.f + args.f, fault.value());
    }
  });
  if (factor != 1) {  // the routing weight is a factor of the activation
    Multiply(args.weight, DType::kF32, args.groups.padded_rows, factor);
  }
  state.real->swiglu_forward(context, args);
  if (factor != 1) {
    Multiply(args.weight, DType::kF32, args.groups.padded_rows, 1 / factor);
  }
}

void SwigluBackward(OpsContext* context, const SwigluBackwardArgs& args) {
  const std::int64_t count = args.groups.padded_rows * args.f;
  float factor = 1;
  if (args.weight != nullptr) {
    state.ForEach(
        "fc2", [&](const Fault& fault) { factor *= fault.kind == "scale" ? FactorOf(fault) : 1; });
    state.ForEach("fc1", [&](const Fault& fault) {
      const std::int64_t row = FirstRow(args.groups);
      if (row >= 0 && (fault.kind == "inf_grad" || fault.kind == "nan_grad")) {
        Store(const_cast<void*>(args.d_act), args.dtype, row * args.f, fault.value());
      }
    });
  }
  if (factor != 1) {  // fc2's weight was divided, so its dX is too small
    Multiply(args.d_act, args.dtype, count, factor);
  }
  state.real->swiglu_backward(context, args);
  if (factor != 1) {  // it may be read once more, for the SQNR
    Multiply(args.d_act, args.dtype, count, 1 / factor);
  }
}

}  // namespace

const Ops* Install(const Backend& backend, const std::vector<Fault>& faults) {
  static Ops table;
  OCTAVO_CHECK(state.real == nullptr, "operations have faults already");
  state.real = backend.ops;
  state.faults = faults;
  table = *backend.ops;
  table.range_push = RangePush;
  table.attention_forward = AttentionForward;
  table.attention_backward = AttentionBackward;
  table.swiglu_forward = SwigluForward;
  table.swiglu_backward = SwigluBackward;
  return &table;
}

void BeginPass(std::int64_t step, int pass) {
  state.step = step;
  state.pass = pass;
  state.in_pass = true;
}

void EndPass() { state.in_pass = false; }

}  // namespace octavo::op_faults
