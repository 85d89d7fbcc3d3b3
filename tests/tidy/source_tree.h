// The tracked source files of the project, as text: what the tidy tests look at.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace octavo::tidy {

struct SourceFile {
  std::string path;                // from the repository root, '/' separated
  std::vector<std::string> lines;  // without line ends
};

// Every .h .cc .cu .cuh .proto file below the product's folders, tests and bench, sorted by path.
std::vector<SourceFile> ReadSourceTree();
// Every regular file of the project (build folders and .git left out) with its size in bytes.
std::vector<std::pair<std::string, std::uintmax_t>> ListAllFiles();

}  // namespace octavo::tidy
