// Writes a rank's shard in the background while training goes on.
//
//   ShardWriter writer(fs);
//   writer.Start({.folder = store.PartialPath(step), .rank = rank, .tensors = std::move(copies)});
//   ... steps ...                                 // writer.done() from time to time
//   ASSIGN_OR_RETURN(ShardFile shard, writer.Finish());   // waits for the rest
//
// The step stalls for the copy into host memory alone. Between ranks: every rank says in the
// control vector that its shard is on disk; when all have, they exchange what Finish returned and
// the coordinating rank publishes (store.h). One shard is in flight at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace octavo {

// A tensor with its own copy of the bytes.
struct OwnedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;
};

struct ShardWriteRequest {
  std::string folder;  // created if missing
  std::int32_t rank = 0;
  std::vector<OwnedTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// One owner; owns its thread. Destroying waits for a write in progress.
class ShardWriter {
 public:
  explicit ShardWriter(FileSystem& fs) : fs_(fs) {}
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  void Start(ShardWriteRequest request);  // REQUIRES: !active()
  bool active() const { return active_; }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Waits for the end of the write; REQUIRES: active(). Disk errors are returned here.
  absl::StatusOr<ShardFile> Finish();
  double write_seconds() const { return write_seconds_; }  // of the last finished write
  // The buffers of the last finished write, for the next copy: fresh memory costs a page fault for
  // every 4 KiB, several times the copy itself. REQUIRES: !active().
  std::vector<OwnedTensor> TakeBuffers() { return std::move(request_.tensors); }

 private:
  FileSystem& fs_;
  ShardWriteRequest request_;  // the thread's while active
  bool active_ = false;
  std::atomic<bool> done_{true};
  absl::StatusOr<ShardFile> result_;  // written by the thread, read after join
  double write_seconds_ = 0;          // likewise
  std::jthread thread_;
};

// The synchronous form.
absl::StatusOr<ShardFile> WriteShard(FileSystem& fs, const ShardWriteRequest& request);

}  // namespace octavo
