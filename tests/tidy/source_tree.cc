#include "tests/tidy/source_tree.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace octavo::tidy {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFolders[] = {"base",       "proto",  "kernels", "worker", "controller", "cli",
                                    "dashboards", "deploy", "tests",   "bench",  ".ci"};

}  // namespace

std::vector<std::pair<std::string, std::uintmax_t>> ListAllFiles() {
  std::vector<std::pair<std::string, std::uintmax_t>> out;
  const fs::path root = OCTAVO_SOURCE_DIR;
  for (const char* folder : kFolders) {
    if (!fs::exists(root / folder)) {
      continue;
    }
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string path = fs::relative(entry.path(), root).generic_string();
      if (entry.is_regular_file() && path.find("__pycache__") == std::string::npos) {
        out.emplace_back(path, entry.file_size());
      }
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<SourceFile> ReadSourceTree() {
  std::vector<SourceFile> out;
  for (const auto& [path, size] : ListAllFiles()) {
    const std::string ext = fs::path(path).extension().string();
    if (ext != ".h" && ext != ".cc" && ext != ".cu" && ext != ".cuh" && ext != ".proto") {
      continue;
    }
    SourceFile file{path, {}};
    std::ifstream in(fs::path(OCTAVO_SOURCE_DIR) / path);
    for (std::string line; std::getline(in, line);) {
      file.lines.push_back(line);
    }
    out.push_back(std::move(file));
  }
  return out;
}

}  // namespace octavo::tidy
