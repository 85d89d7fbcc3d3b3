#include "worker/checkpoint/writer.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "worker/checkpoint/store.h"

namespace octavo {

absl::StatusOr<ShardFile> WriteShard(FileSystem& fs, const ShardWriteRequest& request) {
  RETURN_IF_ERROR(fs.CreateDirectories(request.folder));
  std::vector<HostTensor> views;
  for (const OwnedTensor& t : request.tensors) {
    views.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape, .data = t.bytes.data()});
    OCTAVO_CHECK_EQ(views.back().bytes(), static_cast<std::int64_t>(t.bytes.size()));
  }
  ShardFile shard{.file = ShardFileName(request.rank)};
  ASSIGN_OR_RETURN(
      const FileDigest digest,
      WriteSafetensors(fs, JoinPath(request.folder, shard.file), views, request.metadata));
  shard.bytes = digest.bytes;
  shard.crc32c = digest.crc32c;
  RETURN_IF_ERROR(fs.SyncDirectory(request.folder));
  return shard;
}

void ShardWriter::Start(ShardWriteRequest request) {
  OCTAVO_CHECK(!active_);
  active_ = true;
  done_.store(false, std::memory_order_relaxed);
  request_ = std::move(request);
  thread_ = std::jthread([this] {
    const auto begin = std::chrono::steady_clock::now();
    result_ = WriteShard(fs_, request_);
    write_seconds_ =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    done_.store(true, std::memory_order_release);
  });
}

absl::StatusOr<ShardFile> ShardWriter::Finish() {
  OCTAVO_CHECK(active_);
  thread_.join();
  active_ = false;
  return std::move(result_);
}

}  // namespace octavo
