#include "controller/core/rendezvous.h"

#include <algorithm>

#include "base/str.h"
#include "proto/limits.h"

namespace octavo {
namespace {

RendezvousStore::Answer MakeAnswer(std::int32_t rank, std::int64_t id) {
  RendezvousStore::Answer answer{.rank = rank};
  answer.reply.set_id(id);
  return answer;
}

RendezvousStore::Answer Value(std::int32_t rank, std::int64_t id, const std::string& value) {
  RendezvousStore::Answer answer = MakeAnswer(rank, id);
  answer.reply.set_ok(true);
  answer.reply.set_value(value);
  return answer;
}

RendezvousStore::Answer Error(std::int32_t rank, std::int64_t id, std::string error) {
  RendezvousStore::Answer answer = MakeAnswer(rank, id);
  answer.reply.set_error(std::move(error));
  return answer;
}

}  // namespace

void RendezvousStore::Handle(std::int32_t rank, const internal::v1::KeyValueRequest& request,
                             std::int64_t now_micros, std::vector<Answer>* answers) {
  if (request.has_set()) {
    const std::string& key = request.set().key();
    const std::string& value = request.set().value();
    if (static_cast<std::int64_t>(key.size() + value.size()) > kMaxKeyValueBytes) {
      answers->push_back(Error(rank, request.id(),
                               StrCat("rendezvous key ", key, ": ", key.size() + value.size(),
                                      " bytes; at most ", kMaxKeyValueBytes)));
      return;
    }
    const auto found = values_.find(key);
    if (found != values_.end() && found->second != value) {
      answers->push_back(Error(rank, request.id(),
                               StrCat("rendezvous key ", key, " is already set to another value")));
      return;
    }
    if (found == values_.end()) {
      if (static_cast<std::int64_t>(values_.size()) >= kMaxKeysPerAttempt) {
        answers->push_back(Error(rank, request.id(),
                                 StrCat("rendezvous: more than ", kMaxKeysPerAttempt, " keys")));
        return;
      }
      values_.emplace(key, value);
    }
    answers->push_back(Value(rank, request.id(), ""));
    std::erase_if(waiting_, [&](const Waiter& waiter) {
      if (waiter.key != key) {
        return false;
      }
      answers->push_back(Value(waiter.rank, waiter.id, value));
      return true;
    });
    return;
  }
  if (!request.has_get()) {
    answers->push_back(Error(rank, request.id(), "rendezvous: a request without set or get"));
    return;
  }
  const std::string& key = request.get().key();
  const auto found = values_.find(key);
  if (found != values_.end()) {
    answers->push_back(Value(rank, request.id(), found->second));
    return;
  }
  // A repeat of a waiting get (after a reconnect) replaces it.
  std::erase_if(waiting_, [&](const Waiter& waiter) {
    return waiter.rank == rank && waiter.id == request.id();
  });
  if (static_cast<std::int64_t>(waiting_.size()) >= kMaxKeysPerAttempt) {
    answers->push_back(Error(rank, request.id(),
                             StrCat("rendezvous: more than ", kMaxKeysPerAttempt, " waiting")));
    return;
  }
  const std::int64_t timeout_ms = request.get().timeout_ms() > 0
                                      ? std::min(request.get().timeout_ms(), kRendezvousGetMs)
                                      : kRendezvousGetMs;
  waiting_.push_back({.rank = rank,
                      .id = request.id(),
                      .key = key,
                      .deadline_micros = now_micros + timeout_ms * 1000,
                      .timeout_ms = timeout_ms});
}

void RendezvousStore::Expire(std::int64_t now_micros, std::vector<Answer>* answers) {
  std::erase_if(waiting_, [&](const Waiter& waiter) {
    if (now_micros < waiter.deadline_micros) {
      return false;
    }
    answers->push_back(Error(waiter.rank, waiter.id,
                             StrCat("rendezvous key ", waiter.key, " did not appear within ",
                                    waiter.timeout_ms, " ms")));
    return true;
  });
}

}  // namespace octavo
