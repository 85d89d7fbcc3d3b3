#include "worker/checkpoint/hf_import.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/fp8.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

constexpr char kConfigFile[] = "config.json";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr std::int64_t kDefaultLengthMax = 2048;  // attention's time grows with its square

// Older exporters store the rotary frequencies, which are computed here.
bool IsDerived(const std::string& name) { return EndsWith(name, ".rotary_emb.inv_freq"); }

constexpr std::string_view kScales = "_scale_inv";

// IEEE 754 binary16, exactly.
float FloatFromF16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                          : std::numeric_limits<float>::infinity();
  } else {
    value = std::ldexp(static_cast<float>(exponent == 0 ? fraction : 1024 + fraction),
                       std::max(exponent, 1) - 25);
  }
  return bits >> 15 != 0 ? -value : value;
}

}  // namespace

std::vector<HfSources> HfSourcesOf(const ModelConfig& model) {
  std::vector<HfSources> out;
  for (HfTensor& t : HfTensors(model)) {
    if (out.empty() || out.back().stored != t.stored) {
      out.push_back({.stored = t.stored, .shape = t.shape});
    } else {
      out.back().shape[0] += t.shape[0];
    }
    out.back().parts.push_back(std::move(t));
  }
  return out;
}

bool IsHfFolder(const FileSystem& fs, const std::string& path) {
  return fs.Exists(JoinPath(path, kConfigFile));
}

absl::StatusOr<std::unique_ptr<HfWeights>> HfWeights::Open(const FileSystem& fs,
                                                           const std::string& folder) {
  auto weights = std::make_unique<HfWeights>();
  weights->folder_ = folder;
  const std::string config_path = JoinPath(folder, kConfigFile);
  ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(config_path));
  ASSIGN_OR_RETURN(weights->config_, ParseHfConfig(text, config_path));
  weights->sources_ = HfSourcesOf(weights->config_.model);
  for (HfStack& stack : HfStacks(weights->config_.model)) {
    std::string name = stack.stack;
    weights->stacks_.emplace(std::move(name), std::move(stack));
  }
  RETURN_IF_ERROR(weights->OpenFiles(fs));
  RETURN_IF_ERROR(weights->CheckTensors());
  return weights;
}

std::int64_t HfWeights::default_sequence_length() const {
  return std::min(config_.max_positions, kDefaultLengthMax);
}

