#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/support/faulty_fs.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/worker/checkpoint/hf_fixture.h"
#include "worker/checkpoint/hf_export.h"
#include "worker/checkpoint/reader.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

// BF16 by arithmetic instead of bits: the nearest multiple of the place value, ties to even.
float NearestBf16(float x) {
  if (x == 0) {
    return x;
  }
  int exponent;
  std::frexp(x, &exponent);
  const double place = std::ldexp(1.0, exponent - 8);  // 8 bits of significand
  return static_cast<float>(std::nearbyint(static_cast<double>(x) / place) * place);
}

// E4M3 by its definition (OCP FP8 specification): sign, 4 bits of exponent with bias 7, 3 of
// mantissa.
float E4M3ByDefinition(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? mantissa * std::ldexp(1.0, -9)
                                         : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return static_cast<float>(code >> 7 ? -magnitude : magnitude);
}

// Values of a tensor of a folder, by name, whichever file it is in.
template <class T>
std::vector<T> ReadTensor(const std::string& folder, const std::string& name) {
  const auto files = Fs().ListDirectory(folder);
  for (const std::string& file : *files) {
    if (file.size() < 12 || file.substr(file.size() - 12) != ".safetensors") {
      continue;
    }
    const auto open = SafetensorsFile::Open(Fs(), JoinPath(folder, file));
    const SafetensorsEntry* entry = (*open)->Find(name);
    if (entry != nullptr) {
      std::vector<T> out(static_cast<std::size_t>(entry->bytes) / sizeof(T));
      EXPECT_TRUE((*open)
                      ->Read(*entry, {reinterpret_cast<char*>(out.data()), out.size() * sizeof(T)})
                      .ok());
      return out;
    }
  }
  ADD_FAILURE() << name << " is in no file of " << folder;
  return {};
}

Weights ReadMasters(const std::string& checkpoint) {
  Weights weights;
  const auto reader = CheckpointReader::Open(Fs(), checkpoint);
  EXPECT_TRUE(reader.ok()) << ToString(reader.status());
  for (const HfSources& s : HfSourcesOf((*reader)->manifest().model)) {
    std::vector<float>& values = weights[s.stored];
    values.resize(static_cast<std::size_t>((*reader)->Find(s.stored + "/master")->bytes) / 4);
    EXPECT_TRUE((*reader)
                    ->Read(s.stored + "/master", DType::kF32,
                           {reinterpret_cast<char*>(values.data()), values.size() * 4})
                    .ok());
  }
  return weights;
}

class HfRoundTripTest : public testing::TestWithParam<bool> {
 protected:
  HfRoundTripTest() : seed_(std::random_device{}()), weights_(RandomWeights(model_, seed_)) {
    std::printf("seed %u\n", seed_);
    checkpoint_ = WriteCheckpoint(Fs(), dir_.File("job"), model_, weights_);
  }
  HfExportSummary Export(HfFormat format, std::int64_t shard_bytes = 1 << 30) {
    const auto summary = ExportToHf(Fs(), {.checkpoint = checkpoint_,
                                           .folder = dir_.File("hf"),
                                           .format = format,
                                           .shard_bytes = shard_bytes});
    EXPECT_TRUE(summary.ok()) << ToString(summary.status());
    return *summary;
  }
  HfImportSummary Import() {
    const auto summary =
        ImportFromHf(Fs(), {.folder = dir_.File("hf"), .output = dir_.File("start")});
    EXPECT_TRUE(summary.ok()) << ToString(summary.status());
    return *summary;
  }

  TempDir dir_;
  const ModelConfig model_ = GetParam() ? SmallMixtral() : SmallQwen();
  const unsigned seed_;
  const Weights weights_;
  std::string checkpoint_;
};
INSTANTIATE_TEST_SUITE_P(Families, HfRoundTripTest, testing::Bool(), [](const auto& family) {
  return std::string(family.param ? "Mixtral" : "Qwen3Moe");
});

