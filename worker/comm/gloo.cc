#include "worker/comm/gloo.h"

#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/comm/accumulate.h"
#include "worker/comm/comm_status.h"
#include "worker/comm/gloo_store.h"
#include "worker/comm/self.h"

namespace octavo {
namespace {

using ::gloo::transport::UnboundBuffer;

std::string MemberName(const std::vector<int>& world_ranks, int rank) {
  return StrCat(world_ranks.empty() ? rank : world_ranks[static_cast<std::size_t>(rank)]);
}

// Bytes at an offset for or from one peer.
struct Piece {
  int peer;
  std::int64_t offset, bytes;
};

// Part of the message tag: ranks that call different operations wait in vain instead of mixing
// data.
enum class Operation : std::uint64_t {
  kAllToAllV = 1,
  kAllReduce,
  kAllGather,
  kBroadcast,
  kBarrier
};

const char* Name(Operation op) {
  switch (op) {
    case Operation::kAllToAllV:
      return "all_to_all_v";
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kBarrier:
      return "barrier";
  }
  return "?";
}

// An all-reduce works on slices of this size, which bounds its scratch memory.
constexpr std::int64_t kSliceBytes = std::int64_t{8} << 20;

// After a failure: had this transfer completed all the same?
bool Done(UnboundBuffer* buffer, bool incoming) {
  try {
    const std::chrono::milliseconds moment(1);
    return incoming ? buffer->waitRecv(moment) : buffer->waitSend(moment);
  } catch (const std::exception&) {
    return false;
  }
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(const GlooOptions& options, std::shared_ptr<::gloo::rendezvous::Context> context)
      : rank_(options.rank),
        size_(options.size),
        group_(options.group),
        world_ranks_(options.world_ranks),
        timeout_seconds_(options.timeout_seconds),
        context_(std::move(context)) {}

  // After a failure the connections are reset, so that peers notice. Otherwise they close in order:
  // a reset would throw away what this rank has sent and its peers have not read yet.
  ~GlooCommunicator() override {
    if (failure_.ok()) {
      return;
    }
    try {
      context_->closeConnections();
    } catch (const std::exception&) {
      // Some were broken already; there is nothing left to tell.
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool device_pointers() const override { return false; }

  CommResult AllToAllV(const AllToAllVArgs& args) override;
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override;
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override;
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override;
  CommResult Barrier() override;
  void Abort() override;

  // Connecting is over: calls count from here.
  void Connected() { calls_ = 0; }

 private:
  struct Call {
    Operation op;
    SteadyTime deadline;
  };
  Call Begin(Operation op);

  // Sends and receives all pieces; pieces of 0 bytes are left out on both sides.
  CommResult Exchange(const Call& call, const void* send, std::span<const Piece> sends,
                      void* receive, std::span<const Piece> receives);
  CommResult ReduceSlice(const Call& call, char* data, std::int64_t count, DType dtype,
                         ReduceOp op);
  std::string Member(int rank) const;
  std::vector<int> DeadPeers();
  CommResult Fail(const Call& call, CommResult::Code code, const std::string& what);

  // Constant after construction.
  const int rank_, size_;
  const std::string group_;
  const std::vector<int> world_ranks_;
  const double timeout_seconds_;
  const std::shared_ptr<::gloo::rendezvous::Context> context_;

  // Owned by the calling thread.
  std::uint64_t calls_ = 0;      // equal on all ranks
  std::uint64_t exchanges_ = 0;  // likewise; part of the message tag
  CommResult failure_;           // the first one; later calls repeat it
  std::vector<Piece> sends_, receives_;
  std::vector<char> scratch_;

  absl::Mutex mu_;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<UnboundBuffer*> waiting_ ABSL_GUARDED_BY(mu_);
};

GlooCommunicator::Call GlooCommunicator::Begin(Operation op) {
  ++calls_;
  return {.op = op, .deadline = After(timeout_seconds_)};
}

std::string GlooCommunicator::Member(int rank) const { return MemberName(world_ranks_, rank); }

CommResult GlooCommunicator::Fail(const Call& call, CommResult::Code code,
                                  const std::string& what) {
  failure_ = {.code = code,
              .message = StrCat("rank ", Member(rank_), ": ", Name(call.op), " (call ", calls_,
                                " of group ", group_, "): ", what)};
  return failure_;
}

// Peers whose connection is known to be broken: posting to one throws at once.
std::vector<int> GlooCommunicator::DeadPeers() {
  std::vector<int> dead;
  char byte = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      context_->createUnboundBuffer(&byte, 1)->recv(peer, ~std::uint64_t{0});
    } catch (const std::exception&) {
      dead.push_back(peer);
    }
  }
  return dead;
}

CommResult GlooCommunicator::Exchange(const Call& call, const void* send,
                                      std::span<const Piece> sends, void* receive,
                                      std::span<const Piece> receives) {
  if (!failure_.ok()) {
    return failure_;
  }
  const std::uint64_t tag = static_cast<std::uint64_t>(call.op) << 56 | ++exchanges_;
  struct Pending {
    std::unique_ptr<UnboundBuffer> buffer;
    Piece piece;
    bool incoming;
  };
  std::vector<Pending> pending;
  pending.reserve(sends.size() + receives.size());
  const auto add = [&](char* base, const Piece& piece, bool incoming) {
    if (piece.bytes > 0) {
      pending.push_back({context_->createUnboundBuffer(base + piece.offset,
                                                       static_cast<std::size_t>(piece.bytes)),
                         piece, incoming});
    }
  };
  for (const Piece& piece : receives) {
    add(static_cast<char*>(receive), piece, true);
  }
  for (const Piece& piece : sends) {
    add(static_cast<char*>(const_cast<void*>(send)), piece, false);  // gloo only reads it
  }
  {
    absl::MutexLock lock(&mu_);
    if (aborted_) {
      return Fail(call, CommResult::Code::kFault, "the communicator was aborted");
    }
    for (const Pending& p : pending) {
      waiting_.push_back(p.buffer.get());
    }
  }
  CommResult result;
  std::size_t at = 0;  // of the piece that is worked on
  try {
    for (at = 0; at < pending.size(); ++at) {
      const Pending& p = pending[at];
      p.incoming ? p.buffer->recv(p.piece.peer, tag) : p.buffer->send(p.piece.peer, tag);
    }
    for (at = 0; at < pending.size(); ++at) {
      const Pending& p = pending[at];
      const std::chrono::milliseconds left = Remaining(call.deadline);
      if (!(p.incoming ? p.buffer->waitRecv(left) : p.buffer->waitSend(left))) {
        result = Fail(call, CommResult::Code::kFault, "the communicator was aborted");
        break;
      }
    }
  } catch (const ::gloo::IoException& e) {
    const bool late = std::chrono::steady_clock::now() >= call.deadline;
    const bool incoming = pending[at].incoming;
    std::vector<std::string> lost;
    if (!late) {
      for (int peer : DeadPeers()) {
        lost.push_back(Member(peer));
      }
    }
    std::vector<std::string> missing;
    for (; at < pending.size() && pending[at].incoming == incoming; ++at) {
      if (!Done(pending[at].buffer.get(), incoming)) {
        missing.push_back(Member(pending[at].piece.peer));
      }
    }
    const std::string absent = StrCat(incoming ? "no data from rank " : "nothing accepted by rank ",
                                      StrJoin(missing, ", "));
    result = late ? Fail(call, CommResult::Code::kTimeout,
                         StrCat(absent, " within ", HumanDuration(timeout_seconds_)))
                  : Fail(call, CommResult::Code::kPeerLost,
                         StrCat("lost the connection to rank ", StrJoin(lost, ", "), "; ", absent,
                                ": ", e.what()));
  } catch (const std::exception& e) {
    result = Fail(call, CommResult::Code::kFault, e.what());
  }
  absl::MutexLock lock(&mu_);
  waiting_.clear();
  return result;
}

CommResult GlooCommunicator::AllToAllV(const AllToAllVArgs& args) {
  OCTAVO_CHECK_EQ(args.send_bytes.size(), static_cast<std::size_t>(size_));
  OCTAVO_CHECK_EQ(args.receive_bytes.size(), static_cast<std::size_t>(size_));
  const Call call = Begin(Operation::kAllToAllV);
  sends_.clear();
  receives_.clear();
  PeerOffsets send_offsets(args.send_bytes, args.send_offsets);
  PeerOffsets receive_offsets(args.receive_bytes, args.receive_offsets);
  std::int64_t self_send_at = 0, self_receive_at = 0;
  std::int64_t leaving = 0;
  for (int peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    const std::int64_t outgoing = args.send_bytes[p], incoming = args.receive_bytes[p];
    const std::int64_t send_at = send_offsets.Next(p), receive_at = receive_offsets.Next(p);
    OCTAVO_CHECK(outgoing >= 0 && incoming >= 0, "bytes to and from rank %d: %lld, %lld", peer,
                 static_cast<long long>(outgoing), static_cast<long long>(incoming));
    if (peer == rank_) {
      OCTAVO_CHECK_EQ(outgoing, incoming);
      self_send_at = send_at;
      self_receive_at = receive_at;
    } else {
      sends_.push_back({peer, send_at, outgoing});
      receives_.push_back({peer, receive_at, incoming});
      leaving += outgoing;
    }
  }
  const std::int64_t kept = args.send_bytes[static_cast<std::size_t>(rank_)];
  if (kept > 0) {
    std::memmove(static_cast<char*>(args.receive) + self_receive_at,
                 static_cast<const char*>(args.send) + self_send_at,
                 static_cast<std::size_t>(kept));
  }
  ++counters_.all_to_all_calls;
  counters_.all_to_all_bytes += leaving;
  return Exchange(call, args.send, sends_, args.receive, receives_);
}

// Slices; in each, rank i gets everybody's part i, reduces it in rank order and gives it to all.
CommResult GlooCommunicator::AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) {
  const Call call = Begin(Operation::kAllReduce);
  ++counters_.all_reduce_calls;
  const std::int64_t element = DTypeBytes(dtype);
  const std::int64_t slice = kSliceBytes / element;
  for (std::int64_t begin = 0; begin < count; begin += slice) {
    CommResult result = ReduceSlice(call, static_cast<char*>(data) + begin * element,
                                    std::min(slice, count - begin), dtype, op);
    if (!result.ok()) {
      return result;
    }
  }
  return failure_;
}

CommResult GlooCommunicator::ReduceSlice(const Call& call, char* data, std::int64_t count,
                                         DType dtype, ReduceOp op) {
  const std::int64_t element = DTypeBytes(dtype);
  const auto part_at = [&](int r) { return count * r / size_ * element; };
  const auto part_bytes = [&](int r) { return part_at(r + 1) - part_at(r); };
  const std::int64_t own_bytes = part_bytes(rank_);
  scratch_.resize(static_cast<std::size_t>(
      std::max(static_cast<std::int64_t>(scratch_.size()), own_bytes * size_)));
  sends_.clear();
  receives_.clear();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      sends_.push_back({peer, part_at(peer), part_bytes(peer)});
      receives_.push_back({peer, peer * own_bytes, own_bytes});
      counters_.all_reduce_bytes += part_bytes(peer) + own_bytes;
    }
  }
  CommResult result = Exchange(call, data, sends_, scratch_.data(), receives_);
  if (!result.ok()) {
    return result;
  }
  char* own = data + part_at(rank_);
  if (own_bytes > 0) {
    std::memcpy(scratch_.data() + rank_ * own_bytes, own, static_cast<std::size_t>(own_bytes));
    std::memcpy(own, scratch_.data(), static_cast<std::size_t>(own_bytes));
    for (int r = 1; r < size_; ++r) {
      Accumulate(scratch_.data() + r * own_bytes, own, own_bytes / element, dtype, op);
    }
  }
  sends_.clear();
  receives_.clear();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      sends_.push_back({peer, part_at(rank_), own_bytes});
      receives_.push_back({peer, part_at(peer), part_bytes(peer)});
    }
  }
  return Exchange(call, data, sends_, data, receives_);
}

