// Builds datasets from text on disk; what `octavo data build` calls.
//
//   ASSIGN_OR_RETURN(BuildSummary summary, BuildByteDataset(fs, {.inputs = {"/usr/include"},
//                                                               .output = "text.octd"}));
//
// Byte datasets: every byte is a token (vocabulary 256), every file a document. Folders are walked
// in sorted order, so the same tree gives the same file; symbolic links and special files are
// skipped.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file.h"

namespace octavo {

struct BuildProgress {
  std::int64_t files_done = 0, files_total = 0;
  std::int64_t bytes_done = 0;
};

struct BuildByteOptions {
  std::vector<std::string> inputs;  // files and folders, in this order
  std::string output;
  std::int64_t max_bytes = 0;  // stop after so many bytes of text; 0: no limit
  std::function<void(const BuildProgress&)> progress;  // after every file; may be empty
};

struct BuildSummary {
  std::int64_t files = 0;
  std::int64_t skipped = 0;  // unreadable, empty, links and special files
  std::int64_t tokens = 0;
  std::int64_t documents = 0;
  double unigram_entropy = 0;  // nats per token
};

// Errors: NOT_FOUND names the input; INVALID_ARGUMENT when there is no text at all.
absl::StatusOr<BuildSummary> BuildByteDataset(FileSystem& fs, const BuildByteOptions& options);

// Regular files below `inputs`, in the order of reading; `skipped` counts the rest.
absl::StatusOr<std::vector<std::string>> ListInputFiles(const std::vector<std::string>& inputs,
                                                        std::int64_t* skipped);

}  // namespace octavo
