// A fresh folder under $TMPDIR (or /tmp), removed with everything in it at the end of the scope.
#pragma once

#include <stdlib.h>

#include <string>

#include "base/check.h"
#include "base/file.h"

namespace octavo {

class TempDir {
 public:
  TempDir() {
    const char* root = std::getenv("TMPDIR");
    path_ = std::string(root == nullptr ? "/tmp" : root) + "/octavo_test.XXXXXX";
    OCTAVO_CHECK(::mkdtemp(path_.data()) != nullptr, "mkdtemp(%s) failed", path_.c_str());
  }
  ~TempDir() { PosixFileSystem::Get().RemoveTree(path_).IgnoreError(); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return JoinPath(path_, name); }

 private:
  std::string path_;
};

}  // namespace octavo
