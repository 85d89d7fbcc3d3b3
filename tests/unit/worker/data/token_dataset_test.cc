#include "worker/data/token_dataset.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/status.h"
#include "base/str.h"
#include "tests/support/faulty_fs.h"
#include "tests/support/temp_dir.h"
#include "worker/data/build.h"
#include "worker/data/dataset_writer.h"

namespace octavo {
namespace {

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

void WriteBytes(const std::string& path, const std::string& bytes) {
  auto file = Fs().OpenForWrite(path);
  ASSERT_TRUE(file.ok()) << ToString(file.status());
  ASSERT_TRUE((*file)->Append(bytes).ok());
  ASSERT_TRUE((*file)->Close().ok());
}

std::string RandomText(std::size_t size, unsigned seed) {
  std::mt19937 rng(seed);
  std::string text(size, '\0');
  for (char& c : text) {
    c = static_cast<char>(rng() % 256);
  }
  return text;
}

// A dataset of three documents, larger than one checksum chunk.
class TokenDatasetTest : public testing::Test {
 protected:
  void SetUp() override {
    auto writer = DatasetWriter::Create(Fs(), path_, 1, 256);
    ASSERT_TRUE(writer.ok()) << ToString(writer.status());
    for (const std::size_t size :
         {std::size_t{700001}, std::size_t{0}, std::size_t{600000}, std::size_t{13}}) {
      const std::string text = RandomText(size, static_cast<unsigned>(size));
      text_ += text;
      ASSERT_TRUE((*writer)->AppendBytes(text).ok());
      (*writer)->EndDocument();
    }
    const absl::Status finished = (*writer)->Finish();
    ASSERT_TRUE(finished.ok()) << ToString(finished);
    bytes_ = *Fs().ReadFile(path_);
  }

  absl::Status OpenAndReadAll(const std::string& path) {
    ASSIGN_OR_RETURN(auto dataset, OpenTokenDataset(Fs(), path));
    std::vector<std::int32_t> all(static_cast<std::size_t>(dataset->token_count()));
    RETURN_IF_ERROR(dataset->Read(0, all));
    return dataset->Verify();
  }

  TempDir dir_;
  const std::string path_ = dir_.File("data.octd");
  std::string text_, bytes_;
};

TEST_F(TokenDatasetTest, ReadsBackEveryTokenAndDocument) {
  auto dataset = OpenTokenDataset(Fs(), path_);
  ASSERT_TRUE(dataset.ok()) << ToString(dataset.status());
  EXPECT_EQ((*dataset)->token_count(), 1300014);
  EXPECT_EQ((*dataset)->vocab_size(), 256);
  ASSERT_EQ((*dataset)->document_count(), 3);  // the empty one is not recorded
  EXPECT_EQ((*dataset)->DocumentEnd(0), 700001);
  EXPECT_EQ((*dataset)->DocumentEnd(2), 1300014);
  std::vector<std::int32_t> all(1300014);
  ASSERT_TRUE((*dataset)->Read(0, all).ok());
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i], static_cast<unsigned char>(text_[i])) << i;
  }
  EXPECT_EQ((*dataset)->Read(1300014, all).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*dataset)->Read(-1, std::span(all).first(1)).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(TokenDatasetTest, WiderTokensRoundTrip) {
  for (const std::int32_t width : {2, 4}) {
    const std::string path = dir_.File(StrCat("wide", width));
    const std::int64_t vocab = width == 2 ? 65536 : 200000;
    std::mt19937 rng(7);
    std::vector<std::int32_t> tokens(1001);
    for (auto& t : tokens) {
      t = static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(vocab));
    }
    auto writer = DatasetWriter::Create(Fs(), path, width, vocab);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append(tokens).ok());
    const std::int32_t outside = static_cast<std::int32_t>(vocab);
    EXPECT_EQ((*writer)->Append({&outside, 1}).code(), absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE((*writer)->Finish().ok());
    auto dataset = OpenTokenDataset(Fs(), path);
    ASSERT_TRUE(dataset.ok()) << ToString(dataset.status());
    std::vector<std::int32_t> back(tokens.size());
    ASSERT_TRUE((*dataset)->Read(0, back).ok());
    EXPECT_EQ(back, tokens);
  }
}