CommResult GlooCommunicator::AllGather(const void* send, void* receive, std::int64_t bytes) {
  const Call call = Begin(Operation::kAllGather);
  sends_.clear();
  receives_.clear();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      sends_.push_back({peer, 0, bytes});
      receives_.push_back({peer, peer * bytes, bytes});
    }
  }
  if (bytes > 0) {
    std::memmove(static_cast<char*>(receive) + rank_ * bytes, send,
                 static_cast<std::size_t>(bytes));
  }
  counters_.all_gather_bytes += bytes * (size_ - 1);
  return Exchange(call, send, sends_, receive, receives_);
}

CommResult GlooCommunicator::Broadcast(void* data, std::int64_t bytes, int root) {
  OCTAVO_CHECK(root >= 0 && root < size_, "root = %d of %d ranks", root, size_);
  const Call call = Begin(Operation::kBroadcast);
  sends_.clear();
  receives_.clear();
  if (rank_ == root) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        sends_.push_back({peer, 0, bytes});
      }
    }
    counters_.broadcast_bytes += bytes * (size_ - 1);
  } else {
    receives_.push_back({root, 0, bytes});
  }
  return Exchange(call, data, sends_, data, receives_);
}

CommResult GlooCommunicator::Barrier() {
  const Call call = Begin(Operation::kBarrier);
  sends_.clear();
  receives_.clear();
  std::vector<char> arrived(static_cast<std::size_t>(size_), 0);
  const char here = 1;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      sends_.push_back({peer, 0, 1});
      receives_.push_back({peer, peer, 1});
    }
  }
  return Exchange(call, &here, sends_, arrived.data(), receives_);
}

