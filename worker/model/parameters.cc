#include "worker/model/parameters.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr std::int64_t kParameterAlign = 64;  // elements; flat offsets of every parameter

// One entry of the model's list before it is placed.
struct Entry {
  std::string name;
  std::vector<std::int64_t> shape;
  ParameterRegion region = ParameterRegion::kDense;
  float init_std = 0;
  bool decay = true;
  bool copy = true;
};

// Every parameter of the model in execution order.
std::vector<Entry> ListParameters(const ModelConfig& m) {
  std::vector<Entry> list;
  const float std_in = m.init_std;
  // Projections that write into the residual stream: their sum over layers keeps unit growth.
  const float std_out = m.init_std / std::sqrt(2.0f * static_cast<float>(m.layers));
  const auto norm = [&list](std::string name, std::int64_t n) {
    list.push_back({.name = std::move(name), .shape = {n}, .decay = false, .copy = false});
  };
  const auto matrix = [&list](std::string name, std::vector<std::int64_t> shape, float std) {
    list.push_back({.name = std::move(name), .shape = std::move(shape), .init_std = std});
  };
  matrix("embedding.weight", {m.vocab, m.hidden}, std_in);
  list.back().copy = m.tied_embeddings;
  for (std::int32_t l = 0; l < m.layers; ++l) {
    const std::string prefix = StrCat("layers.", l, ".");
    norm(prefix + "attn_norm.weight", m.hidden);
    matrix(prefix + "attn.qkv.weight", {m.qkv_width(), m.hidden}, std_in);
    if (m.qk_norm) {
      norm(prefix + "attn.q_norm.weight", m.head_dim);
      norm(prefix + "attn.k_norm.weight", m.head_dim);
    }
    matrix(prefix + "attn.out.weight", {m.hidden, static_cast<std::int64_t>(m.heads) * m.head_dim},
           std_out);
    norm(prefix + "mlp_norm.weight", m.hidden);
    const auto mlp = [&](const std::string& part, std::int64_t ffn) {
      matrix(prefix + part + ".fc1.weight", {2 * ffn, m.hidden}, std_in);
      matrix(prefix + part + ".fc2.weight", {m.hidden, ffn}, std_out);
    };
    if (m.is_dense(l)) {
      mlp("mlp", m.dense_hidden);
      continue;
    }
    matrix(prefix + "router.weight", {m.experts, m.hidden}, std_in);
    list.back().copy = false;
    matrix(prefix + "experts.fc1.weight", {m.experts, 2 * m.expert_hidden, m.hidden}, std_in);
    list.back().region = ParameterRegion::kExpert;
    matrix(prefix + "experts.fc2.weight", {m.experts, m.hidden, m.expert_hidden}, std_out);
    list.back().region = ParameterRegion::kExpert;
    if (m.shared_experts > 0) {
      mlp("shared", m.shared_experts * m.shared_expert_hidden);
    }
  }
  norm("final_norm.weight", m.hidden);
  if (!m.tied_embeddings) {
    matrix("lm_head.weight", {m.vocab, m.hidden}, std_in);
  }
  return list;
}

std::uint64_t Mix(std::uint64_t x) {  // SplitMix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t HashName(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash;
}

// Two independent normals for elements 2·pair and 2·pair + 1 (Box and Muller).
void NormalPair(std::uint64_t stream, std::uint64_t pair, float out[2]) {
  const std::uint64_t a = Mix(stream + 0x9e3779b97f4a7c15u * (2 * pair + 1));
  const std::uint64_t b = Mix(stream + 0x9e3779b97f4a7c15u * (2 * pair + 2));
  const double u = (static_cast<double>(a >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
  const double v = static_cast<double>(b >> 11) * 0x1p-53;
  const double radius = std::sqrt(-2.0 * std::log(u));
  out[0] = static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * v));
  out[1] = static_cast<float>(radius * std::sin(2.0 * std::numbers::pi * v));
}