TEST_P(HfRoundTripTest, Bf16ComesBackRoundedOnceBitForBit) {
  EXPECT_EQ(Export(HfFormat::kBf16).step, 12);
  const HfImportSummary imported = Import();
  EXPECT_FALSE(imported.fp8);
  const Weights back = ReadMasters(imported.checkpoint);
  ASSERT_EQ(back.size(), weights_.size());
  for (const auto& [name, values] : weights_) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back.at(name)[i]),
                std::bit_cast<std::uint32_t>(NearestBf16(values[i])))
          << name << " element " << i << ": " << values[i];
    }
  }
  EXPECT_TRUE(VerifyCheckpoint(Fs(), imported.checkpoint).ok());
  EXPECT_EQ(*FindCheckpoint(Fs(), dir_.File("start")), imported.checkpoint);
}

// The exporter is compared with the definition: amax of the block, Q = 448 / amax, D = 1 / Q, the
// code nearest to x·Q; and the importer with q·D, all by other code than the product's.
TEST_P(HfRoundTripTest, Fp8BlocksHoldTheNearestCodesAndComeBackAsCodeTimesScale) {
  Export(HfFormat::kFp8);
  const Weights back = ReadMasters(Import().checkpoint);
  std::int64_t checked = 0;
  for (const HfTensor& t : HfTensors(model_)) {
    if (!t.quantised) {
      continue;
    }
    const auto codes = ReadTensor<std::uint8_t>(dir_.File("hf"), t.name);
    const auto dequant_scale = ReadTensor<float>(dir_.File("hf"), HfScaleName(t.name));
    const float* ours = weights_.at(t.stored).data() + t.first_row * t.cols();
    const float* imported = back.at(t.stored).data() + t.first_row * t.cols();
    const std::int64_t across = (t.cols() + 127) / 128;
    std::vector<float> amax(dequant_scale.size());
    const auto block = [&](std::int64_t i) {
      return static_cast<std::size_t>(i / t.cols() / 128 * across + i % t.cols() / 128);
    };
    for (std::int64_t i = 0; i < t.rows() * t.cols(); ++i) {
      amax[block(i)] = std::max(amax[block(i)], std::fabs(ours[i]));
    }
    for (std::int64_t i = 0; i < t.rows() * t.cols(); ++i) {
      const float q = amax[block(i)] == 0 ? 1.0f : 448.0f / amax[block(i)];
      ASSERT_EQ(dequant_scale[block(i)], 1.0f / q) << t.name;
      const std::uint8_t code = codes[static_cast<std::size_t>(i)];
      const float value = E4M3ByDefinition(code);
      ASSERT_EQ(imported[i], value * dequant_scale[block(i)]) << t.name << " element " << i;
      // No code is nearer to what was to be stored.
      const double wanted = static_cast<double>(ours[i] * q);
      const std::uint8_t sign = code & 0x80, magnitude = code & 0x7f;
      for (const int step : {-1, 1}) {
        const int other = magnitude + step;
        if (other >= 0 && other < 0x7f) {
          ASSERT_LE(std::fabs(value - wanted),
                    std::fabs(E4M3ByDefinition(static_cast<std::uint8_t>(sign | other)) - wanted))
              << t.name << " element " << i;
        }
      }
      ++checked;
    }
  }
  EXPECT_GT(checked, 100000);
  for (const HfTensor& t : HfTensors(model_)) {
    if (!t.quantised) {
      const auto bits = ReadTensor<std::uint16_t>(dir_.File("hf"), t.name);
      EXPECT_EQ(bits.size(), static_cast<std::size_t>(t.rows() * t.cols())) << t.name;
    }
  }
}

TEST_P(HfRoundTripTest, ManyShardsHoldEachTensorOnceAndTheIndexFindsIt) {
  const HfExportSummary summary = Export(HfFormat::kFp8, /*shard_bytes=*/40000);
  EXPECT_GT(summary.shards, 5);
  const auto index = nlohmann::json::parse(
      *Fs().ReadFile(JoinPath(dir_.File("hf"), "model.safetensors.index.json")));
  EXPECT_EQ(static_cast<std::int64_t>(index["weight_map"].size()), summary.tensors);
  EXPECT_EQ(index["metadata"]["total_size"], summary.bytes);
  for (const auto& [name, file] : index["weight_map"].items()) {
    const auto open =
        SafetensorsFile::Open(Fs(), JoinPath(dir_.File("hf"), file.get<std::string>()));
    ASSERT_TRUE(open.ok()) << ToString(open.status());
    EXPECT_NE((*open)->Find(name), nullptr) << name;
    if (name.find("_scale_inv") != std::string::npos) {
      EXPECT_EQ(index["weight_map"][name.substr(0, name.size() - 10)], file)
          << "a weight and its scales are in one file";
    }
  }
  Import();
}

