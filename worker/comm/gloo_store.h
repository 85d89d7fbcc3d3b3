// gloo's rendezvous store over our KeyValueStore; private to gloo.cc.
#pragma once

#include <gloo/rendezvous/store.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/str.h"
#include "worker/comm/rendezvous.h"

namespace octavo {

using SteadyTime = std::chrono::steady_clock::time_point;

inline SteadyTime After(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(seconds));
}

// Rounded up, so that a wait that runs out has passed the deadline and is told from a lost peer.
// At least one: gloo takes 0 for "no limit".
inline std::chrono::milliseconds Remaining(SteadyTime deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

// Carries a Status through gloo's connection code.
struct StoreFailure : std::exception {
  explicit StoreFailure(absl::Status s) : status(std::move(s)) {}
  const char* what() const noexcept override { return "rendezvous store"; }
  absl::Status status;
};

// gloo's store interface over ours, with the group's prefix and one deadline for everything.
class StoreAdapter final : public ::gloo::rendezvous::Store {
 public:
  StoreAdapter(KeyValueStore* store, std::string prefix, SteadyTime deadline)
      : store_(store), prefix_(std::move(prefix)), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const absl::Status status =
        store_->Set(prefix_ + "/" + key, std::string(data.begin(), data.end()));
    if (!status.ok()) {
      throw StoreFailure(status);
    }
  }

  std::vector<char> get(const std::string& key) override {
    Fetch(key);
    const std::string& value = values_.at(key);
    return {value.begin(), value.end()};
  }

  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      Fetch(key);
    }
  }

  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

  // The key that is being waited for, for the error message; empty when none.
  const std::string& awaited() const { return awaited_; }

 private:
  void Fetch(const std::string& key) {
    if (values_.contains(key)) {
      return;
    }
    awaited_ = key;
    absl::StatusOr<std::string> value =
        store_->Get(prefix_ + "/" + key, static_cast<double>(Remaining(deadline_).count()) / 1e3);
    if (!value.ok()) {
      throw StoreFailure(value.status());
    }
    values_[key] = *std::move(value);
    awaited_.clear();
  }

  KeyValueStore* store_;
  const std::string prefix_;
  const SteadyTime deadline_;
  std::map<std::string, std::string> values_;
  std::string awaited_;
};

// gloo's keys are "rank_3" and "3".
inline std::optional<int> RankOfKey(std::string_view key) {
  constexpr std::string_view kPrefix = "rank_";
  const std::optional<std::int64_t> rank =
      ParseInt64(StartsWith(key, kPrefix) ? key.substr(kPrefix.size()) : key);
  return rank.has_value() ? std::optional<int>(static_cast<int>(*rank)) : std::nullopt;
}

}  // namespace octavo
