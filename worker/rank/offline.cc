#include "worker/rank/offline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "proto/precision/plan.h"
#include "worker/checkpoint/hf_import.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/store.h"
#include "worker/comm/self.h"
#include "worker/rank/state_io.h"

namespace octavo {
namespace {

constexpr std::int64_t kLogitsFileBytes = std::int64_t{2} << 30;  // held in memory while written

absl::Status LoadHfWeights(const HfWeights& weights, Transformer& model, const Backend& backend) {
  std::map<std::string, std::size_t> index;
  for (std::size_t i = 0; i < weights.sources().size(); ++i) {
    index[weights.sources()[i].stored] = i;
  }
  Parameters& parameters = model.parameters();
  std::vector<float> values;
  for (const ShardPiece& piece : HeldPieces(parameters.all(), {})) {
    const Parameter& p = parameters.all()[static_cast<std::size_t>(piece.parameter)];
    RETURN_IF_ERROR(weights.Read(index.at(piece.base), &values));
    OCTAVO_CHECK_EQ(static_cast<std::int64_t>(values.size()), piece.count);
    backend.ops->copy(backend.context, {.dst = p.master + piece.local_first,
                                        .src = values.data(),
                                        .bytes = piece.count * 4,
                                        .kind = CopyKind::kToDevice});
    backend.ops->synchronize(backend.context);  // `values` is used again
  }
  model.ParametersLoaded();
  return absl::OkStatus();
}

// SplitMix64: the number at `index` of the stream of `seed`, in [0, 1).
double UniformAt(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15u * (index + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

absl::Status CheckTokens(std::span<const std::int32_t> tokens, std::int64_t vocab,
                         const std::string& where) {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= vocab) {
      return DataLossError(
          StrCat(where, ": token ", token, "; the model's vocabulary is 0 to ", vocab - 1));
    }
  }
  return absl::OkStatus();
}

// Tokens and logits of every pass, written at the end.
class LogitsFile {
 public:
  LogitsFile(const std::string& path, OfflineModel& model) : path_(path), model_(model) {}

  absl::Status Add(std::span<const std::int32_t> tokens, std::int64_t sequences) {
    const std::int64_t rows = sequences * model_.sequence_length(), vocab = model_.model().vocab;
    if ((static_cast<std::int64_t>(logits_.size()) + rows * vocab) * 4 > kLogitsFileBytes) {
      return InvalidArgumentError(StrCat(path_, ": logits of more than ", kLogitsFileBytes,
                                         " bytes; evaluate fewer sequences"));
    }
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.begin() + rows);
    const std::size_t before = logits_.size();
    logits_.resize(before + static_cast<std::size_t>(rows * vocab));
    return model_.Logits(tokens, 0, rows, std::span<float>(logits_).subspan(before));
  }
  absl::Status Write(FileSystem& fs) const {
    const std::int64_t length = model_.sequence_length();
    const std::int64_t n = static_cast<std::int64_t>(tokens_.size()) / length;
    const HostTensor tensors[] = {
        {.name = "tokens", .dtype = DType::kI32, .shape = {n, length}, .data = tokens_.data()},
        {.name = "logits", .shape = {n, length, model_.model().vocab}, .data = logits_.data()}};
    // Under its own name only when whole: a full disk leaves nothing that looks like logits.
    const std::string partial = path_ + ".partial";
    absl::Status status = WriteSafetensors(fs, partial, tensors, {}).status();
    if (status.ok()) {
      status = fs.Rename(partial, path_);
    }
    if (!status.ok()) {
      fs.Remove(partial).IgnoreError();
    }
    return status;
  }

 private:
  const std::string path_;
  OfflineModel& model_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> logits_;
};

}  // namespace

OfflineModel::OfflineModel(const OfflineModelOptions& options)
    : options_(options),
      sequence_length_(options.sequence_length),
      self_(CreateSelfCommunicator()),
      arena_(options.backend, "offline") {}

absl::StatusOr<std::unique_ptr<OfflineModel>> OfflineModel::Open(
    const FileSystem& fs, const OfflineModelOptions& options) {
  auto model = std::unique_ptr<OfflineModel>(new OfflineModel(options));
  RETURN_IF_ERROR(model->Load(fs));
  return model;
}

