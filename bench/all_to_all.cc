// Dispatch and combine between ranks: time, bandwidth, and what FP8 wins with its cast counted.
//
//   bench_all_to_all [--ranks N] [--device cuda|cpu] [--tokens 4096,8192] [--hidden 2048,5120,7168]
//                    [--split 50,70] [--top-k 8] [--experts 64] [--samples N] [--pieces P]
//
// A token goes to k experts; --split says which share of the choices falls on the experts of the
// first half of the ranks (50: even). Lines of one shape:
//   NCCL's own …    ncclAlltoAll of the same bytes in equal parts (on GPUs): the denominator of
//                   "of NCCL's", which compares GB/s
//   message …       the all-to-all alone, by the product's communicator
//   dispatch …      cast (FP8), permute into records, all-to-all, permute into expert order,
//   padding combine bf16    permute back, all-to-all, sum over the choices
// "one message" carries payload and dequant_scales together (the product, moe_dispatch.h), "two
// messages" sends them apart. GB/s: bytes that leave or enter the busiest rank for others, over the
// time. Times are medians of --samples batches of --inner calls, of the slowest rank.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "bench/bench_ranks.h"
#include "bench/nccl_all_to_all.h"
#include "kernels/formats/bf16.h"
#include "worker/layers/exchange.h"
#include "worker/layers/moe_dispatch.h"
#include "worker/precision/dense_groups.h"

namespace octavo::bench {
namespace {

struct Flags {
  std::string device = "cuda";
  int ranks = 2;
  std::vector<std::int64_t> tokens = {4096, 8192}, hidden = {2048, 5120, 7168};
  std::vector<int> splits = {50, 70};
  std::int32_t top_k = 8, experts = 64;
  int samples = 7, inner = 10, pieces = 1;
};

struct Shape {
  std::int64_t tokens = 0, hidden = 0;
  int split = 50;
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// k different experts a token, `split` percent of all choices among the first half's.
std::vector<std::int32_t> Choices(const Flags& flags, const Shape& shape, int rank) {
  std::mt19937 random(static_cast<std::uint32_t>(100 * rank + shape.split));
  const auto experts = static_cast<std::size_t>(flags.experts), half = experts / 2;
  std::vector<std::int32_t> first(half), second(experts - half), out;
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), static_cast<std::int32_t>(half));
  const auto draw = [&random](std::vector<std::int32_t>& from, std::size_t i) {
    std::swap(from[i], from[i + random() % (from.size() - i)]);
    return from[i];
  };
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    std::size_t of_first = 0, of_second = 0;
    for (std::int32_t j = 0; j < flags.top_k; ++j) {
      const bool to_first = static_cast<int>(random() % 100) < shape.split;
      const bool use_first = (to_first && of_first < half) || of_second == second.size();
      out.push_back(use_first ? draw(first, of_first++) : draw(second, of_second++));
    }
  }
  return out;
}

// One rank's buffers and calls for one shape.
class Case {
 public:
  Case(const Flags& flags, const Shape& shape, BenchRank& rank)
      : flags_(flags),
        shape_(shape),
        rank_(rank),
        device_(rank.backend, "bench"),
        pinned_(rank.backend, "bench pinned", Memory::kHostPinned),
        choices_(shape.tokens * flags.top_k),
        capacity_(2 * choices_),
        groups_(rank.backend, device_, pinned_),
        exchange_(rank.backend, rank.comm, capacity_ * RecordBytes(), device_, pinned_),
        dispatch_(rank.backend,
                  {.tokens = shape.tokens,
                   .hidden = shape.hidden,
                   .experts = flags.experts,
                   .experts_per_token = flags.top_k,
                   .capacity = capacity_},
                  &exchange_, DType::kBF16, /*mx=*/false, device_, pinned_) {
    ctx_.backend = rank.backend;
  }

