#include "worker/data/blend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/data/order.h"

namespace octavo {
namespace {

// Its parts one after the other; what is trained when is the loader's business.
class BlendedDataset final : public TokenDataset {
 public:
  BlendedDataset(std::string path, std::vector<BlendPart> parts)
      : path_(std::move(path)), parts_(std::move(parts)) {
    for (const BlendPart& part : parts_) {
      token_ends_.push_back(token_count() + part.dataset->token_count());
      document_ends_.push_back(document_count() + part.dataset->document_count());
    }
  }

  std::int64_t token_count() const override { return token_ends_.empty() ? 0 : token_ends_.back(); }
  std::int64_t vocab_size() const override {
    std::int64_t largest = 0;
    for (const BlendPart& part : parts_) {
      largest = std::max(largest, part.dataset->vocab_size());
    }
    return largest;
  }
  std::int64_t document_count() const override {
    return document_ends_.empty() ? 0 : document_ends_.back();
  }
  std::int64_t DocumentEnd(std::int64_t index) const override {
    const std::size_t p = PartOf(document_ends_, index);
    return Begin(token_ends_, p) + parts_[p].dataset->DocumentEnd(index - Begin(document_ends_, p));
  }
  std::int32_t token_bytes() const override {
    std::int32_t widest = 0;
    for (const BlendPart& part : parts_) {
      widest = std::max(widest, part.dataset->token_bytes());
    }
    return widest;
  }
  std::string format_name() const override { return StrCat("blend of ", parts_.size()); }
  const std::string& path() const override { return path_; }
  std::span<const BlendPart> parts() const override { return parts_; }

  absl::Status Read(std::int64_t offset, std::span<std::int32_t> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    if (offset < 0 || offset > token_count() - count) {
      return OutOfRangeError(StrCat("reading tokens ", offset, " to ", offset + count, " of ",
                                    path_, ": it has ", token_count()));
    }
    while (!out.empty()) {
      const std::size_t p = PartOf(token_ends_, offset);
      const auto n = static_cast<std::size_t>(
          std::min<std::int64_t>(static_cast<std::int64_t>(out.size()), token_ends_[p] - offset));
      RETURN_IF_ERROR(parts_[p].dataset->Read(offset - Begin(token_ends_, p), out.first(n)));
      offset += static_cast<std::int64_t>(n);
      out = out.subspan(n);
    }
    return absl::OkStatus();
  }
  absl::Status Verify() const override {
    for (const BlendPart& part : parts_) {
      RETURN_IF_ERROR(part.dataset->Verify());
    }
    return absl::OkStatus();
  }

 private:
  static std::size_t PartOf(const std::vector<std::int64_t>& ends, std::int64_t index) {
    return static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), index) -
                                    ends.begin());
  }
  static std::int64_t Begin(const std::vector<std::int64_t>& ends, std::size_t part) {
    return part == 0 ? 0 : ends[part - 1];
  }

  const std::string path_;
  const std::vector<BlendPart> parts_;
  std::vector<std::int64_t> token_ends_, document_ends_;  // running sums
};

bool IsBlend(const FileSystem& fs, const std::string& path) {
  char head[sizeof(kBlendMagic) - 1];
  const absl::StatusOr<std::unique_ptr<RandomAccessFile>> file = fs.OpenForRead(path);
  return file.ok() && (*file)->ReadAt(0, head).ok() &&
         std::string_view(head, sizeof(head)) == kBlendMagic;
}

}  // namespace

absl::StatusOr<std::vector<BlendLine>> ParseBlend(std::string_view text, const std::string& path) {
  std::vector<BlendLine> lines;
  std::int64_t number = 0;
  for (const std::string& whole : StrSplit(text, '\n')) {
    ++number;
    const std::string_view line = StripSpace(whole);
    if (number == 1 || line.empty() || line[0] == '#') {
      if (number == 1 && line != kBlendMagic) {
        return InvalidArgumentError(
            StrCat(path, ":1: found \"", line, "\"; valid is \"", kBlendMagic, "\""));
      }
      continue;
    }
    const std::size_t space = line.find_first_of(" \t");
    const std::string word(line.substr(0, space));
    char* end = nullptr;
    const double weight = std::strtod(word.c_str(), &end);
    const std::string_view file =
        space == std::string_view::npos ? std::string_view() : StripSpace(line.substr(space));
    if (*end != '\0' || !std::isfinite(weight) || weight <= 0 || file.empty()) {
      return InvalidArgumentError(StrCat(path, ":", number, ": found \"", line,
                                         "\"; valid is a weight above 0, a space and a path"));
    }
    lines.push_back({.weight = weight, .path = std::string(file)});
  }
  if (lines.empty()) {
    return InvalidArgumentError(StrCat(path,
                                       ": no dataset is listed; valid are lines like \"0.7 "
                                       "web.octd\" below the first"));
  }
  return lines;
}

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenBlend(const FileSystem& fs,
                                                        const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(path));
  ASSIGN_OR_RETURN(const std::vector<BlendLine> lines, ParseBlend(text, path));
  std::vector<BlendPart> parts;
  for (const BlendLine& line : lines) {
    const std::string file =
        line.path[0] == '/' ? line.path : JoinPath(DirectoryName(path), line.path);
    if (IsBlend(fs, file)) {  // which might list this one
      return InvalidArgumentError(
          StrCat(path, ": ", file, " is a blend itself; list its datasets"));
    }
    absl::StatusOr<std::unique_ptr<TokenDataset>> dataset = OpenTokenDataset(fs, file);
    RETURN_IF_ERROR(Annotate(dataset.status(), StrCat("opening a part of ", path)));
    parts.push_back({.dataset = *std::move(dataset), .weight = line.weight});
  }
  return std::make_unique<BlendedDataset>(path, std::move(parts));
}

absl::StatusOr<BlendOrder> BlendOrder::Create(const std::vector<double>& weights,
                                              std::uint64_t seed) {
  OCTAVO_CHECK(!weights.empty());
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  BlendOrder order;
  order.seed_ = seed;
  // Shares are cut where their running sum is, so the slots of a cycle add up exactly.
  double sum = 0;
  order.first_.push_back(0);
  for (const double weight : weights) {
    sum += weight;
    order.first_.push_back(std::llround(sum / total * static_cast<double>(kBlendCycle)));
    if (order.first_.back() == order.first_[order.first_.size() - 2]) {
      return InvalidArgumentError(StrCat("part ", order.first_.size() - 1, " of the blend has ",
                                         weight / total * 100,
                                         " % of the weight; the smallest "
                                         "share is one sequence in ",
                                         kBlendCycle));
    }
  }
  return order;
}

BlendSlot BlendOrder::At(std::int64_t position) const {
  if (first_.size() == 2) {
    return {.part = 0, .position = position};
  }
  const std::int64_t cycle = position / kBlendCycle;
  // Not the order of samples: another key, so that the two never move in step.
  const OrderKey key{.seed = seed_ ^ 0x626c656e64ull, .samples = kBlendCycle};
  const std::int64_t slot = PermuteIndex(key, cycle, position % kBlendCycle);
  const auto next = std::upper_bound(first_.begin(), first_.end(), slot);
  const auto part = static_cast<std::int32_t>(next - first_.begin() - 1);
  return {.part = part,
          .position = cycle * slots(part) + slot - first_[static_cast<std::size_t>(part)]};
}

}  // namespace octavo
