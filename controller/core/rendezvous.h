// Where the ranks of one attempt meet: a small key-value store (Gloo addresses, NCCL ids). Pure.
//
// A get is answered when the key exists or its time is over, never later. Keys are written once;
// writing the same value again is fine (a repeat after a reconnect), another value is an error.
// Bounded in keys, value size and waiting gets. It lives as long as the attempt and is not stored:
// ranks that were meeting when the controller went away start over.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "octavo/internal/v1/rank_service.pb.h"

namespace octavo {

class RendezvousStore {
 public:
  struct Answer {
    std::int32_t rank = 0;
    internal::v1::KeyValueReply reply;
  };

  // Handles a request of a rank; appends what can be answered now (for a set: the sender and
  // everybody who waited for the key).
  void Handle(std::int32_t rank, const internal::v1::KeyValueRequest& request,
              std::int64_t now_micros, std::vector<Answer>* answers);

  // Answers gets whose time is over, naming the key.
  void Expire(std::int64_t now_micros, std::vector<Answer>* answers);

  std::size_t keys() const { return values_.size(); }
  std::size_t waiting() const { return waiting_.size(); }

 private:
  struct Waiter {
    std::int32_t rank;
    std::int64_t id;
    std::string key;
    std::int64_t deadline_micros;
    std::int64_t timeout_ms;
  };
  std::map<std::string, std::string> values_;
  std::vector<Waiter> waiting_;
};

}  // namespace octavo