absl::Status HfWeights::CheckIndex(const FileSystem& fs,
                                   const std::vector<std::string>& names) const {
  const std::string path = JoinPath(folder_, kIndexFile);
  if (!fs.Exists(path)) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(path));
  const nlohmann::json index = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    return DataLossError(
        StrCat(path, ": cut or damaged; valid is a JSON object with an object `weight_map`"));
  }
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : file.dump();
    if (!file.is_string() || name.find('/') != std::string::npos || name == "..") {
      return DataLossError(StrCat(path, ": tensor ", tensor, " is in ", name,
                                  "; valid is the name of a file in the same folder"));
    }
    if (!std::binary_search(names.begin(), names.end(), name)) {
      return DataLossError(
          StrCat(path, ": tensor ", tensor, " is in ", name, ", which is missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status HfWeights::OpenFiles(const FileSystem& fs) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.ListDirectory(folder_));
  RETURN_IF_ERROR(CheckIndex(fs, names));
  for (const std::string& name : names) {
    if (!EndsWith(name, ".safetensors")) {
      continue;
    }
    ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                     SafetensorsFile::Open(fs, JoinPath(folder_, name), F16Tensors::kAccepted));
    for (const auto& [tensor, entry] : file->entries()) {
      RETURN_IF_ERROR(AddTensor(*file, tensor, entry));
    }
    files_.push_back(std::move(file));
  }
  if (files_.empty()) {
    return NotFoundError(StrCat(folder_, ": no *.safetensors files"));
  }
  return absl::OkStatus();
}

absl::Status HfWeights::AddPlace(const std::string& name, const SafetensorsFile& file,
                                 const SafetensorsEntry& entry) {
  if (!places_.emplace(name, Place{&file, &entry}).second) {
    return InvalidArgumentError(StrCat(folder_, ": tensor ", name, " is in two files"));
  }
  return absl::OkStatus();
}

absl::Status HfWeights::AddTensor(const SafetensorsFile& file, const std::string& name,
                                  const SafetensorsEntry& entry) {
  const bool scales = EndsWith(name, kScales);
  const auto stack = stacks_.find(scales ? name.substr(0, name.size() - kScales.size()) : name);
  return stack == stacks_.end() ? AddPlace(HfCanonicalName(config_.model, name), file, entry)
                                : AddStack(file, entry, stack->second, scales);
}

absl::Status HfWeights::AddStack(const SafetensorsFile& file, const SafetensorsEntry& entry,
                                 const HfStack& stack, bool scales) {
  std::vector<std::int64_t> shape = stack.slice_shape;
  if (scales) {
    shape = {CeilDiv(shape[0], config_.block_rows), CeilDiv(shape[1], config_.block_cols)};
  }
  const auto count = static_cast<std::int64_t>(stack.slices.size());
  const std::vector<std::int64_t> whole = {config_.model.experts,
                                           count / config_.model.experts * shape[0], shape[1]};
  if (entry.shape != whole) {
    return InvalidArgumentError(StrCat(file.path(), ": tensor ", stack.stack, scales ? kScales : "",
                                       " is [", StrJoin(entry.shape, ", "),
                                       "]; config.json gives [", StrJoin(whole, ", "), "]"));
  }
  for (std::int64_t i = 0; i < count; ++i) {
    SafetensorsEntry slice = entry;
    slice.shape = shape;
    slice.bytes = entry.bytes / count;
    slice.offset = entry.offset + i * slice.bytes;
    slices_.push_back(std::move(slice));
    const std::string& weight = stack.slices[static_cast<std::size_t>(i)];
    RETURN_IF_ERROR(AddPlace(scales ? HfScaleName(weight) : weight, file, slices_.back()));
  }
  return absl::OkStatus();
}

absl::Status HfWeights::CheckTensors() const {
  std::set<std::string> wanted;
  const auto find =
      [this](const std::string& name,
             const std::vector<std::int64_t>& shape) -> absl::StatusOr<const SafetensorsEntry*> {
    const auto it = places_.find(name);
    if (it == places_.end()) {
      return InvalidArgumentError(StrCat(folder_, ": tensor ", name, " is missing"));
    }
    if (it->second.entry->shape != shape) {
      return InvalidArgumentError(StrCat(it->second.file->path(), ": tensor ", name, " is [",
                                         StrJoin(it->second.entry->shape, ", "),
                                         "]; config.json gives [", StrJoin(shape, ", "), "]"));
    }
    return it->second.entry;
  };
  for (const HfSources& source : sources_) {
    for (const HfTensor& t : source.parts) {
      wanted.insert(t.name);
      ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(t.name, t.shape));
      if (entry->dtype == DType::kE4M3 && config_.fp8 && t.quantised) {
        wanted.insert(HfScaleName(t.name));
        ASSIGN_OR_RETURN(const SafetensorsEntry* scales,
                         find(HfScaleName(t.name), {CeilDiv(t.rows(), config_.block_rows),
                                                    CeilDiv(t.cols(), config_.block_cols)}));
        entry = scales;
      }
      if (entry->dtype != DType::kBF16 && entry->dtype != DType::kF32) {
        return InvalidArgumentError(
            StrCat(folder_, ": tensor ", t.name, " is stored as ", SafetensorsName(entry->dtype),
                   "; valid are BF16, F16, F32, and F8_E4M3 with a quantization_config"));
      }
    }
  }
  for (const auto& [name, place] : places_) {
    const bool tied_head = config_.model.tied_embeddings && name == "lm_head.weight";
    if (wanted.count(name) == 0 && !IsDerived(name) && !tied_head) {
      return InvalidArgumentError(StrCat(place.file->path(), ": tensor ", name,
                                         " has no place in the model that config.json describes"));
    }
  }
  return absl::OkStatus();
}

absl::Status HfWeights::Read(std::size_t i, std::vector<float>* out) const {
  const HfSources& source = sources_[i];
  std::int64_t elements = 1;
  for (const std::int64_t d : source.shape) {
    elements *= d;
  }
  out->resize(static_cast<std::size_t>(elements));
  for (const HfTensor& part : source.parts) {
    RETURN_IF_ERROR(ReadPart(
        part, std::span<float>(*out).subspan(static_cast<std::size_t>(part.first_row * part.cols()),
                                             static_cast<std::size_t>(part.rows() * part.cols()))));
  }
  const auto bad =
      std::find_if(out->begin(), out->end(), [](float v) { return !std::isfinite(v); });
  if (bad != out->end()) {
    return DataLossError(StrCat(folder_, ": ", source.parts.front().name, " holds ", *bad,
                                "; only finite weights can be imported"));
  }
  return absl::OkStatus();
}

