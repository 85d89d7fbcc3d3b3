#include "worker/data/build.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>

#include "base/status.h"
#include "base/str.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/token_dataset.h"

namespace octavo {
namespace {

namespace stdfs = std::filesystem;

void ListFolder(const stdfs::path& folder, std::vector<std::string>* files, std::int64_t* skipped) {
  std::error_code error;
  std::vector<stdfs::directory_entry> entries;
  stdfs::directory_iterator it(folder, error);
  for (; !error && it != stdfs::directory_iterator(); it.increment(error)) {
    entries.push_back(*it);
  }
  if (error) {
    ++*skipped;  // an unreadable folder inside the tree is skipped like an unreadable file
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.path().native() < b.path().native(); });
  for (const auto& entry : entries) {
    const stdfs::file_status status = entry.symlink_status(error);
    if (!error && stdfs::is_directory(status)) {
      ListFolder(entry.path(), files, skipped);
    } else if (!error && stdfs::is_regular_file(status)) {
      files->push_back(entry.path().string());
    } else {
      ++*skipped;
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ListInputFiles(const std::vector<std::string>& inputs,
                                                        std::int64_t* skipped) {
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    std::error_code error;
    const stdfs::file_status status = stdfs::status(input, error);
    if (stdfs::is_directory(status)) {
      ListFolder(input, &files, skipped);
    } else if (stdfs::is_regular_file(status)) {
      files.push_back(input);
    } else {
      return NotFoundError(
          StrCat("building a dataset: ", input,
                 ": no such file or folder (regular files and folders are valid)"));
    }
  }
  return files;
}

absl::StatusOr<BuildSummary> BuildByteDataset(FileSystem& fs, const BuildByteOptions& options) {
  BuildSummary summary;
  ASSIGN_OR_RETURN(const std::vector<std::string> files,
                   ListInputFiles(options.inputs, &summary.skipped));
  ASSIGN_OR_RETURN(std::unique_ptr<DatasetWriter> writer,
                   DatasetWriter::Create(fs, options.output, 1, 256));
  BuildProgress progress{.files_total = static_cast<std::int64_t>(files.size())};
  for (const std::string& file : files) {
    if (options.max_bytes > 0 && progress.bytes_done >= options.max_bytes) {
      break;
    }
    absl::StatusOr<std::string> text = fs.ReadFile(file);
    if (!text.ok() || text->empty()) {
      ++summary.skipped;
    } else {
      if (options.max_bytes > 0 &&
          static_cast<std::int64_t>(text->size()) > options.max_bytes - progress.bytes_done) {
        text->resize(static_cast<std::size_t>(options.max_bytes - progress.bytes_done));
      }
      RETURN_IF_ERROR(writer->AppendBytes(*text));
      writer->EndDocument();
      progress.bytes_done += static_cast<std::int64_t>(text->size());
      ++summary.files;
    }
    ++progress.files_done;
    if (options.progress) {
      options.progress(progress);
    }
  }
  if (writer->token_count() == 0) {
    return InvalidArgumentError(StrCat("building ", options.output, ": no readable text in ",
                                       StrJoin(options.inputs, ", ")));
  }
  summary.tokens = writer->token_count();
  summary.documents = writer->document_count();
  RETURN_IF_ERROR(writer->Finish());
  ASSIGN_OR_RETURN(const std::unique_ptr<TokenDataset> dataset,
                   OpenTokenDataset(fs, options.output));
  ASSIGN_OR_RETURN(summary.unigram_entropy, UnigramEntropy(*dataset, 0, summary.tokens));
  return summary;
}

}  // namespace octavo
