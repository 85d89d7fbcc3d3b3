// How long a step stands still for a checkpoint, and how fast a shard reaches the disk, beside the
// disk's own rate (plain write and fsync of as many bytes).
//
//   bench_checkpoint [--megabytes N] [--folder DIR]
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/store.h"
#include "worker/checkpoint/writer.h"

namespace octavo {
namespace {

using Steady = std::chrono::steady_clock;
double SecondsSince(Steady::time_point begin) {
  return std::chrono::duration<double>(Steady::now() - begin).count();
}

// What dd bs=4M conv=fsync does.
absl::StatusOr<double> PlainWriteSeconds(const std::string& path, std::int64_t bytes) {
  const std::vector<char> block(4 << 20, 'x');
  ASSIGN_OR_RETURN(auto file, PosixFileSystem::Get().OpenForWrite(path));
  const auto begin = Steady::now();
  for (std::int64_t done = 0; done < bytes; done += static_cast<std::int64_t>(block.size())) {
    RETURN_IF_ERROR(file->Append({block.data(), block.size()}));
  }
  RETURN_IF_ERROR(file->Sync());
  const double seconds = SecondsSince(begin);
  RETURN_IF_ERROR(file->Close());
  RETURN_IF_ERROR(PosixFileSystem::Get().Remove(path));
  return seconds;
}

absl::Status Bench(const std::string& parent, std::int64_t megabytes) {
  std::string folder = JoinPath(parent, "octavo_bench.XXXXXX");
  if (::mkdtemp(folder.data()) == nullptr) {
    return ErrnoStatus(errno, StrCat("making a folder in ", parent));
  }
  PosixFileSystem& fs = PosixFileSystem::Get();
  constexpr std::int64_t kTensorBytes = 4 << 20;
  const std::int64_t tensors = megabytes * (1 << 20) / kTensorBytes;
  const std::vector<char> model(static_cast<std::size_t>(tensors * kTensorBytes), 'w');
  const auto bytes = static_cast<double>(model.size());

  // The part that a step waits for: the copy, into fresh memory the first time and into the same
  // buffers from then on.
  ShardWriteRequest request{.folder = JoinPath(folder, "step.partial")};
  double copy_seconds[2];
  for (double& seconds : copy_seconds) {
    const auto begin = Steady::now();
    request.tensors.resize(static_cast<std::size_t>(tensors));
    for (std::int64_t t = 0; t < tensors; ++t) {
      OwnedTensor& tensor = request.tensors[static_cast<std::size_t>(t)];
      const char* at = model.data() + t * kTensorBytes;
      tensor.name = StrCat("t", t);
      tensor.shape = {kTensorBytes / 4};
      tensor.bytes.assign(at, at + kTensorBytes);
    }
    seconds = SecondsSince(begin);
  }

  ShardWriter writer(fs);
  const auto start_begin = Steady::now();
  writer.Start(std::move(request));
  const double start_seconds = SecondsSince(start_begin);
  const absl::StatusOr<ShardFile> shard = writer.Finish();
  RETURN_IF_ERROR(shard);

  CheckpointStore store(fs, folder, "bench", 1);
  const auto publish_begin = Steady::now();
  Manifest manifest{.job_uid = "bench", .attempt = 1};
  manifest.state.step = 1;
  manifest.shards = {*shard};
  RETURN_IF_ERROR(fs.Rename(JoinPath(folder, "step.partial"), store.PartialPath(1)));
  RETURN_IF_ERROR(store.Publish(manifest));
  const double publish_seconds = SecondsSince(publish_begin);

  const auto verify_begin = Steady::now();
  RETURN_IF_ERROR(VerifyCheckpoint(fs, store.FinalPath(1)));
  const double verify_seconds = SecondsSince(verify_begin);
  ASSIGN_OR_RETURN(const double plain_seconds,
                   PlainWriteSeconds(JoinPath(folder, "plain"), static_cast<std::int64_t>(bytes)));

  std::printf("shard of %s on %s\n", HumanBytes(bytes).c_str(), parent.c_str());
  std::printf(
      "step stall: copy %.1f ms (%.2f GB/s), the first time %.1f ms; start %.2f ms, publish "
      "%.1f ms\n",
      1e3 * copy_seconds[1], bytes / copy_seconds[1] / 1e9, 1e3 * copy_seconds[0],
      1e3 * start_seconds, 1e3 * publish_seconds);
  std::printf("background write with checksum and fsync: %.3f s, %.2f GB/s\n",
              writer.write_seconds(), bytes / writer.write_seconds() / 1e9);
  std::printf(
      "plain write and fsync of as many bytes:   %.3f s, %.2f GB/s (ours is %.0f %% of it)\n",
      plain_seconds, bytes / plain_seconds / 1e9, 100 * plain_seconds / writer.write_seconds());
  std::printf("verify (read and checksum): %.3f s, %.2f GB/s\n", verify_seconds,
              bytes / verify_seconds / 1e9);
  return fs.RemoveTree(folder);
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  std::string folder = "/tmp";
  std::int64_t megabytes = 256;
  CLI::App app{"stall and write rate of checkpoints beside the disk's own"};
  app.add_option("--folder", folder, "on the disk to measure");
  app.add_option("--megabytes", megabytes, "size of the shard");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = octavo::Bench(folder, megabytes);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_checkpoint: %s\n", octavo::ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}