std::uint64_t Stream(std::uint64_t seed, std::string_view name) {
  return Mix(Mix(seed + 0x632be59bd9b4e019u) ^ HashName(name));
}

// Values of the elements [begin, end) of the local shard.
void FillNormalPart(std::uint64_t stream, const Parameter& parameter, std::int64_t begin,
                    std::int64_t end, float* values) {
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t index = parameter.first + i;
    float pair[2];
    NormalPair(stream, static_cast<std::uint64_t>(index) / 2, pair);
    for (std::int64_t j = index % 2; j < 2 && i < end; ++j, ++i) {
      values[i] = pair[j] * parameter.init_std;
    }
  }
}

// Billions of normals take a minute on one core; an element depends on nothing but its index, so
// parts of a large parameter are filled side by side.
void FillNormal(std::uint64_t seed, const Parameter& parameter, float* values) {
  constexpr std::int64_t kPartMin = 4 << 20;
  const std::int64_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  const std::int64_t parts = std::clamp(parameter.count / kPartMin, std::int64_t{1}, cores);
  const std::uint64_t stream = Stream(seed, parameter.name);
  const std::int64_t size = CeilDiv(parameter.count, parts);
  std::vector<std::jthread> fillers;
  for (std::int64_t begin = size; begin < parameter.count; begin += size) {
    fillers.emplace_back([&parameter, stream, begin, size, values] {
      FillNormalPart(stream, parameter, begin, std::min(begin + size, parameter.count), values);
    });
  }
  FillNormalPart(stream, parameter, 0, std::min(size, parameter.count), values);
}

}  // namespace

float InitialNormal(std::uint64_t seed, std::string_view name, std::int64_t index) {
  float pair[2];
  NormalPair(Stream(seed, name), static_cast<std::uint64_t>(index) / 2, pair);
  return pair[index % 2];
}

ParameterCounts CountParameters(const ModelConfig& model) {
  ParameterCounts counts;
  for (const Entry& entry : ListParameters(model)) {
    std::int64_t n = 1;
    for (std::int64_t d : entry.shape) {
      n *= d;
    }
    counts.total += n;
    counts.active +=
        entry.region == ParameterRegion::kExpert ? n / model.experts * model.experts_per_token : n;
  }
  return counts;
}

absl::StatusOr<Parameters> Parameters::Create(const ModelConfig& model, const RunConfig& run,
                                              DType moment_dtype, const Backend& backend,
                                              Arena& arena) {
  Parameters p;
  p.backend_ = backend;
  p.moment_dtype_ = moment_dtype;
  const std::int64_t experts_per_rank = model.experts / std::max(run.expert_parallel, 1);
  const std::int64_t expert_first =
      experts_per_rank * (run.rank % std::max(run.expert_parallel, 1));
  std::vector<bool> wants_copy;
  std::int64_t offset = 0;
  for (ParameterRegion region : {ParameterRegion::kDense, ParameterRegion::kExpert}) {
    for (const Entry& entry : ListParameters(model)) {
      if (entry.region != region) {
        continue;
      }
      Parameter parameter{.name = entry.name,
                          .shape = entry.shape,
                          .region = region,
                          .init_std = entry.init_std,
                          .decay = entry.decay};
      parameter.count = parameter.full_elements();
      if (region == ParameterRegion::kExpert) {
        const std::int64_t one = parameter.count / model.experts;
        parameter.first = one * expert_first;
        parameter.count = one * experts_per_rank;
      }
      parameter.offset = offset;
      offset += RoundUp(parameter.count, kParameterAlign);
      p.all_.push_back(std::move(parameter));
      wants_copy.push_back(entry.copy && !run.fp32);
    }
    (region == ParameterRegion::kDense ? p.dense_elements_ : p.expert_elements_) =
        offset - (region == ParameterRegion::kDense ? 0 : p.dense_elements_);
  }
  const std::int64_t moment_bytes = DTypeBytes(moment_dtype);
  p.master_ = arena.Take<float>(offset);
  p.grad_ = arena.Take<float>(offset);
  p.m_ = arena.TakeBytes(offset * moment_bytes);
  p.v_ = arena.TakeBytes(offset * moment_bytes);
  auto* copy = run.fp32 ? nullptr : arena.Take<std::uint16_t>(offset);
  if (arena.failed()) {
    return ResourceExhaustedError(StrCat(
        "parameters need ", HumanBytes(static_cast<double>(offset * (8 + 2 * moment_bytes + 2))),
        " on this rank; the device refused ",
        HumanBytes(static_cast<double>(arena.failed_bytes()))));
  }
  for (std::size_t i = 0; i < p.all_.size(); ++i) {
    Parameter& parameter = p.all_[i];
    parameter.master = p.master_ + parameter.offset;
    parameter.grad = p.grad_ + parameter.offset;
    parameter.m = static_cast<std::uint8_t*>(p.m_) + parameter.offset * moment_bytes;
    parameter.v = static_cast<std::uint8_t*>(p.v_) + parameter.offset * moment_bytes;
    parameter.copy = wants_copy[i] ? copy + parameter.offset : nullptr;
    parameter.state.elements = parameter.count;
    if (parameter.region == ParameterRegion::kExpert) {
      parameter.state.unwritten.assign(static_cast<std::size_t>(parameter.expert_count()), 1);
    }
  }
  backend.ops->zero(backend.context, p.grad_, offset * static_cast<std::int64_t>(sizeof(float)));
  return p;
}

