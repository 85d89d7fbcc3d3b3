#include "worker/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxHeaderBytes = 100 << 20;  // the format's own limit
constexpr std::int64_t kPart = 4 << 20;

struct TypeName {
  DType dtype;
  std::string_view name;
};
constexpr std::array<TypeName, 8> kTypeNames = {{{DType::kF32, "F32"},
                                                 {DType::kBF16, "BF16"},
                                                 {DType::kE4M3, "F8_E4M3"},
                                                 {DType::kE5M2, "F8_E5M2"},
                                                 {DType::kI32, "I32"},
                                                 {DType::kI64, "I64"},
                                                 {DType::kF64, "F64"},
                                                 {DType::kU8, "U8"}}};

}  // namespace

std::string_view SafetensorsName(DType dtype) {
  for (const TypeName& t : kTypeNames) {
    if (t.dtype == dtype) {
      return t.name;
    }
  }
  return {};
}

bool ParseSafetensorsName(std::string_view name, DType* dtype) {
  for (const TypeName& t : kTypeNames) {
    if (t.name == name) {
      *dtype = t.dtype;
      return true;
    }
  }
  return false;
}

absl::StatusOr<FileDigest> WriteSafetensors(FileSystem& fs, const std::string& path,
                                            std::span<const HostTensor> tensors,
                                            const std::map<std::string, std::string>& metadata) {
  return WriteSafetensorsFrom(fs, path, tensors, metadata,
                              [tensors](std::size_t i) -> absl::StatusOr<std::span<const char>> {
                                return std::span<const char>(
                                    static_cast<const char*>(tensors[i].data),
                                    static_cast<std::size_t>(tensors[i].bytes()));
                              });
}