absl::Status OfflineModel::Load(const FileSystem& fs) {
  const auto use_length = [this](std::int64_t known) {
    if (sequence_length_ == 0) {
      sequence_length_ = known > 0 ? known : kUnknownSequenceLength;
    }
  };
  if (IsHfFolder(fs, options_.path)) {
    ASSIGN_OR_RETURN(const std::unique_ptr<HfWeights> weights, HfWeights::Open(fs, options_.path));
    source_ = options_.path;
    model_ = weights->config().model;
    use_length(weights->default_sequence_length());
    RETURN_IF_ERROR(Build());
    return LoadHfWeights(*weights, *transformer_, options_.backend);
  }
  ASSIGN_OR_RETURN(source_, FindCheckpoint(fs, options_.path));
  ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                   CheckpointReader::Open(fs, source_));
  model_ = reader->manifest().model;
  step_ = reader->manifest().state.step;
  use_length(reader->manifest().sequence_length);
  RETURN_IF_ERROR(reader->VerifyShards());
  RETURN_IF_ERROR(Build());
  return LoadWeights(*reader, *transformer_, options_.backend, {}, [] { return false; });
}

absl::Status OfflineModel::Build() {
  const std::int64_t tokens = sequence_length_ * options_.sequences;
  tokens_ = arena_.Take<std::int32_t>(tokens);
  targets_ = arena_.Take<std::int32_t>(tokens);
  if (arena_.failed()) {
    return ResourceExhaustedError(StrCat("no memory for ", tokens * 8, " bytes of tokens"));
  }
  const auto layers = static_cast<std::size_t>(model_.layers);
  ASSIGN_OR_RETURN(
      transformer_,
      Transformer::Create({.model = model_,
                           .run = {.sequence_length = sequence_length_,
                                   .microbatch_sequences = options_.sequences,
                                   .fp32 = options_.recipe == RecipeKind::kFp32,
                                   .recompute = std::vector<bool>(layers, true),
                                   .allow_emulation = true},
                           .optimizer = {.moment_dtype = DType::kBF16},
                           .backend = options_.backend,
                           .comms = {.world = self_.get(),
                                     .expert_parallel = self_.get(),
                                     .expert_data = self_.get()},
                           .plan = BuildPlan(model_.layers, DefaultRecipe(options_.recipe),
                                             /*protect=*/0, {})}));
  return absl::OkStatus();
}

void OfflineModel::ToDevice(std::span<const std::int32_t> host, std::int32_t* device) {
  const Backend& backend = options_.backend;
  backend.ops->copy(backend.context, {.dst = device,
                                      .src = host.data(),
                                      .bytes = static_cast<std::int64_t>(host.size_bytes()),
                                      .kind = CopyKind::kToDevice});
  backend.ops->synchronize(backend.context);  // the caller may change `host` at once
}

absl::Status OfflineModel::Loss(std::span<const std::int32_t> tokens,
                                std::span<const std::int32_t> targets, double* loss_sum) {
  OCTAVO_CHECK_EQ(static_cast<std::int64_t>(tokens.size()), sequence_length() * sequences());
  OCTAVO_CHECK_EQ(tokens.size(), targets.size());
  ToDevice(tokens, tokens_);
  ToDevice(targets, targets_);
  return transformer_->Evaluate(tokens_, targets_, loss_sum);
}

absl::Status OfflineModel::Logits(std::span<const std::int32_t> tokens, std::int64_t first,
                                  std::int64_t rows, std::span<float> out) {
  OCTAVO_CHECK_EQ(static_cast<std::int64_t>(tokens.size()), sequence_length() * sequences());
  OCTAVO_CHECK_EQ(static_cast<std::int64_t>(out.size()), rows * model_.vocab);
  ToDevice(tokens, tokens_);
  return transformer_->Logits(tokens_, first, rows, out.data());
}

