#include "worker/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/crc32c.h"
#include "base/status.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

TEST(SafetensorsTest, RoundTripsTypesShapesAndMetadata) {
  TempDir dir;
  const std::vector<float> f32 = {1, -2, 3.5f, 0, 7, 9};
  const std::vector<std::uint16_t> bf16 = {0x3F80, 0xC000};
  const std::vector<std::uint8_t> fp8 = {1, 2, 3};
  const std::vector<HostTensor> tensors = {
      {.name = "b", .dtype = DType::kF32, .shape = {2, 3}, .data = f32.data()},
      {.name = "a", .dtype = DType::kBF16, .shape = {2}, .data = bf16.data()},
      {.name = "empty", .dtype = DType::kF32, .shape = {0, 4}, .data = nullptr},
      {.name = "q", .dtype = DType::kE4M3, .shape = {3}, .data = fp8.data()}};
  const auto digest = WriteSafetensors(Fs(), dir.File("t"), tensors, {{"step", "7"}});
  ASSERT_TRUE(digest.ok()) << ToString(digest.status());
  const auto again = DigestFile(Fs(), dir.File("t"));
  EXPECT_EQ(again->bytes, digest->bytes);
  EXPECT_EQ(again->crc32c, digest->crc32c);
  const auto file = SafetensorsFile::Open(Fs(), dir.File("t"));
  ASSERT_TRUE(file.ok()) << ToString(file.status());
  EXPECT_EQ((*file)->entries().size(), 4u);
  EXPECT_EQ((*file)->metadata().at("step"), "7");
  const SafetensorsEntry* entry = (*file)->Find("b");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<char> bytes(24);
  ASSERT_TRUE((*file)->Read(*entry, bytes).ok());
  EXPECT_EQ(std::memcmp(bytes.data(), f32.data(), 24), 0);
  EXPECT_EQ((*file)->Find("absent"), nullptr);
}

// The format itself, not our reader: the first eight bytes and the JSON that other programs parse.
TEST(SafetensorsTest, BytesAreTheFormats) {
  TempDir dir;
  const float one = 1.0f;
  const std::vector<HostTensor> tensors = {
      {.name = "x", .dtype = DType::kF32, .shape = {1}, .data = &one}};
  ASSERT_TRUE(WriteSafetensors(Fs(), dir.File("t"), tensors, {}).ok());
  const std::string bytes = *Fs().ReadFile(dir.File("t"));
  const std::string header = R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})";
  std::uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes.substr(8, header.size()), header);
  EXPECT_EQ(bytes.size(), 8 + length + 4);
  EXPECT_EQ(bytes.substr(8 + length), std::string("\0\0\x80\x3f", 4));
}

TEST(SafetensorsTest, DamageIsRefusedNeverACrash) {
  TempDir dir;
  const std::vector<float> data(64, 1.5f);
  std::vector<HostTensor> tensors;
  for (const char* name : {"a", "b", "c"}) {
    tensors.push_back({.name = name, .dtype = DType::kF32, .shape = {8, 8}, .data = data.data()});
  }
  ASSERT_TRUE(WriteSafetensors(Fs(), dir.File("t"), tensors, {}).ok());
  const std::string good = *Fs().ReadFile(dir.File("t"));
  std::mt19937 rng(1);
  int refused = 0;
  constexpr int kTrials = 400;
  for (int i = 0; i < kTrials; ++i) {
    std::string bad = good;
    if (i % 4 == 0) {
      bad.resize(rng() % bad.size());
    } else {
      bad[rng() % 180] = static_cast<char>(rng());  // header and its length
    }
    auto file = *Fs().OpenForWrite(dir.File("bad"));
    ASSERT_TRUE(file->Append(bad).ok());
    ASSERT_TRUE(file->Close().ok());
    const auto opened = SafetensorsFile::Open(Fs(), dir.File("bad"));
    if (!opened.ok()) {
      ++refused;
      EXPECT_NE(Message(opened.status()).find("bad"), std::string::npos);
      continue;
    }
    for (const auto& [name, entry] : (*opened)->entries()) {
      std::vector<char> out(static_cast<std::size_t>(entry.bytes));
      EXPECT_TRUE((*opened)->Read(entry, out).ok());
    }
  }
  EXPECT_GT(refused, kTrials / 2);
}

}  // namespace
}  // namespace octavo