absl::StatusOr<FileDigest> WriteSafetensorsFrom(FileSystem& fs, const std::string& path,
                                                std::span<const HostTensor> tensors,
                                                const std::map<std::string, std::string>& metadata,
                                                const TensorSource& source) {
  json header = json::object();
  if (!metadata.empty()) {
    header["__metadata__"] = metadata;
  }
  std::int64_t offset = 0;
  for (const HostTensor& t : tensors) {
    OCTAVO_CHECK(!header.contains(t.name), "tensor %s twice", t.name.c_str());
    OCTAVO_CHECK(!SafetensorsName(t.dtype).empty());
    header[t.name] = {{"dtype", std::string(SafetensorsName(t.dtype))},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + t.bytes()}}};
    offset += t.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned
  const auto length = static_cast<std::uint64_t>(text.size());

  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, fs.OpenForWrite(path));
  FileDigest digest;
  const auto append = [&](std::string_view bytes) -> absl::Status {
    while (!bytes.empty()) {
      const std::string_view part = bytes.substr(0, kPart);
      RETURN_IF_ERROR(file->Append(part));
      digest.crc32c = Crc32cExtend(digest.crc32c, part.data(), part.size());
      digest.bytes += static_cast<std::int64_t>(part.size());
      bytes.remove_prefix(part.size());
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(append({reinterpret_cast<const char*>(&length), sizeof(length)}));
  RETURN_IF_ERROR(append(text));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ASSIGN_OR_RETURN(const std::span<const char> bytes, source(i));
    OCTAVO_CHECK_EQ(static_cast<std::int64_t>(bytes.size()), tensors[i].bytes());
    RETURN_IF_ERROR(append({bytes.data(), bytes.size()}));
  }
  RETURN_IF_ERROR(file->Sync());
  RETURN_IF_ERROR(file->Close());
  return digest;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const FileSystem& fs,
                                                                       const std::string& path,
                                                                       F16Tensors f16) {
  auto result = std::make_unique<SafetensorsFile>();
  result->path_ = path;
  ASSIGN_OR_RETURN(result->file_, fs.OpenForRead(path));
  const std::int64_t size = result->file_->size_bytes();
  std::uint64_t length = 0;
  if (size < 8) {
    return DataLossError(
        StrCat(path, ": cut at byte offset ", size, "; the header length needs 8"));
  }
  RETURN_IF_ERROR(result->file_->ReadAt(0, {reinterpret_cast<char*>(&length), 8}));
  if (length > static_cast<std::uint64_t>(std::min(size - 8, kMaxHeaderBytes))) {
    return DataLossError(
        StrCat(path, ": header of ", length, " bytes in a file of ", size, " (byte offset 0)"));
  }
  std::string text(length, '\0');
  RETURN_IF_ERROR(result->file_->ReadAt(8, text));
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) {
    return DataLossError(StrCat(path, ": the header at byte offset 8 is not a JSON object"));
  }
  const std::int64_t data_begin = 8 + static_cast<std::int64_t>(length);
  const std::int64_t data_bytes = size - data_begin;
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    const auto bad = [&, &name = name](std::string_view what) {
      return DataLossError(StrCat(path, ": tensor ", name, ": ", what));
    };
    if (name == "__metadata__") {
      for (const auto& [key, item] : value.items()) {
        if (item.is_string()) {
          result->metadata_[key] = item.get<std::string>();
        }
      }
      continue;
    }
    if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() ||
        !value.contains("shape") || !value["shape"].is_array() || !value.contains("data_offsets") ||
        !value["data_offsets"].is_array() || value["data_offsets"].size() != 2) {
      return bad("dtype, shape or data_offsets are missing or malformed");
    }
    SafetensorsEntry entry;
    entry.f16 = f16 == F16Tensors::kAccepted && value["dtype"] == "F16";
    if (entry.f16) {
      entry.dtype = DType::kBF16;
    } else if (!ParseSafetensorsName(value["dtype"].get<std::string>(), &entry.dtype)) {
      return bad(StrCat("dtype ", value["dtype"].get<std::string>(), " is not known here"));
    }
    std::int64_t elements = 1;
    for (const json& d : value["shape"]) {
      if (!d.is_number_unsigned() || d.get<std::uint64_t>() > static_cast<std::uint64_t>(size) ||
          (elements != 0 && d.get<std::int64_t>() > (size + 1) / elements)) {
        return bad("shape does not fit the file");
      }
      entry.shape.push_back(d.get<std::int64_t>());
      elements *= entry.shape.back();
    }
    const json& offsets = value["data_offsets"];
    if (!offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned()) {
      return bad("data_offsets are not numbers");
    }
    const auto begin = offsets[0].get<std::uint64_t>();
    const auto end = offsets[1].get<std::uint64_t>();
    if (begin > end || end > static_cast<std::uint64_t>(data_bytes)) {
      return bad(StrCat("bytes ", begin, " to ", end, " of ", data_bytes,
                        " bytes of data (the file was cut or damaged at byte offset ", size, ")"));
    }
    entry.offset = data_begin + static_cast<std::int64_t>(begin);
    entry.bytes = static_cast<std::int64_t>(end - begin);
    if (entry.bytes != elements * DTypeBytes(entry.dtype)) {
      return bad(
          StrCat(entry.bytes, " bytes, its shape needs ", elements * DTypeBytes(entry.dtype)));
    }
    ranges.emplace_back(entry.offset, entry.bytes);
    result->entries_.emplace(name, std::move(entry));
  }
  std::sort(ranges.begin(), ranges.end());
  std::int64_t at = data_begin;
  for (const auto& [offset, bytes] : ranges) {
    if (offset != at) {
      return DataLossError(StrCat(path, ": tensors overlap or leave a gap at byte offset ", at));
    }
    at += bytes;
  }
  if (at != size) {
    return DataLossError(
        StrCat(path, ": ", size, " bytes, the header describes ", at, " (cut or added)"));
  }
  return result;
}

const SafetensorsEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

absl::Status SafetensorsFile::Read(const SafetensorsEntry& entry, std::span<char> out) const {
  OCTAVO_CHECK_EQ(static_cast<std::int64_t>(out.size()), entry.bytes);
  return file_->ReadAt(entry.offset, out);
}

absl::StatusOr<FileDigest> DigestFile(const FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file, fs.OpenForRead(path));
  FileDigest digest;
  std::string part;
  const std::int64_t size = file->size_bytes();
  while (digest.bytes < size) {
    part.resize(static_cast<std::size_t>(std::min(kPart, size - digest.bytes)));
    RETURN_IF_ERROR(file->ReadAt(digest.bytes, part));
    digest.crc32c = Crc32cExtend(digest.crc32c, part.data(), part.size());
    digest.bytes += static_cast<std::int64_t>(part.size());
  }
  return digest;
}

}  // namespace octavo