void GlooCommunicator::Abort() {
  absl::MutexLock lock(&mu_);
  aborted_ = true;
  for (UnboundBuffer* buffer : waiting_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options) {
  OCTAVO_CHECK(options.size > 0 && options.rank >= 0 && options.rank < options.size,
               "rank = %d of %d", options.rank, options.size);
  OCTAVO_CHECK(options.world_ranks.empty() ||
                   options.world_ranks.size() == static_cast<std::size_t>(options.size),
               "%zu names for %d ranks", options.world_ranks.size(), options.size);
  if (options.size == 1) {
    return CreateSelfCommunicator();
  }
  OCTAVO_CHECK(options.store != nullptr && options.connect_timeout_seconds > 0 &&
               options.timeout_seconds > 0);
  const std::string who =
      StrCat("rank ", MemberName(options.world_ranks, options.rank), ": connecting group ",
             options.group, " at ", options.bind_address);
  const SteadyTime deadline = After(options.connect_timeout_seconds);
  StoreAdapter store(options.store, options.group, deadline);
  try {
    ::gloo::transport::tcp::attr attributes(options.bind_address.c_str());
    std::shared_ptr<::gloo::transport::Device> device =
        ::gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<::gloo::rendezvous::Context>(options.rank, options.size);
    context->setTimeout(Remaining(deadline));
    context->connectFullMesh(store, device);
    auto communicator = std::make_unique<GlooCommunicator>(options, std::move(context));
    // Nobody may leave while others still connect.
    RETURN_IF_ERROR(Annotate(ToStatus(communicator->Barrier()), who));
    communicator->Connected();
    return communicator;
  } catch (const StoreFailure& e) {
    const std::optional<int> absent = RankOfKey(store.awaited());
    return Annotate(e.status, absent.has_value() && *absent < options.size
                                  ? StrCat(who, ": rank ", MemberName(options.world_ranks, *absent),
                                           " did not come")
                                  : who);
  } catch (const ::gloo::IoException& e) {
    return UnavailableError(StrCat(who, ": ", e.what()));
  } catch (const std::exception& e) {
    return InternalError(StrCat(who, ": ", e.what()));
  }
}

}  // namespace octavo
