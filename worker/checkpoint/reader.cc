#include "worker/checkpoint/reader.h"

#include <cmath>
#include <cstring>

#include "base/status.h"
#include "base/str.h"
#include "kernels/formats/bf16.h"
#include "worker/checkpoint/store.h"

namespace octavo {

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const FileSystem& fs,
                                                                         const std::string& path) {
  auto reader = std::make_unique<CheckpointReader>();
  reader->fs_ = &fs;
  reader->path_ = path;
  const std::string manifest_path = JoinPath(path, kManifestFile);
  ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(manifest_path));
  ASSIGN_OR_RETURN(reader->manifest_, ParseManifest(text, manifest_path));
  for (const ShardFile& shard : reader->manifest_.shards) {
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> opened =
        SafetensorsFile::Open(fs, JoinPath(path, shard.file));
    if (opened.status().code() == absl::StatusCode::kNotFound) {
      return DataLossError(
          StrCat(Message(opened.status()), "; the checkpoint's manifest lists this shard"));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, std::move(opened));
    for (const auto& [name, entry] : file->entries()) {
      if (!reader->places_.emplace(name, Place{file.get(), &entry}).second) {
        return DataLossError(StrCat(path, ": tensor ", name, " is in two shards"));
      }
    }
    reader->files_.push_back(std::move(file));
  }
  return reader;
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> out;
  for (const auto& [name, place] : places_) {
    out.push_back(name);
  }
  return out;
}

const SafetensorsEntry* CheckpointReader::Find(const std::string& name) const {
  const auto it = places_.find(name);
  return it == places_.end() ? nullptr : it->second.entry;
}

absl::Status CheckpointReader::Read(const std::string& name, DType dtype,
                                    std::span<char> out) const {
  const auto it = places_.find(name);
  if (it == places_.end()) {
    return DataLossError(StrCat("checkpoint ", path_, ": tensor ", name, " is missing"));
  }
  const SafetensorsEntry& entry = *it->second.entry;
  if (entry.dtype != dtype || entry.bytes != static_cast<std::int64_t>(out.size())) {
    return DataLossError(StrCat("checkpoint ", path_, ": tensor ", name, " is ",
                                SafetensorsName(entry.dtype), " of ", entry.bytes,
                                " bytes; expected ", SafetensorsName(dtype), " of ", out.size()));
  }
  return it->second.file->Read(entry, out);
}

absl::Status CheckpointReader::VerifyShard(std::int32_t index) const {
  const ShardFile& shard = manifest_.shards[static_cast<std::size_t>(index)];
  const std::string file = JoinPath(path_, shard.file);
  ASSIGN_OR_RETURN(const FileDigest digest, DigestFile(*fs_, file));
  if (digest.bytes != shard.bytes || digest.crc32c != shard.crc32c) {
    return DataLossError(
        StrCat(file, ": damaged (checksum ", digest.crc32c, ", expected ", shard.crc32c, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyShards() const {
  for (std::size_t i = 0; i < manifest_.shards.size(); ++i) {
    RETURN_IF_ERROR(VerifyShard(static_cast<std::int32_t>(i)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> DiffCheckpoints(const FileSystem& fs, const std::string& a,
                                                         const std::string& b) {
  ASSIGN_OR_RETURN(const auto left, CheckpointReader::Open(fs, a));
  ASSIGN_OR_RETURN(const auto right, CheckpointReader::Open(fs, b));
  std::vector<std::string> out;
  const TrainState& x = left->manifest().state;
  const TrainState& y = right->manifest().state;
  const auto compare = [&out](std::string_view what, auto before, auto after) {
    if (before != after) {
      out.push_back(StrCat(what, ": ", before, " | ", after));
    }
  };
  compare("step", x.step, y.step);
  compare("adam_t", x.adam_t, y.adam_t);
  compare("tokens", x.tokens, y.tokens);
  compare("data_position", x.data_position, y.data_position);
  compare("seed", x.seed, y.seed);
  compare("plan_version", x.plan_version, y.plan_version);
  const auto before = DescribeModel(left->manifest().model);
  const auto after = DescribeModel(right->manifest().model);
  for (std::size_t i = 0; i < before.size(); ++i) {
    compare(StrCat("model.", before[i].name), before[i].value, after[i].value);
  }
  const auto value_at = [](const std::string& bytes, DType dtype, std::size_t i) -> double {
    if (dtype == DType::kBF16) {
      std::uint16_t bits;
      std::memcpy(&bits, bytes.data() + i * 2, 2);
      return FloatFromBf16(bits);
    }
    float value;
    std::memcpy(&value, bytes.data() + i * 4, 4);
    return value;
  };
  for (const std::string& name : left->names()) {
    const SafetensorsEntry* p = left->Find(name);
    const SafetensorsEntry* q = right->Find(name);
    if (q == nullptr) {
      out.push_back(StrCat(name, ": only in ", a));
      continue;
    }
    if (p->dtype != q->dtype || p->shape != q->shape) {
      out.push_back(StrCat(name, ": ", SafetensorsName(p->dtype), " [", StrJoin(p->shape, ","),
                           "] | ", SafetensorsName(q->dtype), " [", StrJoin(q->shape, ","), "]"));
      continue;
    }
    std::string one(static_cast<std::size_t>(p->bytes), '\0'), two(one);
    RETURN_IF_ERROR(left->Read(name, p->dtype, one));
    RETURN_IF_ERROR(right->Read(name, q->dtype, two));
    if (one == two) {
      continue;
    }
    double largest = 0;
    std::int64_t differing = 0;
    const std::size_t width = static_cast<std::size_t>(DTypeBytes(p->dtype));
    for (std::size_t i = 0; i * width < one.size(); ++i) {
      const double d = std::fabs(value_at(one, p->dtype, i) - value_at(two, p->dtype, i));
      largest = std::isnan(d) ? d : std::max(largest, d);
      differing += std::memcmp(&one[i * width], &two[i * width], width) != 0 ? 1 : 0;
    }
    out.push_back(StrCat(name, ": ", differing, " of ", one.size() / width,
                         " elements differ, at most by ", largest));
  }
  for (const std::string& name : right->names()) {
    if (left->Find(name) == nullptr) {
      out.push_back(StrCat(name, ": only in ", b));
    }
  }
  return out;
}

}  // namespace octavo
