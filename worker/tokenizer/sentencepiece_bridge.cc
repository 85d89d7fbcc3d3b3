#include "worker/tokenizer/sentencepiece_bridge.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <unordered_map>

namespace octavo::sentencepiece_bridge {
namespace {

std::string TextOf(const sentencepiece::util::Status& status) {
  if (status.ok()) {
    return {};
  }
  const std::string text = status.ToString();  // the library exports no other text
  return text.empty() ? "failed without a message" : text;
}

class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::function<bool(std::string*)>& next) : next_(next) { Next(); }
  bool done() const override { return done_; }
  void Next() override { done_ = !next_(&line_); }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::function<bool(std::string*)>& next_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

struct Model::Impl {
  sentencepiece::SentencePieceProcessor processor;
};

Model::Model() : impl_(std::make_unique<Impl>()) {}
Model::~Model() = default;

std::string Model::Load(std::string_view serialized) {
  return TextOf(impl_->processor.LoadFromSerializedProto(serialized));
}
std::string Model::Encode(std::string_view text, std::vector<int>* ids) const {
  return TextOf(impl_->processor.Encode(text, ids));
}
std::string Model::Decode(const std::vector<int>& ids, std::string* text) const {
  return TextOf(impl_->processor.Decode(ids, text));
}
int Model::vocab_size() const { return impl_->processor.GetPieceSize(); }
int Model::end_id() const { return impl_->processor.eos_id(); }

std::string Train(const TrainArgs& args, std::string* serialized) {
  Lines lines(args.next);
  // Text is kept as it is, and bytes without a piece of their own have byte pieces, so that
  // decoding gives back every input exactly.
  const std::unordered_map<std::string, std::string> settings = {
      {"model_type", args.type},
      {"vocab_size", std::to_string(args.vocab_size)},
      {"num_threads", std::to_string(args.threads)},
      {"character_coverage", std::to_string(args.character_coverage)},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"split_digits", "true"},
      {"minloglevel", "2"},
  };
  return TextOf(sentencepiece::SentencePieceTrainer::Train(settings, &lines, serialized));
}

}  // namespace octavo::sentencepiece_bridge