  absl::Status Prepare() {
    const std::int64_t padded = dispatch_.padded_capacity();
    tiles_ = shape_.hidden / kTile;
    x_ = device_.Take<std::uint16_t>(shape_.tokens * shape_.hidden);
    y_ = device_.Take<std::uint16_t>(shape_.tokens * shape_.hidden);
    target_ = device_.Take<std::uint16_t>(padded * shape_.hidden);
    wire_ = QBuffer::Take(device_, shape_.tokens, shape_.hidden, 1, false);
    arrived_ = QBuffer::Take(device_, padded, shape_.hidden, 1, false);
    topk_ = device_.Take<std::int32_t>(choices_);
    weight_ = device_.Take<float>(choices_);
    target_weight_ = device_.Take<float>(padded);
    dest_row_ = device_.Take<std::int32_t>(choices_);
    counts_ = device_.Take<std::int64_t>(2 * flags_.experts);
    const WorkspaceQuery query{.tokens = shape_.tokens,
                               .hidden = shape_.hidden,
                               .vocab = 1,
                               .batch = 1,
                               .sequence = shape_.tokens,
                               .parameters = 1,
                               .experts = flags_.experts,
                               .experts_per_token = flags_.top_k,
                               .heads = 1,
                               .kv_heads = 1,
                               .head_dim = 64,
                               .dtype = DType::kBF16};
    WorkspaceSizes sizes{};
    ops().workspace_sizes(context(), query, &sizes);
    void* workspace = device_.TakeBytes(sizes.route_index);
    message_ = device_.Take<std::uint8_t>(capacity_ * RecordBytes());
    landing_ = device_.Take<std::uint8_t>(capacity_ * RecordBytes());
    groups_.Prepare(shape_.tokens);
    if (device_.failed() || pinned_.failed()) {
      return ResourceExhaustedError(StrCat("no memory for ", device_.failed_bytes(), " bytes"));
    }
    FillRows();
    const std::vector<std::int32_t> topk = Choices(flags_, shape_, rank_.rank);
    Upload(topk_, topk);
    Upload(weight_, std::vector<float>(static_cast<std::size_t>(choices_),
                                       1.0f / static_cast<float>(flags_.top_k)));
    ops().route_index(context(), {.tokens = shape_.tokens,
                                  .experts = flags_.experts,
                                  .experts_per_token = flags_.top_k,
                                  .topk_index = topk_,
                                  .align = 1,
                                  .counts = counts_,
                                  .begin = counts_ + flags_.experts,
                                  .dest_row = dest_row_,
                                  .workspace = workspace});
    RETURN_IF_ERROR(dispatch_.StartCounts(counts_));
    RETURN_IF_ERROR(dispatch_.FinishCounts(&matrix_));
    if (dispatch_.Rounds(matrix_) != 1) {
      return InvalidArgumentError("more rows than twice the even share; use a milder --split");
    }
    dispatch_.SetRound(ctx_, matrix_, 0, 1);
    CountRows();
    ops().synchronize(context());
    return absl::OkStatus();
  }

  // Seconds of the slowest rank.
  absl::StatusOr<double> Measure(const std::function<absl::Status()>& call) {
    return Measure(call, [this] { ops().synchronize(context()); });
  }
  absl::StatusOr<double> Measure(const std::function<absl::Status()>& call,
                                 const std::function<void()>& wait) {
    for (int i = 0; i < 2; ++i) {
      RETURN_IF_ERROR(call());
    }
    std::vector<double> samples;
    for (int s = 0; s < flags_.samples; ++s) {
      wait();
      RETURN_IF_ERROR(StatusOf(rank_.comm->Barrier()));
      const double begin = Now();
      for (int i = 0; i < flags_.inner; ++i) {
        RETURN_IF_ERROR(call());
      }
      wait();
      samples.push_back((Now() - begin) / flags_.inner);
    }
    std::nth_element(samples.begin(), samples.begin() + flags_.samples / 2, samples.end());
    double median = samples[static_cast<std::size_t>(flags_.samples / 2)];
    RETURN_IF_ERROR(exchange_.AllReduceHost(&median, 1, DType::kF64, ReduceOp::kMax));
    char message[512] = {};
    if (ops().poll_error(context(), message, sizeof(message)) != 0) {
      return InternalError(message);
    }
    return median;
  }