TEST_F(TokenDatasetTest, RefusesEveryClassOfTruncationWithTheOffset) {
  const auto size = bytes_.size();
  const std::string cut_path = dir_.File("cut");
  for (const std::size_t keep :
       {std::size_t{0}, std::size_t{7}, std::size_t{15}, std::size_t{79}, std::size_t{100},
        std::size_t{1048592}, size - 128, size - 64, size - 1}) {
    WriteBytes(cut_path, bytes_.substr(0, keep));
    const absl::Status status = OpenAndReadAll(cut_path);
    ASSERT_FALSE(status.ok()) << keep;
    EXPECT_NE(Message(status).find("byte"), std::string::npos) << keep << ToString(status);
  }
}

TEST_F(TokenDatasetTest, RefusesAFlippedBitAnywhere) {
  const auto size = bytes_.size();
  const std::string path = dir_.File("flipped");
  std::mt19937 rng(11);
  std::vector<std::size_t> places = {9,         13,        16,        1048576 + 16,
                                     size - 64, size - 40, size - 20, size - 9,
                                     size - 1,  size - 70, size - 80};
  for (int i = 0; i < 20; ++i) {
    places.push_back(rng() % size);
  }
  for (const std::size_t at : places) {
    std::string damaged = bytes_;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    WriteBytes(path, damaged);
    const absl::Status status = OpenAndReadAll(path);
    // Bytes that carry no meaning (zeros of the foot and of paddings) may change without harm.
    const bool meaningless = at >= size - 12 && at < size - 8;
    EXPECT_EQ(status.ok(), meaningless) << "offset " << at << " of " << size;
  }
}

TEST_F(TokenDatasetTest, DamageIsFoundWhenItsChunkIsRead) {
  std::string damaged = bytes_;
  damaged[1200000] = static_cast<char>(damaged[1200000] ^ 1);
  const std::string path = dir_.File("late");
  WriteBytes(path, damaged);
  auto dataset = OpenTokenDataset(Fs(), path);
  ASSERT_TRUE(dataset.ok()) << ToString(dataset.status());
  std::vector<std::int32_t> part(1000);
  EXPECT_TRUE((*dataset)->Read(0, part).ok());
  const absl::Status status = (*dataset)->Read(1100000, part);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(Message(status).find("1048592"), std::string::npos) << ToString(status);
}

TEST_F(TokenDatasetTest, SomethingElseIsRefusedWithWhatIsValid) {
  const std::string path = dir_.File("text");
  WriteBytes(path, "just some text, not tokens");
  const absl::Status status = OpenAndReadAll(path);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(Message(status).find("octavo data build"), std::string::npos);
  EXPECT_EQ(OpenAndReadAll(dir_.File("absent")).code(), absl::StatusCode::kNotFound);
}

