#include "worker/rank/state_io.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/status.h"
#include "base/str.h"
#include "kernels/formats/bf16.h"

namespace octavo {
namespace {

constexpr char kStatePrefix[] = "state/";
constexpr char kExpertStatePrefix[] = "state/expert/";

struct StoredBuffer {
  const char* suffix;
  char* data;  // device, of the whole local parameter
  DType dtype;
};

std::vector<StoredBuffer> BuffersOf(const Parameter& p, DType moments) {
  return {{"/master", reinterpret_cast<char*>(p.master), DType::kF32},
          {"/m", static_cast<char*>(p.m), moments},
          {"/v", static_cast<char*>(p.v), moments}};
}

// Moments saved in the other type: BF16 widens exactly; FP32 rounds, as AdamW does when it stores.
std::vector<char> ConvertMoments(const std::vector<char>& in, DType from) {
  const std::size_t count = in.size() / static_cast<std::size_t>(DTypeBytes(from));
  std::vector<char> out(count * (from == DType::kF32 ? 2 : 4));
  for (std::size_t i = 0; i < count; ++i) {
    if (from == DType::kF32) {
      float value;
      std::memcpy(&value, &in[i * 4], 4);
      const std::uint16_t bits = Bf16FromFloat(value);
      std::memcpy(&out[i * 2], &bits, 2);
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, &in[i * 2], 2);
      const float value = FloatFromBf16(bits);
      std::memcpy(&out[i * 4], &value, 4);
    }
  }
  return out;
}

}  // namespace

std::vector<OwnedTensor> CopyOwnedState(Transformer& model, const Backend& backend,
                                        const ShardLayout& layout,
                                        std::vector<OwnedTensor> buffers) {
  Parameters& parameters = model.parameters();
  std::vector<OwnedTensor> out;
  // The order of the pieces does not change during an attempt, so buffer i fits tensor i.
  const auto take = [&out, &buffers](OwnedTensor t) -> OwnedTensor& {
    if (out.size() < buffers.size()) {
      t.bytes = std::move(buffers[out.size()].bytes);
    }
    return out.emplace_back(std::move(t));
  };
  for (const ShardPiece& piece : HeldPieces(parameters.all(), layout)) {
    if (piece.owner != layout.rank) {
      continue;
    }
    const Parameter& p = parameters.all()[static_cast<std::size_t>(piece.parameter)];
    for (const StoredBuffer& buffer : BuffersOf(p, parameters.moment_dtype())) {
      const std::int64_t width = DTypeBytes(buffer.dtype);
      OwnedTensor& t =
          take({.name = piece.base + buffer.suffix, .dtype = buffer.dtype, .shape = piece.shape});
      t.bytes.resize(static_cast<std::size_t>(piece.count * width));
      backend.ops->copy(backend.context, {.dst = t.bytes.data(),
                                          .src = buffer.data + piece.local_first * width,
                                          .bytes = piece.count * width,
                                          .kind = CopyKind::kToHost});
    }
  }
  backend.ops->synchronize(backend.context);
  for (const StateTensor& state : model.ExportState()) {
    if (!StoresState(state.expert, layout)) {
      continue;
    }
    OwnedTensor& t = take({.name = (state.expert ? kExpertStatePrefix : kStatePrefix) + state.name,
                           .shape = {static_cast<std::int64_t>(state.values.size())}});
    t.bytes.resize(state.values.size() * sizeof(float));
    std::memcpy(t.bytes.data(), state.values.data(), t.bytes.size());
  }
  return out;
}

