// Where ranks find each other: a small key-value store that everyone in an attempt can reach.
//
// A rank process gets one that asks the controller through its worker; ranks as threads share an
// InProcessStore. Values are connection addresses and NCCL ids, at most limits::kMaxKeyValueBytes.
// A key is written once per attempt; keys start with the group's name, so that one store serves
// many groups.
#pragma once

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace octavo {

// Implementations are thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;

  // Waits until somebody has set the key. DEADLINE_EXCEEDED names the key and the time waited.
  virtual absl::StatusOr<std::string> Get(const std::string& key, double timeout_seconds) = 0;
};

// A store inside one process.
class InProcessStore final : public KeyValueStore {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, double timeout_seconds) override;

 private:
  absl::Mutex mu_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

}  // namespace octavo
