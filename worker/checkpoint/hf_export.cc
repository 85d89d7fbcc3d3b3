#include "worker/checkpoint/hf_export.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"
#include "worker/checkpoint/hf_names.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

constexpr char kIndexFile[] = "model.safetensors.index.json";

std::string ShardName(std::int64_t index, std::int64_t count) {
  char text[64];
  std::snprintf(text, sizeof(text), "model-%05lld-of-%05lld.safetensors",
                static_cast<long long>(index + 1), static_cast<long long>(count));
  return text;
}

// One tensor of a file: a weight, or the scales of the quantised weight that stands before it.
struct OutTensor {
  HostTensor shape;  // without data
  const HfTensor* weight = nullptr;
  bool scales = false;
};

std::vector<OutTensor> PlanFile(const std::vector<HfTensor>& names, HfFormat format) {
  std::vector<OutTensor> out;
  for (const HfTensor& t : names) {
    const bool fp8 = format == HfFormat::kFp8 && t.quantised;
    out.push_back(
        {.shape = {.name = t.name, .dtype = fp8 ? DType::kE4M3 : DType::kBF16, .shape = t.shape},
         .weight = &t});
    if (fp8) {
      out.push_back({.shape = {.name = HfScaleName(t.name),
                               .dtype = DType::kF32,
                               .shape = {CeilDiv(t.rows(), kTile), CeilDiv(t.cols(), kTile)}},
                     .weight = &t,
                     .scales = true});
    }
  }
  return out;
}

// Reads masters by rows and makes the bytes of one output tensor after the other.
class Converter {
 public:
  explicit Converter(const CheckpointReader& reader) : reader_(reader) {}

  absl::StatusOr<std::span<const char>> Bytes(const OutTensor& out) {
    if (out.scales) {  // asked for right after the codes
      return View(matrix_.dequant_scale);
    }
    const HfTensor& t = *out.weight;
    RETURN_IF_ERROR(Load(t.stored));
    const auto first = static_cast<std::size_t>(t.first_row * t.cols());
    const auto count = static_cast<std::size_t>(t.rows() * t.cols());
    if (first + count > master_.size()) {
      return DataLossError(StrCat("checkpoint ", reader_.path(), ": ", t.stored, " holds ",
                                  master_.size(), " elements; ", t.name, " needs ", first + count));
    }
    const std::span<const float> rows(master_.data() + first, count);
    const auto bad =
        std::find_if(rows.begin(), rows.end(), [](float v) { return !std::isfinite(v); });
    if (bad != rows.end()) {
      return DataLossError(StrCat("checkpoint ", reader_.path(), ": ", t.stored, " holds ", *bad,
                                  "; only finite weights can be exported"));
    }
    if (out.shape.dtype == DType::kE4M3) {
      matrix_ = QuantizeHfMatrix(rows, t.rows(), t.cols());
      return View(matrix_.codes);
    }
    bf16_.resize(count);
    std::transform(rows.begin(), rows.end(), bf16_.begin(),
                   [](float value) { return Bf16FromFloat(value); });
    return View(bf16_);
  }

 private:
  template <class T>
  static std::span<const char> View(const std::vector<T>& v) {
    return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)};
  }
  // q, k and v are rows of one master, asked for one after the other.
  absl::Status Load(const std::string& stored) {
    if (stored == loaded_) {
      return absl::OkStatus();
    }
    const SafetensorsEntry* entry = reader_.Find(stored + "/master");
    if (entry == nullptr) {
      return DataLossError(
          StrCat("checkpoint ", reader_.path(), ": tensor ", stored, "/master is missing"));
    }
    loaded_.clear();
    master_.resize(static_cast<std::size_t>(entry->bytes) / sizeof(float));
    RETURN_IF_ERROR(
        reader_.Read(stored + "/master", DType::kF32,
                     {reinterpret_cast<char*>(master_.data()), master_.size() * sizeof(float)}));
    loaded_ = stored;
    return absl::OkStatus();
  }

  const CheckpointReader& reader_;
  std::string loaded_;
  std::vector<float> master_;
  std::vector<std::uint16_t> bf16_;
  Fp8Matrix matrix_;
};

// Tensors [begin, end) of each shard; a weight and its scales stay together.
struct Shard {
  std::size_t begin, end;
};
std::vector<Shard> CutShards(const std::vector<OutTensor>& all, std::int64_t shard_bytes) {
  std::vector<Shard> shards;
  std::int64_t bytes = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    bytes += all[i].shape.bytes();
    const bool scales_follow = i + 1 < all.size() && all[i + 1].scales;
    if (i + 1 == all.size() || (bytes >= shard_bytes && !scales_follow)) {
      shards.push_back({.begin = begin, .end = i + 1});
      begin = i + 1;
      bytes = 0;
    }
  }
  return shards;
}

