// Tokens per second of the loader beside memcpy of as many bytes.
//
//   bench_data [--megabytes N] [--sequence N]
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/loader.h"

namespace octavo {
namespace {

using Steady = std::chrono::steady_clock;
double SecondsSince(Steady::time_point begin) {
  return std::chrono::duration<double>(Steady::now() - begin).count();
}

absl::Status BenchWidth(const std::string& folder, std::int32_t token_bytes, std::int64_t megabytes,
                        std::int64_t sequence) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  const std::string path = JoinPath(folder, StrCat("data", token_bytes));
  const std::int64_t tokens = megabytes * (1 << 20) / token_bytes;
  ASSIGN_OR_RETURN(auto writer, DatasetWriter::Create(fs, path, token_bytes, 256));
  std::vector<std::int32_t> part(1 << 16);
  for (std::size_t i = 0; i < part.size(); ++i) {
    part[i] = static_cast<std::int32_t>(i * 2654435761u >> 24 & 255);
  }
  const auto write_begin = Steady::now();
  for (std::int64_t done = 0; done < tokens; done += static_cast<std::int64_t>(part.size())) {
    RETURN_IF_ERROR(writer->Append(part));
  }
  RETURN_IF_ERROR(writer->Finish());
  const double write_seconds = SecondsSince(write_begin);

  ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset, OpenTokenDataset(fs, path));
  ASSIGN_OR_RETURN(Loader loader, Loader::Create(dataset, {.region = {0, dataset->token_count()},
                                                           .sequence_length = sequence,
                                                           .vocab = 256,
                                                           .seed = 1,
                                                           .microbatch_sequences = 8}));
  std::vector<std::int32_t> input(static_cast<std::size_t>(8 * sequence)), target(input);
  double seconds[2];
  const std::int64_t steps = loader.samples() / 8;
  for (int pass = 0; pass < 2; ++pass) {  // the first verifies checksums, the second does not
    const auto begin = Steady::now();
    for (std::int64_t step = 0; step < steps; ++step) {
      RETURN_IF_ERROR(loader.Load(step, 0, input, target));
    }
    seconds[pass] = SecondsSince(begin);
  }
  // memcpy of what the loader writes: inputs and targets.
  const auto copy_begin = Steady::now();
  std::vector<std::int32_t> copy(input.size());
  for (std::int64_t step = 0; step < 2 * steps; ++step) {
    std::memcpy(copy.data(), input.data(), input.size() * 4);
    asm volatile("" : : "r"(copy.data()) : "memory");  // keeps the copy
  }
  const double copy_seconds = SecondsSince(copy_begin);
  const auto loaded = static_cast<double>(steps * 8 * sequence);
  std::printf(
      "%d-byte tokens: build %.0f Mtokens/s; load %.0f Mtokens/s with checksums, %.0f after; "
      "memcpy %.0f\n",
      token_bytes, static_cast<double>(tokens) / write_seconds / 1e6, loaded / seconds[0] / 1e6,
      loaded / seconds[1] / 1e6, loaded / copy_seconds / 1e6);
  return absl::OkStatus();
}

absl::Status Bench(std::int64_t megabytes, std::int64_t sequence) {
  char folder[] = "/tmp/octavo_bench.XXXXXX";
  if (::mkdtemp(folder) == nullptr) {
    return ErrnoStatus(errno, "making a temporary folder");
  }
  absl::Status status;
  for (const std::int32_t width : {1, 2, 4}) {
    UpdateStatus(&status, BenchWidth(folder, width, megabytes, sequence));
  }
  UpdateStatus(&status, PosixFileSystem::Get().RemoveTree(folder));
  return status;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  std::int64_t megabytes = 64, sequence = 1024;
  CLI::App app{"tokens/s of the loader beside memcpy"};
  app.add_option("--megabytes", megabytes, "size of the dataset");
  app.add_option("--sequence", sequence, "tokens per sequence");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = octavo::Bench(megabytes, sequence);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_data: %s\n", octavo::ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}