  absl::Status SendBf16() { return Send({.high = x_}, {.high = target_}); }
  absl::Status SendFp8() {
    return Send(Cast(), {.quant = arrived_.Row(rule_, dispatch_.padded_capacity(), shape_.hidden)});
  }
  absl::Status Send(const Payload& source, const Payload& target) {
    dispatch_.Pack(ctx_, {.source = source, .dest_row = dest_row_, .weight = weight_});
    RETURN_IF_ERROR(dispatch_.StartSend(0));
    dispatch_.Join();
    dispatch_.FinishSend(ctx_, 0, target, target_weight_);
    return absl::OkStatus();
  }
  // Payload with the routing weight as one message, the dequant_scales as another.
  absl::Status SendFp8Apart() {
    const Payload source = Cast();
    const std::int64_t scale_bytes = tiles_ * 4;
    std::uint8_t* scales = message_ + choices_ * shape_.hidden;
    std::uint8_t* landed = landing_ + capacity_ * shape_.hidden;
    PermuteArgs spread{.rows = shape_.tokens, .fanout = flags_.top_k, .dest_row = dest_row_};
    spread.src = {.payload = source.quant.q, .payload_stride = shape_.hidden};
    spread.dst = {.payload = message_, .payload_stride = shape_.hidden};
    spread.payload_bytes = shape_.hidden;
    ops().permute(context(), spread);
    spread.src = {.payload = reinterpret_cast<std::uint8_t*>(source.quant.dequant_scale),
                  .payload_stride = scale_bytes};
    spread.dst = {.payload = scales, .payload_stride = scale_bytes};
    spread.payload_bytes = scale_bytes;
    ops().permute(context(), spread);
    RETURN_IF_ERROR(AllToAll(message_, landing_, shape_.hidden));
    RETURN_IF_ERROR(AllToAll(scales, landed, scale_bytes));
    // Both into expert order: the copies that one message needs only one of.
    const RowGroups& groups = dispatch_.groups();
    PermuteArgs sort{.rows = received_, .fanout = 1, .dest_row = to_padded_};
    sort.src = {.payload = landing_, .payload_stride = shape_.hidden};
    sort.dst = {.payload = arrived_.codes, .payload_stride = shape_.hidden};
    sort.payload_bytes = shape_.hidden;
    ops().permute(context(), sort);
    sort.src = {.payload = landed, .payload_stride = scale_bytes};
    sort.dst = {.payload = reinterpret_cast<std::uint8_t*>(arrived_.dequant_scales),
                .payload_stride = scale_bytes};
    sort.payload_bytes = scale_bytes;
    ops().permute(context(), sort);
    ops().pad_rows(context(), {.groups = groups,
                               .dst = {.payload = arrived_.codes, .payload_stride = shape_.hidden},
                               .payload_bytes = shape_.hidden,
                               .tiles = 0});
    return absl::OkStatus();
  }
  absl::Status Combine() {
    dispatch_.PackReturn(ctx_, 0, target_, nullptr);
    RETURN_IF_ERROR(dispatch_.StartReturn(0));
    dispatch_.Join();
    dispatch_.Combine(ctx_, {.dest_row = dest_row_, .y = y_, .y_dtype = DType::kBF16});
    return absl::OkStatus();
  }

  // Rows of `stride` bytes as they are routed.
  absl::Status Message(std::int64_t stride) { return AllToAll(message_, landing_, stride); }
  // The same bytes in all, cut into --pieces calls.
  absl::Status MessageInPieces(std::int64_t stride) {
    std::int64_t send_at = 0, receive_at = 0;
    for (int p = 0; p < flags_.pieces; ++p) {
      const auto part = [&](const std::vector<std::int64_t>& rows) {
        std::vector<std::int64_t> bytes;
        for (const std::int64_t n : rows) {
          bytes.push_back((n * (p + 1) / flags_.pieces - n * p / flags_.pieces) * stride);
        }
        return bytes;
      };
      const std::vector<std::int64_t> out = part(send_rows_), in = part(receive_rows_);
      RETURN_IF_ERROR(exchange_.AllToAllV(message_ + send_at, out, landing_ + receive_at, in));
      send_at += std::accumulate(out.begin(), out.end(), std::int64_t{0});
      receive_at += std::accumulate(in.begin(), in.end(), std::int64_t{0});
    }
    return absl::OkStatus();
  }
  // Seconds of ncclAlltoAll with all of a rank's rows in equal parts.
  absl::StatusOr<double> MeasureNccl(NcclAllToAll& nccl, std::int64_t stride) {
    return Measure([&] { return nccl.Run(message_, landing_, EqualRows() * stride); },
                   [&] { nccl.Wait(); });
  }
  std::int64_t EqualRows() const { return choices_ / rank_.size; }
  Exchange& exchange() { return exchange_; }