TEST_P(HfRoundTripTest, AnExportNeverWritesIntoAFolderThatExistsAndLeavesNothingWhenItFails) {
  Export(HfFormat::kBf16);
  const auto again = ExportToHf(
      Fs(), {.checkpoint = checkpoint_, .folder = dir_.File("hf"), .format = HfFormat::kBf16});
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);

  Weights broken = weights_;
  broken.begin()->second[3] = std::nanf("");
  const std::string bad = WriteCheckpoint(Fs(), dir_.File("bad"), model_, broken);
  const auto refused = ExportToHf(Fs(), {.checkpoint = bad, .folder = dir_.File("hf2")});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(refused.status()), HasSubstr("holds nan"));
  EXPECT_FALSE(Fs().Exists(dir_.File("hf2")));
  EXPECT_FALSE(Fs().Exists(dir_.File("hf2.partial")));
}

TEST_P(HfRoundTripTest, MissingForeignAndMisshapenTensorsAreRefusedByName) {
  Export(HfFormat::kBf16);
  const auto refusal = [this](const std::string& file, const HostTensor& extra) {
    EXPECT_TRUE(WriteSafetensors(Fs(), JoinPath(dir_.File("hf"), file), {{extra}}, {}).ok());
    const std::string text = Message(
        ImportFromHf(Fs(), {.folder = dir_.File("hf"), .output = dir_.File("start")}).status());
    EXPECT_TRUE(Fs().Remove(JoinPath(dir_.File("hf"), file)).ok());
    return text;
  };
  const float values[4] = {};
  const std::string bias = "model.layers.0.self_attn.q_proj.bias";
  EXPECT_THAT(refusal("extra.safetensors", {.name = bias, .shape = {4}, .data = values}),
              HasSubstr(bias + " has no place"));
  EXPECT_THAT(
      refusal("twice.safetensors", {.name = "model.norm.weight", .shape = {4}, .data = values}),
      HasSubstr("model.norm.weight is in two files"));
  // The only file replaced by one tensor: all others are missing.
  const std::string whole = "model-00001-of-00001.safetensors";
  EXPECT_THAT(refusal(whole, {.name = "model.embed_tokens.weight", .shape = {4}, .data = values}),
              HasSubstr("model.embed_tokens.weight is [4]; config.json gives [200, 96]"));
  EXPECT_FALSE(Fs().Exists(dir_.File("start"))) << "a refused import leaves nothing";
}

// Every tensor of a folder with its bytes.
struct Stored {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};
std::map<std::string, Stored> ReadAll(const std::string& file) {
  std::map<std::string, Stored> all;
  const auto open = SafetensorsFile::Open(Fs(), file);
  for (const auto& [name, entry] : (*open)->entries()) {
    Stored& t = all[name];
    t = {entry.dtype, entry.shape, std::string(static_cast<std::size_t>(entry.bytes), '\0')};
    EXPECT_TRUE((*open)->Read(entry, t.bytes).ok());
  }
  return all;
}
void WriteAll(const std::string& file, const std::map<std::string, Stored>& all) {
  std::vector<HostTensor> tensors;
  for (const auto& [name, t] : all) {
    tensors.push_back({.name = name, .dtype = t.dtype, .shape = t.shape, .data = t.bytes.data()});
  }
  EXPECT_TRUE(WriteSafetensors(Fs(), file, tensors, {{"format", "pt"}}).ok());
}

