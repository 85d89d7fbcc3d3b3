// safetensors files: u64 header length, JSON header (name → dtype, shape, byte range), data.
//
// Our own reader and writer, little-endian as the format demands. The writer streams tensors in the
// order given, computes the CRC-32C of the whole file on the way and syncs it. The reader believes
// nothing: ranges must tile the data exactly, sizes must fit shapes, and errors name the offset.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "kernels/tensor.h"

namespace octavo {

// A named tensor in host memory that somebody else owns.
struct HostTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t d : shape) {
      n *= d;
    }
    return n;
  }
  std::int64_t bytes() const { return elements() * DTypeBytes(dtype); }
};

struct FileDigest {
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;
};

// Writes and syncs `path` (not its folder). Names must be unique; metadata values are free text.
absl::StatusOr<FileDigest> WriteSafetensors(FileSystem& fs, const std::string& path,
                                            std::span<const HostTensor> tensors,
                                            const std::map<std::string, std::string>& metadata);

// The same when the whole does not fit in memory: `data` of the tensors is not read; `source(i)`
// gives the bytes of tensor i, called once for each in order, and they may go when it is called
// again. Its errors end the writing.
using TensorSource = std::function<absl::StatusOr<std::span<const char>>(std::size_t)>;
absl::StatusOr<FileDigest> WriteSafetensorsFrom(FileSystem& fs, const std::string& path,
                                                std::span<const HostTensor> tensors,
                                                const std::map<std::string, std::string>& metadata,
                                                const TensorSource& source);

struct SafetensorsEntry {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // in the file
  std::int64_t bytes = 0;
  // IEEE half precision, which no backend computes with; dtype is kBF16 then, for its size alone.
  bool f16 = false;
};

// Our own files never hold F16; those of others may.
enum class F16Tensors : std::uint8_t { kRefused, kAccepted };

// Thread-safe after Open.
class SafetensorsFile {
 public:
  // NOT_FOUND, or DATA_LOSS with what is wrong and where.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(
      const FileSystem& fs, const std::string& path, F16Tensors f16 = F16Tensors::kRefused);

  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafetensorsEntry* Find(const std::string& name) const;
  // out.size() == entry.bytes.
  absl::Status Read(const SafetensorsEntry& entry, std::span<char> out) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::unique_ptr<RandomAccessFile> file_;
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

// CRC-32C and size of a whole file, read in parts.
absl::StatusOr<FileDigest> DigestFile(const FileSystem& fs, const std::string& path);

// "F32", "BF16", … and back; nullopt-like empty / false when the format has no such type.
std::string_view SafetensorsName(DType dtype);
bool ParseSafetensorsName(std::string_view name, DType* dtype);

}  // namespace octavo
