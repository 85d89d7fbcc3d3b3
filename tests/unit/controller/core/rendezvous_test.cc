#include "controller/core/rendezvous.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/limits.h"

namespace octavo {
namespace {

internal::v1::KeyValueRequest Set(std::int64_t id, const std::string& key,
                                  const std::string& value) {
  internal::v1::KeyValueRequest request;
  request.set_id(id);
  request.mutable_set()->set_key(key);
  request.mutable_set()->set_value(value);
  return request;
}
internal::v1::KeyValueRequest Get(std::int64_t id, const std::string& key, std::int64_t ms) {
  internal::v1::KeyValueRequest request;
  request.set_id(id);
  request.mutable_get()->set_key(key);
  request.mutable_get()->set_timeout_ms(ms);
  return request;
}

TEST(Rendezvous, EveryWaiterGetsTheKeyWhenItAppears) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(1, Get(10, "k", 1000), 0, &answers);
  store.Handle(2, Get(20, "k", 1000), 0, &answers);
  EXPECT_TRUE(answers.empty());
  store.Handle(0, Set(1, "k", "v"), 0, &answers);
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[1].rank, 1);
  EXPECT_EQ(answers[1].reply.id(), 10);
  EXPECT_EQ(answers[2].reply.value(), "v");
  EXPECT_EQ(store.waiting(), 0u);
}

TEST(Rendezvous, AGetWhoseTimeIsOverNamesTheKey) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(1, Get(10, "addr/3", 1000), 0, &answers);
  store.Expire(999'999, &answers);
  EXPECT_TRUE(answers.empty());
  store.Expire(1'000'000, &answers);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_FALSE(answers[0].reply.ok());
  EXPECT_THAT(answers[0].reply.error(), testing::HasSubstr("addr/3"));
}

TEST(Rendezvous, ARepeatedGetIsAnsweredOnce) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(1, Get(10, "k", 1000), 0, &answers);
  store.Handle(1, Get(10, "k", 1000), 5, &answers);
  store.Handle(0, Set(1, "k", "v"), 6, &answers);
  EXPECT_EQ(answers.size(), 2u);
}

TEST(Rendezvous, AKeyIsWrittenOnceButARepeatIsFine) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(0, Set(1, "k", "v"), 0, &answers);
  store.Handle(0, Set(1, "k", "v"), 0, &answers);
  EXPECT_TRUE(answers[1].reply.ok());
  store.Handle(0, Set(2, "k", "w"), 0, &answers);
  EXPECT_FALSE(answers[2].reply.ok());
}

TEST(Rendezvous, ValuesAreBounded) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(0, Set(1, "k", std::string(kMaxKeyValueBytes, 'x')), 0, &answers);
  EXPECT_FALSE(answers[0].reply.ok());
  EXPECT_EQ(store.keys(), 0u);
}

TEST(Rendezvous, ARequestWithoutAnOperationIsAnError) {
  RendezvousStore store;
  std::vector<RendezvousStore::Answer> answers;
  store.Handle(0, internal::v1::KeyValueRequest(), 0, &answers);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_FALSE(answers[0].reply.ok());
}

}  // namespace
}  // namespace octavo