// The folder as transformers 5 writes it with save_original_format=False: experts stacked into
// [E, 2F, H] and [E, H, F] (scales alike), Mixtral's block called mlp.
std::map<std::string, Stored> StackExperts(std::map<std::string, Stored> all,
                                           const ModelConfig& model) {
  const bool mixtral = model.family == ModelFamily::kMixtral;
  std::map<std::string, Stored> out;
  for (std::int32_t l = 0; l < model.layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string from = layer + (mixtral ? "block_sparse_moe." : "mlp.");
    for (std::int32_t e = 0; e < model.experts && !model.is_dense(l); ++e) {
      const std::string expert = from + "experts." + std::to_string(e) + ".";
      const auto move = [&](const std::string& stack, const std::string& part) {
        for (const char* suffix : {"", "_scale_inv"}) {
          const auto it = all.find(expert + part + ".weight" + suffix);
          if (it == all.end()) {
            continue;
          }
          Stored& t = out[layer + "mlp.experts." + stack + suffix];
          t.dtype = it->second.dtype;
          const std::int64_t rows = it->second.shape[0] * (stack == "gate_up_proj" ? 2 : 1);
          t.shape = {model.experts, rows, it->second.shape[1]};
          t.bytes += it->second.bytes;
          all.erase(it);
        }
      };
      move("gate_up_proj", mixtral ? "w1" : "gate_proj");
      move("gate_up_proj", mixtral ? "w3" : "up_proj");
      move("down_proj", mixtral ? "w2" : "down_proj");
    }
    if (const auto gate = all.find(from + "gate.weight"); gate != all.end()) {
      out[layer + "mlp.gate.weight"] = gate->second;
      all.erase(gate);
    }
  }
  out.insert(all.begin(), all.end());
  return out;
}