absl::Status HfWeights::ReadPart(const HfTensor& part, std::span<float> out) const {
  const Place& place = places_.at(part.name);
  if (place.entry->dtype != DType::kE4M3) {
    return ReadFloats(place, out);
  }
  std::vector<std::uint8_t> codes(out.size());
  RETURN_IF_ERROR(
      place.file->Read(*place.entry, {reinterpret_cast<char*>(codes.data()), codes.size()}));
  const std::int64_t across = CeilDiv(part.cols(), config_.block_cols);
  std::vector<float> dequant_scale(
      static_cast<std::size_t>(CeilDiv(part.rows(), config_.block_rows) * across));
  RETURN_IF_ERROR(ReadFloats(places_.at(HfScaleName(part.name)), dequant_scale));
  for (const float s : dequant_scale) {
    if (!std::isfinite(s) || s < 0) {
      return DataLossError(StrCat(place.file->path(), ": ", HfScaleName(part.name), " holds ", s,
                                  "; valid are finite scales that are not negative"));
    }
  }
  for (std::int64_t r = 0; r < part.rows(); ++r) {
    const float* row = dequant_scale.data() + r / config_.block_rows * across;
    for (std::int64_t c = 0; c < part.cols(); ++c) {
      const auto at = static_cast<std::size_t>(r * part.cols() + c);
      out[at] = E4M3Decode(codes[at]) * row[c / config_.block_cols];
    }
  }
  return absl::OkStatus();
}

absl::Status HfWeights::ReadFloats(const Place& place, std::span<float> out) const {
  if (place.entry->dtype == DType::kF32) {
    return place.file->Read(*place.entry,
                            {reinterpret_cast<char*>(out.data()), out.size() * sizeof(float)});
  }
  std::vector<std::uint16_t> bits(out.size());
  RETURN_IF_ERROR(
      place.file->Read(*place.entry, {reinterpret_cast<char*>(bits.data()), bits.size() * 2}));
  std::transform(bits.begin(), bits.end(), out.begin(),
                 place.entry->f16 ? FloatFromF16 : FloatFromBf16);
  return absl::OkStatus();
}

absl::StatusOr<HfImportSummary> ImportFromHf(FileSystem& fs, const HfImportOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<HfWeights> weights, HfWeights::Open(fs, options.folder));
  // No job owns an import: jobs read it through start_from.
  CheckpointStore store(fs, options.output, /*job_uid=*/"", /*attempt=*/0);
  HfImportSummary summary{.checkpoint = store.FinalPath(0),
                          .model = weights->config().model,
                          .tensors = static_cast<std::int64_t>(weights->sources().size()),
                          .fp8 = weights->config().fp8};
  if (fs.Exists(summary.checkpoint)) {
    return AlreadyExistsError(
        StrCat("importing: ", summary.checkpoint, " exists; name another folder"));
  }
  std::vector<HostTensor> shapes;
  std::int64_t total = 0;
  for (const HfSources& source : weights->sources()) {
    shapes.push_back({.name = source.stored + "/master", .shape = source.shape});
    total += shapes.back().bytes();
  }
  const std::string folder = store.PartialPath(0);
  const bool is_new = !fs.Exists(options.output);
  const auto clean_up = [&] {
    fs.RemoveTree(folder).IgnoreError();
    if (is_new) {
      fs.Remove(options.output).IgnoreError();  // only while it is empty
    }
  };
  RETURN_IF_ERROR(fs.RemoveTree(folder));  // of an import that was killed
  const absl::Status created = fs.CreateDirectories(folder);
  if (!created.ok()) {
    clean_up();
    return created;
  }
  std::vector<float> values;
  const auto source = [&](std::size_t i) -> absl::StatusOr<std::span<const char>> {
    RETURN_IF_ERROR(weights->Read(i, &values));
    summary.bytes += static_cast<std::int64_t>(values.size() * sizeof(float));
    if (options.progress) {
      options.progress(summary.bytes, total);
    }
    return std::span<const char>(reinterpret_cast<const char*>(values.data()),
                                 values.size() * sizeof(float));
  };
  ShardFile shard{.file = ShardFileName(0)};
  const absl::StatusOr<FileDigest> digest = WriteSafetensorsFrom(
      fs, JoinPath(folder, shard.file), shapes, {{"imported_from", options.folder}}, source);
  if (!digest.ok()) {
    clean_up();
    return digest.status();
  }
  shard.bytes = digest->bytes;
  shard.crc32c = digest->crc32c;
  const absl::Status published =
      store.Publish({.job_name = BaseName(options.folder),
                     .created_unix_micros = RealClock::Get().UnixMicros(),
                     .model = summary.model,
                     .sequence_length = weights->default_sequence_length(),
                     .shards = {shard}});
  if (!published.ok()) {
    clean_up();
    return published;
  }
  return summary;
}

}  // namespace octavo