absl::Status WriteFolder(FileSystem& fs, const CheckpointReader& reader,
                         const HfExportOptions& options, const std::string& folder,
                         HfExportSummary* summary) {
  const ModelConfig& model = reader.manifest().model;
  const std::vector<HfTensor> names = HfTensors(model);
  const std::vector<OutTensor> all = PlanFile(names, options.format);
  const std::vector<Shard> shards = CutShards(all, options.shard_bytes);
  std::int64_t total = 0;
  for (const OutTensor& t : all) {
    total += t.shape.bytes();
  }

  nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}},
                                  {"weight_map", nlohmann::ordered_json::object()}};
  Converter converter(reader);
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const Shard& shard = shards[s];
    const std::string file =
        ShardName(static_cast<std::int64_t>(s), static_cast<std::int64_t>(shards.size()));
    std::vector<HostTensor> shapes;
    for (std::size_t i = shard.begin; i < shard.end; ++i) {
      shapes.push_back(all[i].shape);
      index["weight_map"][all[i].shape.name] = file;
    }
    const auto source = [&](std::size_t i) -> absl::StatusOr<std::span<const char>> {
      const OutTensor& t = all[shard.begin + i];
      ASSIGN_OR_RETURN(const std::span<const char> bytes, converter.Bytes(t));
      summary->bytes += static_cast<std::int64_t>(bytes.size());
      if (options.progress) {
        options.progress(summary->bytes, total);
      }
      return bytes;
    };
    // transformers asks for this mark.
    RETURN_IF_ERROR(
        WriteSafetensorsFrom(fs, JoinPath(folder, file), shapes, {{"format", "pt"}}, source)
            .status());
  }
  RETURN_IF_ERROR(fs.WriteFileAtomic(JoinPath(folder, kIndexFile), index.dump(1) + "\n"));
  RETURN_IF_ERROR(fs.WriteFileAtomic(
      JoinPath(folder, "config.json"),
      WriteHfConfig(model, {.format = options.format, .max_positions = options.max_positions})));
  summary->tensors = static_cast<std::int64_t>(all.size());
  summary->shards = static_cast<std::int64_t>(shards.size());
  return fs.SyncDirectory(folder);
}

}  // namespace

absl::StatusOr<HfExportSummary> ExportToHf(FileSystem& fs, const HfExportOptions& options) {
  HfExportSummary summary;
  ASSIGN_OR_RETURN(summary.checkpoint, FindCheckpoint(fs, options.checkpoint));
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(fs, summary.checkpoint));
  summary.step = reader->manifest().state.step;
  RETURN_IF_ERROR(Annotate(CheckHfExpressible(reader->manifest().model),
                           StrCat("exporting ", summary.checkpoint)));
  if (fs.Exists(options.folder)) {
    return AlreadyExistsError(StrCat("exporting: ", options.folder, " exists; name a new folder"));
  }
  RETURN_IF_ERROR(Annotate(reader->VerifyShards(), StrCat("exporting ", summary.checkpoint)));
  const std::string partial = options.folder + ".partial";
  RETURN_IF_ERROR(fs.RemoveTree(partial));  // of an export that was killed
  RETURN_IF_ERROR(fs.CreateDirectories(partial));
  const absl::Status written = WriteFolder(fs, *reader, options, partial, &summary);
  if (!written.ok()) {
    fs.RemoveTree(partial).IgnoreError();
    return written;
  }
  RETURN_IF_ERROR(fs.Rename(partial, options.folder));
  RETURN_IF_ERROR(fs.SyncDirectory(DirectoryName(options.folder)));
  return summary;
}

Fp8Matrix QuantizeHfMatrix(std::span<const float> values, std::int64_t rows, std::int64_t cols) {
  OCTAVO_CHECK_EQ(static_cast<std::int64_t>(values.size()), rows * cols);
  Fp8Matrix out;
  out.codes.resize(values.size());
  const std::int64_t across = CeilDiv(cols, kTile);
  out.dequant_scale.resize(static_cast<std::size_t>(CeilDiv(rows, kTile) * across));
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const std::int64_t r1 = std::min(rows, r0 + kTile);
    for (std::int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const std::int64_t c1 = std::min(cols, c0 + kTile);
      float amax = 0;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) {
          amax = std::max(amax, std::fabs(values[static_cast<std::size_t>(r * cols + c)]));
        }
      }
      const ScalePair pair = ScaleFromAmaxPair(amax, E4M3::kMax, /*pow2=*/false, /*margin=*/0);
      out.dequant_scale[static_cast<std::size_t>(r0 / kTile * across + c0 / kTile)] =
          pair.dequant_scale;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) {
          const auto i = static_cast<std::size_t>(r * cols + c);
          out.codes[i] = E4M3Encode(values[i] * pair.quant_scale);
        }
      }
    }
  }
  return out;
}

}  // namespace octavo