Parameter* Parameters::Find(std::string_view name) {
  for (Parameter& parameter : all_) {
    if (parameter.name == name) {
      return &parameter;
    }
  }
  return nullptr;
}

Parameter& Parameters::At(std::string_view name) {
  Parameter* found = Find(name);
  OCTAVO_CHECK(found != nullptr, "no parameter %s", std::string(name).c_str());
  return *found;
}

void Parameters::Initialize(std::uint64_t seed) {
  std::vector<float> values;
  for (Parameter& parameter : all_) {
    values.assign(static_cast<std::size_t>(parameter.count), 1.0f);
    if (parameter.init_std > 0) {
      FillNormal(seed, parameter, values.data());
    }
    backend_.ops->copy(backend_.context,
                       {.dst = parameter.master,
                        .src = values.data(),
                        .bytes = parameter.count * static_cast<std::int64_t>(sizeof(float)),
                        .kind = CopyKind::kToDevice});
    backend_.ops->synchronize(backend_.context);  // `values` is reused
  }
  const std::int64_t moments = total_elements() * DTypeBytes(moment_dtype_);
  backend_.ops->zero(backend_.context, m_, moments);
  backend_.ops->zero(backend_.context, v_, moments);
  MastersChanged();
}

void Parameters::MastersChanged() {
  for (Parameter& parameter : all_) {
    parameter.state.copy_stale = true;
  }
}

void Parameters::BeginGradients() {
  backend_.ops->zero(backend_.context, dense_grad(),
                     dense_elements_ * static_cast<std::int64_t>(sizeof(float)));
  for (Parameter& parameter : all_) {
    std::fill(parameter.state.unwritten.begin(), parameter.state.unwritten.end(), std::uint8_t{1});
  }
}

void Parameters::FinishGradients() {
  for (Parameter& parameter : all_) {
    WeightState& state = parameter.state;
    const auto groups = static_cast<std::int32_t>(state.unwritten.size());
    for (std::int32_t g = 0; g < groups; ++g) {
      if (state.Unwritten(g)) {
        const std::int64_t one = parameter.count / groups;
        backend_.ops->zero(backend_.context, parameter.grad + g * one,
                           one * static_cast<std::int64_t>(sizeof(float)));
      }
    }
    state.MarkWritten(0, groups);
  }
}

}  // namespace octavo