TEST_F(TokenDatasetTest, FullDiskLeavesNoFileBehind) {
  FaultyFileSystem faulty(&Fs());
  const std::string path = dir_.File("sub") + "/full.octd";
  faulty.FailWritesAfterBytes(100);
  {
    auto writer = DatasetWriter::Create(faulty, path, 1, 256);
    ASSERT_TRUE(writer.ok());
    EXPECT_EQ((*writer)->AppendBytes(text_).code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(Fs().ListDirectory(dir_.File("sub"))->size(), 0u);
}

TEST_F(TokenDatasetTest, UnigramEntropyOfKnownDistributions) {
  const std::string path = dir_.File("entropy");
  auto writer = DatasetWriter::Create(Fs(), path, 1, 256);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)
                  ->AppendBytes("aabbccdd"
                                "aaaa")
                  .ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  auto dataset = OpenTokenDataset(Fs(), path);
  ASSERT_TRUE(dataset.ok());
  EXPECT_NEAR(*UnigramEntropy(**dataset, 0, 8), std::log(4.0), 1e-12);
  EXPECT_NEAR(*UnigramEntropy(**dataset, 8, 12), 0, 1e-12);
}

TEST(BuildByteDatasetTest, WalksFoldersInOrderAndSkipsLinks) {
  TempDir dir;
  ASSERT_TRUE(Fs().CreateDirectories(dir.File("in/b")).ok());
  WriteBytes(dir.File("in/z.txt"), "zz");
  WriteBytes(dir.File("in/b/a.txt"), "ab");
  WriteBytes(dir.File("in/empty"), "");
  ASSERT_EQ(symlink("/etc", dir.File("in/link").c_str()), 0);
  std::int64_t calls = 0;
  auto summary = BuildByteDataset(Fs(), {.inputs = {dir.File("in")},
                                         .output = dir.File("out"),
                                         .progress = [&](const BuildProgress& p) {
                                           ++calls;
                                           EXPECT_EQ(p.files_total, 3);
                                         }});
  ASSERT_TRUE(summary.ok()) << ToString(summary.status());
  EXPECT_EQ(summary->tokens, 4);
  EXPECT_EQ(summary->documents, 2);
  EXPECT_EQ(summary->files, 2);
  EXPECT_EQ(summary->skipped, 2);
  EXPECT_EQ(calls, 3);
  auto dataset = OpenTokenDataset(Fs(), dir.File("out"));
  std::vector<std::int32_t> tokens(4);
  ASSERT_TRUE((*dataset)->Read(0, tokens).ok());
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{'a', 'b', 'z', 'z'}));
  auto limited = BuildByteDataset(
      Fs(), {.inputs = {dir.File("in")}, .output = dir.File("o2"), .max_bytes = 3});
  ASSERT_TRUE(limited.ok());
  EXPECT_EQ(limited->tokens, 3);
}

TEST(BuildByteDatasetTest, MissingInputChangesNothing) {
  TempDir dir;
  const auto summary =
      BuildByteDataset(Fs(), {.inputs = {dir.File("nowhere")}, .output = dir.File("out")});
  EXPECT_EQ(summary.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(Message(summary.status()).find("nowhere"), std::string::npos);
  EXPECT_FALSE(Fs().Exists(dir.File("out")));
}

// Megatron's format, written from its description by independent code.
struct MegatronWriter {
  std::uint8_t code = 8;
  int width = 2;
  std::string bin;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> documents = {0};

  void Sequence(const std::vector<std::int64_t>& tokens) {
    offsets.push_back(static_cast<std::int64_t>(bin.size()));
    lengths.push_back(static_cast<std::int32_t>(tokens.size()));
    for (std::int64_t t : tokens) {
      for (int b = 0; b < width; ++b) {
        bin += static_cast<char>((static_cast<std::uint64_t>(t) >> (8 * b)) & 0xFF);
      }
    }
  }
  void EndDocument() { documents.push_back(static_cast<std::int64_t>(lengths.size())); }
  static void Little(std::string* out, std::uint64_t value, int bytes) {
    for (int b = 0; b < bytes; ++b) {
      *out += static_cast<char>((value >> (8 * b)) & 0xFF);
    }
  }
  std::string Index() const {
    std::string idx("MMIDIDX\0\0", 9);
    Little(&idx, 1, 8);
    Little(&idx, code, 1);
    Little(&idx, lengths.size(), 8);
    Little(&idx, documents.size(), 8);
    for (auto v : lengths) Little(&idx, static_cast<std::uint32_t>(v), 4);
    for (auto v : offsets) Little(&idx, static_cast<std::uint64_t>(v), 8);
    for (auto v : documents) Little(&idx, static_cast<std::uint64_t>(v), 8);
    return idx;
  }
};

TEST(MegatronTest, ReadsEveryIntegerWidthAcrossSequences) {
  const struct {
    std::uint8_t code;
    int width;
    std::int64_t largest;
  } types[] = {{1, 1, 255},        {2, 1, 127},        {3, 2, 32767},
               {4, 4, 2147483647}, {5, 8, 2147483647}, {8, 2, 65535}};
  for (const auto& type : types) {
    TempDir dir;
    MegatronWriter writer{.code = type.code, .width = type.width};
    std::mt19937 rng(type.code);
    std::vector<std::int32_t> all;
    for (int s = 0; s < 20; ++s) {
      std::vector<std::int64_t> tokens(rng() % 9);  // some are empty
      for (auto& t : tokens) {
        t = static_cast<std::int64_t>(rng()) % (type.largest + 1);
        all.push_back(static_cast<std::int32_t>(t));
      }
      writer.Sequence(tokens);
      if (s % 3 == 0) {
        writer.EndDocument();
      }
    }
    WriteBytes(dir.File("d.bin"), writer.bin);
    WriteBytes(dir.File("d.idx"), writer.Index());
    for (const char* name : {"d", "d.bin", "d.idx"}) {
      auto dataset = OpenTokenDataset(Fs(), dir.File(name));
      ASSERT_TRUE(dataset.ok()) << ToString(dataset.status());
      ASSERT_EQ((*dataset)->token_count(), static_cast<std::int64_t>(all.size()));
      EXPECT_EQ((*dataset)->document_count(), 7);
      for (std::size_t at = 0; at + 5 <= all.size(); ++at) {
        std::vector<std::int32_t> part(5);
        ASSERT_TRUE((*dataset)->Read(static_cast<std::int64_t>(at), part).ok());
        EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + static_cast<long>(at)));
      }
    }
  }
}