TEST_P(HfRoundTripTest, AnIndexThatIsCutOrNamesWhatIsNotInTheFolderIsDamage) {
  Export(HfFormat::kBf16);
  const std::string path = JoinPath(dir_.File("hf"), "model.safetensors.index.json");
  const std::string good = *Fs().ReadFile(path);
  const auto status = [&](const std::string& text) {
    EXPECT_TRUE(Fs().WriteFileAtomic(path, text).ok());
    return ImportFromHf(Fs(), {.folder = dir_.File("hf"), .output = dir_.File("start")}).status();
  };
  EXPECT_EQ(status(good.substr(0, good.size() / 2)).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status("[]").code(), absl::StatusCode::kDataLoss);
  for (const char* file : {"model-00002-of-00002.safetensors", "../hf/config.json", "..", "/dev"}) {
    nlohmann::json index = nlohmann::json::parse(good);
    index["weight_map"]["model.norm.weight"] = file;
    const absl::Status bad = status(index.dump());
    EXPECT_EQ(bad.code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_THAT(Message(bad), HasSubstr(std::string("tensor model.norm.weight is in ") + file));
    EXPECT_FALSE(Fs().Exists(dir_.File("start"))) << file;
  }
  EXPECT_TRUE(status(good).ok());
}

TEST_P(HfRoundTripTest, NegativeAndNonFiniteScalesAreDamage) {
  Export(HfFormat::kFp8);
  const std::string file = JoinPath(dir_.File("hf"), "model-00001-of-00001.safetensors");
  const std::map<std::string, Stored> good = ReadAll(file);
  const std::string name = "model.layers.0.self_attn.q_proj.weight_scale_inv";
  for (const float value : {-1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::map<std::string, Stored> bad = good;
    std::memcpy(bad.at(name).bytes.data(), &value, sizeof(value));
    WriteAll(file, bad);
    const absl::Status status =
        ImportFromHf(Fs(), {.folder = dir_.File("hf"), .output = dir_.File("start")}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << value;
    EXPECT_THAT(Message(status), HasSubstr(name + " holds "));
    EXPECT_FALSE(Fs().Exists(dir_.File("start"))) << "a failed import leaves nothing";
  }
}

TEST_P(HfRoundTripTest, AFullDiskLeavesNoFolderOfTheImport) {
  Export(HfFormat::kBf16);
  FaultyFileSystem fs(&Fs());
  fs.FailWritesAfterBytes(100000);
  const absl::Status status =
      ImportFromHf(fs, {.folder = dir_.File("hf"), .output = dir_.File("start")}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << ToString(status);
  EXPECT_FALSE(Fs().Exists(dir_.File("start")));
}

TEST_P(HfRoundTripTest, StackedExpertsAreTheSameWeightsAsExpertsOneByOne) {
  for (const HfFormat format : {HfFormat::kBf16, HfFormat::kFp8}) {
    Export(format);
    const Weights one_by_one = ReadMasters(Import().checkpoint);
    const std::string file = JoinPath(dir_.File("hf"), "model-00001-of-00001.safetensors");
    const std::map<std::string, Stored> stacked = StackExperts(ReadAll(file), model_);
    ASSERT_TRUE(stacked.contains("model.layers.0.mlp.experts.gate_up_proj"));
    WriteAll(file, stacked);
    EXPECT_TRUE(Fs().RemoveTree(dir_.File("start")).ok());
    EXPECT_TRUE(ReadMasters(Import().checkpoint) == one_by_one);

    // A stack of another size is refused with both shapes.
    std::map<std::string, Stored> wrong = stacked;
    std::vector<std::int64_t>& shape = wrong.at("model.layers.0.mlp.experts.down_proj").shape;
    std::swap(shape[1], shape[2]);
    WriteAll(file, wrong);
    const std::string text = Message(
        ImportFromHf(Fs(), {.folder = dir_.File("hf"), .output = dir_.File("bad")}).status());
    EXPECT_THAT(text, HasSubstr("model.layers.0.mlp.experts.down_proj is [4, 160, 96]"));
    EXPECT_THAT(text, HasSubstr("[4, 96, 160]"));
    EXPECT_TRUE(Fs().RemoveTree(dir_.File("hf")).ok());
    EXPECT_TRUE(Fs().RemoveTree(dir_.File("start")).ok());
  }
}

// Every finite half-precision number, against its definition.
TEST_P(HfRoundTripTest, HalfPrecisionWidensExactly) {
  Export(HfFormat::kBf16);
  const std::string file = JoinPath(dir_.File("hf"), "model-00001-of-00001.safetensors");
  std::map<std::string, Stored> all = ReadAll(file);
  Stored& embedding = all.at("model.embed_tokens.weight");
  const std::size_t count = embedding.bytes.size() / 2;
  std::vector<std::uint16_t> bits(count);
  for (std::size_t first = 0; first < 65536; first += count) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto code = static_cast<std::uint16_t>(first + i);
      bits[i] = (code & 0x7c00) == 0x7c00 ? std::uint16_t{0} : code;
    }
    embedding.bytes.assign(reinterpret_cast<const char*>(bits.data()), count * 2);
    WriteAll(file, all);
    // BF16 and F16 have the same size: only the header's word changes, padded to the same length.
    std::string text = *Fs().ReadFile(file);
    const std::size_t at = text.find("BF16", text.find("model.embed_tokens.weight"));
    text.replace(at - 1, 6, "\"F16\" ");
    ASSERT_TRUE(Fs().WriteFileAtomic(file, text).ok());
    const std::vector<float> read = ReadMasters(Import().checkpoint).at("embedding.weight");
    for (std::size_t i = 0; i < count; ++i) {
      const int exponent = bits[i] >> 10 & 31;
      const double fraction = (bits[i] & 1023) / 1024.0;
      const double value = exponent == 0 ? std::pow(2.0, -14) * fraction
                                         : std::pow(2.0, exponent - 15) * (1 + fraction);
      const auto expected = static_cast<float>(bits[i] >= 0x8000 ? -value : value);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(read[i]), std::bit_cast<std::uint32_t>(expected))
          << "code " << bits[i];
    }
    EXPECT_TRUE(Fs().RemoveTree(dir_.File("start")).ok());
  }
}

TEST(HfExportTest, ARefusedArchitectureIsNamedBeforeAnythingIsWritten) {
  TempDir dir;
  ModelConfig model = SmallMixtral();
  model.shared_experts = 0;
  model.router.score = RouterScore::kSigmoid;
  const std::string checkpoint =
      WriteCheckpoint(Fs(), dir.File("job"), model, RandomWeights(model, 1));
  const auto refused = ExportToHf(Fs(), {.checkpoint = checkpoint, .folder = dir.File("hf")});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(refused.status()), HasSubstr("sigmoid scores"));
  EXPECT_FALSE(Fs().Exists(dir.File("hf")));
}

}  // namespace
}  // namespace octavo