absl::StatusOr<EvaluationResult> EvaluateDataset(FileSystem& fs, OfflineModel& model,
                                                 std::shared_ptr<const TokenDataset> dataset,
                                                 const EvaluationOptions& options) {
  const std::string path = dataset->path();
  const TokenRegion region =
      options.region.size() > 0 ? options.region : TokenRegion{0, dataset->token_count()};
  const std::int64_t length = model.sequence_length();
  ASSIGN_OR_RETURN(const SampleSource source,
                   SampleSource::Create(std::move(dataset), {.region = region,
                                                             .sequence_length = length,
                                                             .documents = options.documents}));
  const std::int64_t total = options.sequences_max > 0
                                 ? std::min(options.sequences_max, source.samples())
                                 : source.samples();
  LogitsFile logits(options.logits_file, model);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(length * model.sequences()));
  std::vector<std::int32_t> targets(tokens.size());
  EvaluationResult result;
  double loss_sum = 0;
  while (result.sequences < total) {
    // The last pass may be short: its rest is padding without loss.
    std::fill(tokens.begin(), tokens.end(), 0);
    std::fill(targets.begin(), targets.end(), -1);
    const std::int64_t n = std::min<std::int64_t>(model.sequences(), total - result.sequences);
    for (std::int64_t s = 0; s < n; ++s) {
      const auto at = static_cast<std::size_t>(s * length), size = static_cast<std::size_t>(length);
      RETURN_IF_ERROR(source.Read(result.sequences + s, std::span(tokens).subspan(at, size),
                                  std::span(targets).subspan(at, size)));
    }
    RETURN_IF_ERROR(CheckTokens(tokens, model.model().vocab, path));
    const auto worst = std::max_element(targets.begin(), targets.end());
    RETURN_IF_ERROR(CheckTokens({&*worst, *worst >= 0 ? 1u : 0u}, model.model().vocab, path));
    RETURN_IF_ERROR(model.Loss(tokens, targets, &loss_sum));
    if (!options.logits_file.empty()) {
      RETURN_IF_ERROR(logits.Add(tokens, n));
    }
    result.sequences += n;
    result.tokens +=
        static_cast<std::int64_t>(targets.size()) - std::count(targets.begin(), targets.end(), -1);
    if (options.progress) {
      options.progress(result.sequences, total);
    }
  }
  result.loss = loss_sum / static_cast<double>(std::max<std::int64_t>(result.tokens, 1));
  result.perplexity = std::exp(result.loss);
  if (!std::isfinite(result.loss)) {
    return DataLossError(StrCat("evaluating ", model.source(), " on ", path, ": the loss is ",
                                result.loss, "; the weights are damaged or have diverged"));
  }
  if (!options.logits_file.empty()) {
    RETURN_IF_ERROR(logits.Write(fs));
  }
  return result;
}

std::int32_t ChooseToken(std::span<const float> logits, const SamplingOptions& options,
                         double uniform) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options.temperature <= 0) {
    return static_cast<std::int32_t>(best - logits.begin());
  }
  std::vector<double> weight(logits.size());
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weight[i] = std::exp((static_cast<double>(logits[i]) - *best) / options.temperature);
    total += weight[i];
  }
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&weight](std::int32_t a, std::int32_t b) {
    return weight[static_cast<std::size_t>(a)] > weight[static_cast<std::size_t>(b)];
  });
  double kept = 0;
  std::size_t count = 0;
  while (count < order.size() && (count == 0 || kept < options.top_p * total)) {
    kept += weight[static_cast<std::size_t>(order[count++])];
  }
  double left = uniform * kept;
  for (std::size_t i = 0; i < count; ++i) {
    left -= weight[static_cast<std::size_t>(order[i])];
    if (left < 0) {
      return order[i];
    }
  }
  return order[count - 1];  // the sum above was rounded
}

absl::Status Generate(OfflineModel& model, std::span<const std::int32_t> prompt,
                      const SamplingOptions& options,
                      const std::function<bool(std::int32_t token)>& on_token) {
  if (prompt.empty()) {
    return InvalidArgumentError("generating: the prompt is empty; valid is at least one token");
  }
  RETURN_IF_ERROR(CheckTokens(prompt, model.model().vocab, "the prompt"));
  const auto length = static_cast<std::size_t>(model.sequence_length() * model.sequences());
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  std::vector<float> logits(static_cast<std::size_t>(model.model().vocab));
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    // Attention is causal: what fills the rest of the window changes nothing before it.
    std::vector<std::int32_t> window(length, 0);
    const std::size_t seen =
        std::min(text.size(), static_cast<std::size_t>(model.sequence_length()));
    std::copy(text.end() - static_cast<std::ptrdiff_t>(seen), text.end(), window.begin());
    RETURN_IF_ERROR(model.Logits(window, static_cast<std::int64_t>(seen) - 1, 1, logits));
    if (!std::all_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); })) {
      return DataLossError(StrCat("generating from ", model.source(),
                                  ": logits are not finite; the weights are damaged or have "
                                  "diverged"));
    }
    const std::int32_t token =
        ChooseToken(logits, options, UniformAt(options.seed, static_cast<std::uint64_t>(i)));
    text.push_back(token);
    if (!on_token(token)) {
      break;
    }
  }
  return absl::OkStatus();
}

int OfflineExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kResourceExhausted:
      return 1;
    case absl::StatusCode::kInvalidArgument:
      return 2;
    case absl::StatusCode::kNotFound:
      return 3;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
      return 4;
    case absl::StatusCode::kPermissionDenied:
      return 8;
    default:
      return 7;
  }
}

}  // namespace octavo