  // Bytes of a record: payload, dequant_scales, routing weight, rounded to 16.
  std::int64_t RecordBytes() const { return RoundUp(2 * shape_.hidden + 4, 16); }
  std::int64_t Fp8RecordBytes() const { return RoundUp(shape_.hidden + tiles_ * 4 + 4, 16); }
  // Rows that the busiest rank exchanges with others in one direction.
  std::int64_t busiest_rows() const { return busiest_rows_; }

 private:
  const Ops& ops() const { return *rank_.backend.ops; }
  OpsContext* context() const { return rank_.backend.context; }
  template <class T>
  void Upload(T* to, const std::vector<T>& from) {
    ops().copy(context(), {.dst = to,
                           .src = from.data(),
                           .bytes = static_cast<std::int64_t>(from.size() * sizeof(T)),
                           .kind = CopyKind::kToDevice});
    ops().synchronize(context());
  }
  // Natural numbers of unit size: zeros would move faster.
  void FillRows() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> block(1 << 18);
    for (std::uint16_t& v : block) {
      v = Bf16FromFloat(normal(random));
    }
    const auto size = static_cast<std::int64_t>(block.size());
    for (std::int64_t at = 0; at < shape_.tokens * shape_.hidden; at += size) {
      ops().copy(context(), {.dst = x_ + at,
                             .src = block.data(),
                             .bytes = 2 * std::min(size, shape_.tokens * shape_.hidden - at),
                             .kind = CopyKind::kToDevice});
      ops().synchronize(context());
    }
  }
  void CountRows() {
    const std::int32_t local = flags_.experts / rank_.size;
    const auto ranks = static_cast<std::size_t>(rank_.size);
    const auto between = [&](int s, int d) {
      const auto begin = matrix_.begin() + static_cast<std::ptrdiff_t>(s) * flags_.experts +
                         static_cast<std::ptrdiff_t>(d) * local;
      return std::accumulate(begin, begin + local, std::int64_t{0});
    };
    send_rows_.assign(ranks, 0);
    receive_rows_.assign(ranks, 0);
    for (int p = 0; p < rank_.size; ++p) {
      send_rows_[static_cast<std::size_t>(p)] = between(rank_.rank, p);
      receive_rows_[static_cast<std::size_t>(p)] = between(p, rank_.rank);
    }
    received_ = std::accumulate(receive_rows_.begin(), receive_rows_.end(), std::int64_t{0});
    for (int r = 0; r < rank_.size; ++r) {
      std::int64_t out = 0, in = 0;
      for (int p = 0; p < rank_.size; ++p) {
        out += p == r ? 0 : between(r, p);
        in += p == r ? 0 : between(p, r);
      }
      busiest_rows_ = std::max({busiest_rows_, out, in});
    }
    // Receive order (source, expert) → expert order, as the plan of the round has it.
    RoundPlan plan;
    PlanRound({.counts = matrix_,
               .ranks = rank_.size,
               .experts = flags_.experts,
               .rank = rank_.rank,
               .capacity = capacity_},
              0, &plan);
    std::vector<std::int32_t> to_padded(
        static_cast<std::size_t>(std::max<std::int64_t>(received_, 1)));
    for (const RowSegment& s : plan.segments) {
      for (std::int64_t i = 0; i < s.rows; ++i) {
        to_padded[static_cast<std::size_t>(s.src_begin + i)] =
            static_cast<std::int32_t>(s.dst_begin + i);
      }
    }
    to_padded_ = device_.Take<std::int32_t>(static_cast<std::int64_t>(to_padded.size()));
    Upload(to_padded_, to_padded);
  }
  Payload Cast() {
    const Payload source{.quant = dispatch_.WireTensor(wire_, rule_)};
    ops().quantize_rows(context(), {.x = x_,
                                    .x_dtype = DType::kBF16,
                                    .cols = shape_.hidden,
                                    .groups = groups_.Get(shape_.tokens),
                                    .rule = rule_,
                                    .row = source.quant,
                                    .col = {},
                                    .stats = nullptr});
    return source;
  }
  absl::Status AllToAll(const std::uint8_t* from, std::uint8_t* to, std::int64_t stride) {
    const auto bytes = [stride](std::vector<std::int64_t> rows) {
      for (std::int64_t& n : rows) {
        n *= stride;
      }
      return rows;
    };
    return exchange_.AllToAllV(from, bytes(send_rows_), to, bytes(receive_rows_));
  }

  const Flags& flags_;
  const Shape shape_;
  BenchRank& rank_;
  Arena device_, pinned_;
  const std::int64_t choices_, capacity_;
  DenseGroups groups_;
  Exchange exchange_;
  MoeDispatch dispatch_;
  LayerContext ctx_;
  const QuantizeRule rule_{.format = DType::kE4M3, .tiling = Tiling::kRow128, .pow2 = true};
  std::int64_t tiles_ = 0;
  std::uint16_t *x_ = nullptr, *y_ = nullptr, *target_ = nullptr;
  QBuffer wire_, arrived_;
  std::int32_t *topk_ = nullptr, *dest_row_ = nullptr, *to_padded_ = nullptr;
  float *weight_ = nullptr, *target_weight_ = nullptr;
  std::int64_t* counts_ = nullptr;
  std::uint8_t *message_ = nullptr, *landing_ = nullptr;
  std::vector<std::int64_t> matrix_, send_rows_, receive_rows_;
  std::int64_t received_ = 0, busiest_rows_ = 0;
};

