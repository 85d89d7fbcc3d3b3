#include "worker/comm/rendezvous.h"

#include "absl/time/time.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {

absl::Status InProcessStore::Set(const std::string& key, const std::string& value) {
  absl::MutexLock lock(&mu_);
  const auto [at, fresh] = values_.emplace(key, value);
  if (!fresh && at->second != value) {
    return AlreadyExistsError(StrCat("setting rendezvous key '", key, "': it has another value"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> InProcessStore::Get(const std::string& key, double timeout_seconds) {
  absl::MutexLock lock(&mu_);
  const auto present = [this, &key]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return values_.contains(key); };
  if (!mu_.AwaitWithTimeout(absl::Condition(&present), absl::Seconds(timeout_seconds))) {
    return DeadlineExceededError(
        StrCat("nobody set rendezvous key '", key, "' within ", HumanDuration(timeout_seconds)));
  }
  return values_.at(key);
}

}  // namespace octavo
