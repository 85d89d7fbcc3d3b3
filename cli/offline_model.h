// What octavo eval and octavo generate share: weights without a job, run by octavo-rank --offline,
// and the tokenizer that a text needs.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace octavo {

struct OfflineModel {
  std::string path, device = "cpu", recipe = "bf16";
  std::int64_t sequence_length = 0;  // 0: as trained
  std::int32_t device_ordinal = 0;
};

// The weights' path and where and how they run. `length_flag` is the option for the sequence
// length, `length_help` begins its help.
void AddOfflineModel(CLI::App* command, const std::string& length_flag,
                     const std::string& length_help, OfflineModel* model);
// octavo-rank's arguments for its command `verb`.
std::vector<std::string> OfflineArguments(const std::string& verb, const OfflineModel& model);

// --tokenizer: "bytes" or "sp:MODEL".
void AddTokenizer(CLI::App* command, const std::string& help, std::string* tokenizer);
// The SentencePiece model's path; nothing for bytes.
std::optional<std::string> SentencePieceModel(const std::string& tokenizer);

}  // namespace octavo