// nccl: opened with the first shape, null where there is none.
absl::Status BenchShape(const Flags& flags, const Shape& shape, BenchRank& rank,
                        std::unique_ptr<NcclAllToAll>* nccl) {
  Case c(flags, shape, rank);
  RETURN_IF_ERROR(c.Prepare());
  if (*nccl == nullptr && rank.transport == "nccl") {
    absl::StatusOr<std::unique_ptr<NcclAllToAll>> opened = NcclAllToAll::Open(rank, c.exchange());
    if (opened.ok()) {
      *nccl = std::move(*opened);
    } else if (!absl::IsUnavailable(opened.status())) {
      return opened.status();
    }
  }
  const std::int64_t bf16 = c.RecordBytes(), fp8 = c.Fp8RecordBytes();
  const auto print_rows = [&](const std::string& what, double seconds, std::int64_t rows,
                              std::int64_t stride, const std::string& note) {
    if (rank.rank == 0) {
      std::printf("%6lld %6lld %3d/%-3d %-37s %9.3f %8.1f  %s\n",
                  static_cast<long long>(shape.tokens), static_cast<long long>(shape.hidden),
                  shape.split, 100 - shape.split, what.c_str(), 1e3 * seconds,
                  static_cast<double>(rows * stride) / seconds / 1e9, note.c_str());
      std::fflush(stdout);
    }
  };
  const auto print = [&](const std::string& what, double seconds, std::int64_t stride,
                         const std::string& note) {
    print_rows(what, seconds, c.busiest_rows(), stride, note);
  };
  const auto ratio = [](const char* text, double a, double b) {
    char out[64];
    std::snprintf(out, sizeof(out), "%s %.2f", text, a / b);
    return std::string(out);
  };
  const std::int64_t equal_rows = c.EqualRows() * (rank.size - 1);
  double equal_bf16 = 0, equal_fp8 = 0;
  if (*nccl != nullptr) {
    ASSIGN_OR_RETURN(equal_bf16, c.MeasureNccl(**nccl, bf16));
    ASSIGN_OR_RETURN(equal_fp8, c.MeasureNccl(**nccl, fp8));
    print_rows("NCCL's own, bf16 bytes", equal_bf16, equal_rows, bf16, "");
    print_rows("NCCL's own, fp8 + scales bytes", equal_fp8, equal_rows, fp8, "");
  }
  // Share of the GB/s of NCCL's own all-to-all.
  const auto share = [&](double equal, double seconds) {
    return equal == 0 ? std::string()
                      : ratio("of NCCL's", static_cast<double>(c.busiest_rows()) * equal,
                              static_cast<double>(equal_rows) * seconds);
  };
  ASSIGN_OR_RETURN(const double message_bf16, c.Measure([&] { return c.Message(bf16); }));
  ASSIGN_OR_RETURN(const double message_fp8, c.Measure([&] { return c.Message(fp8); }));
  ASSIGN_OR_RETURN(const double send_bf16, c.Measure([&] { return c.SendBf16(); }));
  ASSIGN_OR_RETURN(const double send_fp8, c.Measure([&] { return c.SendFp8(); }));
  ASSIGN_OR_RETURN(const double apart, c.Measure([&] { return c.SendFp8Apart(); }));
  ASSIGN_OR_RETURN(const double combine, c.Measure([&] { return c.Combine(); }));
  print("message bf16", message_bf16, bf16, share(equal_bf16, message_bf16));
  print("message fp8 + scales", message_fp8, fp8, share(equal_fp8, message_fp8));
  if (flags.pieces > 1) {
    ASSIGN_OR_RETURN(const double pieces, c.Measure([&] { return c.MessageInPieces(bf16); }));
    print(StrCat("message bf16 in ", flags.pieces, " pieces"), pieces, bf16,
          share(equal_bf16, pieces));
  }
  print("dispatch bf16", send_bf16, bf16, "");
  print("dispatch fp8, one message, with cast", send_fp8, fp8,
        ratio("× bf16", send_bf16, send_fp8) + " (target 1.5)");
  print("dispatch fp8, two messages, with cast", apart, fp8, ratio("× bf16", send_bf16, apart));
  print("combine bf16", combine, bf16, "");
  print("dispatch + combine, bf16", send_bf16 + combine, 2 * bf16, "");
  print("dispatch fp8 + combine bf16", send_fp8 + combine, fp8 + bf16,
        ratio("× bf16", send_bf16 + combine, send_fp8 + combine));
  return absl::OkStatus();
}

