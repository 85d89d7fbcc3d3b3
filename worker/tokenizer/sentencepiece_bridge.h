// The only contact with libsentencepiece, in std types. Its header declares an absl::string_view of
// its own, which cannot stand beside Abseil's in one translation unit; sentencepiece_tokenizer.h is
// what the rest of Octavo uses. Errors are texts, empty for success; nothing throws.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace octavo::sentencepiece_bridge {

class Model {
 public:
  Model();
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  std::string Load(std::string_view serialized);
  // Const calls are thread-safe.
  std::string Encode(std::string_view text, std::vector<int>* ids) const;
  std::string Decode(const std::vector<int>& ids, std::string* text) const;
  int vocab_size() const;
  int end_id() const;  // of a document; −1: the model has none

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct TrainArgs {
  int vocab_size = 0;
  std::string type;  // "bpe" or "unigram"
  int threads = 1;
  double character_coverage = 0;
  // The next line of text, or false at the end.
  std::function<bool(std::string* line)> next;
};
std::string Train(const TrainArgs& args, std::string* serialized);

}  // namespace octavo::sentencepiece_bridge