absl::Status LoadWeights(const CheckpointReader& reader, Transformer& model, const Backend& backend,
                         const ShardLayout& layout, const std::function<bool()>& interrupted) {
  Parameters& parameters = model.parameters();
  std::vector<float> values;
  for (const ShardPiece& piece : HeldPieces(parameters.all(), layout)) {
    if (interrupted()) {
      return CancelledError("loading was interrupted by a wish to stop");
    }
    const Parameter& p = parameters.all()[static_cast<std::size_t>(piece.parameter)];
    values.resize(static_cast<std::size_t>(piece.count));
    RETURN_IF_ERROR(reader.Read(piece.base + "/master", DType::kF32,
                                {reinterpret_cast<char*>(values.data()), values.size() * 4}));
    backend.ops->copy(backend.context, {.dst = p.master + piece.local_first,
                                        .src = values.data(),
                                        .bytes = piece.count * 4,
                                        .kind = CopyKind::kToDevice});
    backend.ops->synchronize(backend.context);  // `values` is used again
  }
  std::vector<StateTensor> biases;
  for (const std::string& name : reader.names()) {
    if (!StartsWith(name, kStatePrefix) || !EndsWith(name, ".router.bias")) {
      continue;
    }
    StateTensor t{.name = name.substr(std::strlen(kStatePrefix))};
    t.values.resize(static_cast<std::size_t>(reader.Find(name)->bytes) / sizeof(float));
    RETURN_IF_ERROR(
        reader.Read(name, DType::kF32,
                    {reinterpret_cast<char*>(t.values.data()), t.values.size() * sizeof(float)}));
    biases.push_back(std::move(t));
  }
  RETURN_IF_ERROR(Annotate(model.ImportState(biases), StrCat("checkpoint ", reader.path())));
  model.ParametersLoaded();
  return absl::OkStatus();
}

absl::Status LoadState(const CheckpointReader& reader, Transformer& model, const Backend& backend,
                       const ShardLayout& layout, const std::function<bool()>& interrupted) {
  Parameters& parameters = model.parameters();
  std::vector<char> bytes;
  for (const ShardPiece& piece : HeldPieces(parameters.all(), layout)) {
    if (interrupted()) {
      return CancelledError("loading was interrupted by a wish to stop");
    }
    const Parameter& p = parameters.all()[static_cast<std::size_t>(piece.parameter)];
    for (const StoredBuffer& buffer : BuffersOf(p, parameters.moment_dtype())) {
      const std::string name = piece.base + buffer.suffix;
      const SafetensorsEntry* entry = reader.Find(name);
      const bool is_master =
          buffer.dtype == DType::kF32 && std::strcmp(buffer.suffix, "/master") == 0;
      const DType stored = entry != nullptr && !is_master ? entry->dtype : buffer.dtype;
      bytes.resize(static_cast<std::size_t>(piece.count * DTypeBytes(stored)));
      RETURN_IF_ERROR(reader.Read(name, stored, bytes));
      if (stored != buffer.dtype) {
        bytes = ConvertMoments(bytes, stored);
      }
      backend.ops->copy(backend.context,
                        {.dst = buffer.data + piece.local_first * DTypeBytes(buffer.dtype),
                         .src = bytes.data(),
                         .bytes = static_cast<std::int64_t>(bytes.size()),
                         .kind = CopyKind::kToDevice});
      backend.ops->synchronize(backend.context);  // `bytes` is used again
    }
  }
  std::vector<StateTensor> state;
  for (const std::string& name : reader.names()) {
    if (!StartsWith(name, kStatePrefix)) {
      continue;
    }
    const bool expert = StartsWith(name, kExpertStatePrefix);
    StateTensor t{.name = name.substr(std::strlen(expert ? kExpertStatePrefix : kStatePrefix)),
                  .expert = expert};
    const SafetensorsEntry* entry = reader.Find(name);
    t.values.resize(static_cast<std::size_t>(entry->bytes) / sizeof(float));
    RETURN_IF_ERROR(
        reader.Read(name, DType::kF32,
                    {reinterpret_cast<char*>(t.values.data()), t.values.size() * sizeof(float)}));
    state.push_back(std::move(t));
  }
  RETURN_IF_ERROR(Annotate(model.ImportState(state), StrCat("checkpoint ", reader.path())));
  model.ParametersLoaded();
  return absl::OkStatus();
}

}  // namespace octavo