absl::Status Bench(const Flags& flags) {
  if (flags.ranks < 2 || flags.experts % flags.ranks != 0 || flags.top_k > flags.experts / 2) {
    return InvalidArgumentError(
        "--ranks of at least 2 must divide --experts, which hold --top-k twice");
  }
  return RunRanks({.ranks = flags.ranks, .device = flags.device}, [&](BenchRank& rank) {
    if (rank.rank == 0) {
      std::printf("# %d ranks, %s, top-%d of %d experts, medians of %d x %d calls\n", rank.size,
                  rank.transport.c_str(), flags.top_k, flags.experts, flags.samples, flags.inner);
      std::printf("%6s %6s %-7s %-37s %9s %8s\n", "tokens", "hidden", "split", "what", "ms",
                  "GB/s");
    }
    std::unique_ptr<NcclAllToAll> nccl;
    for (const std::int64_t hidden : flags.hidden) {
      for (const std::int64_t tokens : flags.tokens) {
        for (const int split : flags.splits) {
          RETURN_IF_ERROR(
              BenchShape(flags, {.tokens = tokens, .hidden = hidden, .split = split}, rank, &nccl));
        }
      }
    }
    if (rank.rank == 0) {
      std::printf(
          "# peers: an FP8 dispatch with its cast on 8 GPUs beats BF16 by 1.01 to 1.18 "
          "(communication alone 1.41 to 1.65; FP8-Flow-MoE's table)\n");
    }
    return absl::OkStatus();
  });
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"dispatch and combine between ranks, BF16 beside FP8"};
  app.add_option("--device", flags.device, "cuda or cpu")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--ranks", flags.ranks, "ranks, a GPU each where there are enough");
  app.add_option("--tokens", flags.tokens, "tokens of a rank")->delimiter(',');
  app.add_option("--hidden", flags.hidden, "hidden sizes, multiples of 128")->delimiter(',');
  app.add_option("--split", flags.splits, "percent of choices on the first half of the experts")
      ->delimiter(',')
      ->check(CLI::Range(1, 99));
  app.add_option("--top-k", flags.top_k, "experts of a token")->check(CLI::PositiveNumber);
  app.add_option("--experts", flags.experts, "experts in all")->check(CLI::PositiveNumber);
  app.add_option("--samples", flags.samples, "timed batches")->check(CLI::PositiveNumber);
  app.add_option("--inner", flags.inner, "calls of a batch")->check(CLI::PositiveNumber);
  app.add_option("--pieces", flags.pieces, "also send the BF16 message in so many calls")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Bench(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_all_to_all: %s\n", ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace octavo::bench

int main(int argc, char** argv) { return octavo::bench::Main(argc, argv); }