TEST(MegatronTest, RandomDamageIsRefusedOrHarmlessNeverACrash) {
  MegatronWriter writer;
  for (int s = 0; s < 10; ++s) {
    writer.Sequence({1, 2, 3, 4, 5});
    writer.EndDocument();
  }
  const std::string idx = writer.Index();
  TempDir dir;
  WriteBytes(dir.File("d.bin"), writer.bin);
  std::mt19937 rng(3);
  int refused = 0;
  for (int trial = 0; trial < 300; ++trial) {
    std::string damaged = idx;
    if (trial % 3 == 0) {
      damaged.resize(rng() % damaged.size());
    } else {
      damaged[rng() % damaged.size()] = static_cast<char>(rng());
    }
    WriteBytes(dir.File("d.idx"), damaged);
    auto dataset = OpenTokenDataset(Fs(), dir.File("d"));
    if (!dataset.ok()) {
      ++refused;
      EXPECT_FALSE(Message(dataset.status()).empty());
      continue;
    }
    std::vector<std::int32_t> all(static_cast<std::size_t>((*dataset)->token_count()));
    (*dataset)->Read(0, all).IgnoreError();
  }
  EXPECT_GT(refused, 150);
  WriteBytes(dir.File("d.idx"), idx);
  WriteBytes(dir.File("d.bin"), writer.bin.substr(0, writer.bin.size() - 1));
  EXPECT_EQ(OpenTokenDataset(Fs(), dir.File("d")).status().code(), absl::StatusCode::kDataLoss);
}

TEST(LlmcTest, ReadsBothWidthsAndRefusesACutFile) {
  for (const bool wide : {false, true}) {
    TempDir dir;
    std::string bytes;
    MegatronWriter::Little(&bytes, wide ? 20240801 : 20240520, 4);
    MegatronWriter::Little(&bytes, wide ? 7 : 1, 4);
    MegatronWriter::Little(&bytes, 100, 4);
    bytes.resize(1024, '\0');
    for (std::uint64_t i = 0; i < 100; ++i) {
      MegatronWriter::Little(&bytes, i * 300, wide ? 4 : 2);
    }
    WriteBytes(dir.File("t.bin"), bytes);
    auto dataset = OpenTokenDataset(Fs(), dir.File("t.bin"));
    ASSERT_TRUE(dataset.ok()) << ToString(dataset.status());
    std::vector<std::int32_t> part(3);
    ASSERT_TRUE((*dataset)->Read(97, part).ok());
    EXPECT_EQ(part, (std::vector<std::int32_t>{29100, 29400, 29700}));
    WriteBytes(dir.File("t.bin"), bytes.substr(0, bytes.size() - 1));
    EXPECT_EQ(OpenTokenDataset(Fs(), dir.File("t.bin")).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace octavo
