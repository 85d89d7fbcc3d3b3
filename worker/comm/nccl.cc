// NCCL communicator, built into the CUDA plug-in (no absl here; see communicator.h).
//
// Operations are enqueued on the backend's communication lane and return at once: a step never
// waits for them. Events tie that lane to the compute lane: an operation begins after what the
// compute lane holds when it is called, and the compute lane goes on after the operation (at once,
// or from Join on when it was only started). All communicators of a backend share the lane, so
// their operations run one after the other, in the same order on every rank.
//
// NCCL's kernels run on few multiprocessors, which others leave free while a message travels that
// was only started: kernels that fill the device and find some of it taken would wait for the rest.
//
// Waiting is bounded all the same. A watcher follows each operation through an event; one that is
// not complete within the timeout, or an asynchronous error of NCCL (a lost peer), aborts the
// communicator, which releases its kernels, so that whoever waits for the lane goes on and the next
// call reports rank and operation. Initialisation is non-blocking with a deadline.
//
// libnccl.so.2 is opened at run time (OCTAVO_NCCL names another file): the plug-in loads without
// it. NVLink multicast stays off. Uneven all-to-all is grouped send and receive; both sides agree
// on counts, and zero counts are skipped on both sides. A rank's rows for itself are copied on a
// stream of their own meanwhile.
#if defined(OCTAVO_HAVE_NCCL)

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/comm/nccl_own_rows.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// How long an abort waits for a call of the owning thread to come out of NCCL, which frees what
// the call uses. A call that waits for the device itself only comes out through the abort.
constexpr std::chrono::seconds kCallGrace{2};

// Multiprocessors of NCCL's kernels; OCTAVO_NCCL_CTAS says another number, 0: as NCCL likes, and
// none are left free for it.
constexpr int kCtas = 20;

int Ctas() {
  const char* text = std::getenv("OCTAVO_NCCL_CTAS");
  const int ctas = text == nullptr ? kCtas : std::atoi(text);
  return ctas >= 0 && ctas <= 64 ? ctas : kCtas;
}

struct NcclLibrary {
  void* handle = nullptr;
  std::string reason;  // why handle is null
  decltype(&ncclGetVersion) version = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;

  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;

  static const NcclLibrary& Get() {
    static const NcclLibrary library = Open();
    return library;
  }

 private:
  static NcclLibrary Open() {
    NcclLibrary l;
    std::vector<std::string> names = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"};
    if (const char* forced = std::getenv("OCTAVO_NCCL")) {
      names = {forced};
    }
    // Read by NCCL when it is loaded; an explicit setting of the operator wins.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    for (const std::string& name : names) {
      l.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (l.handle != nullptr) {
        break;
      }
      const char* text = dlerror();
      l.reason += (l.reason.empty() ? "" : "; ") + std::string(text != nullptr ? text : name);
    }
    if (l.handle == nullptr) {
      return l;
    }
    const auto load = [&](auto* pointer, const char* symbol) {
      *pointer =
          reinterpret_cast<std::remove_pointer_t<decltype(pointer)>>(dlsym(l.handle, symbol));
      if (*pointer == nullptr) {
        l.reason = std::string("libnccl has no ") + symbol;
      }
    };
    load(&l.version, "ncclGetVersion");
    load(&l.unique_id, "ncclGetUniqueId");
    load(&l.init, "ncclCommInitRankConfig");
    load(&l.async_error, "ncclCommGetAsyncError");
    load(&l.abort, "ncclCommAbort");
    load(&l.group_start, "ncclGroupStart");
    load(&l.group_end, "ncclGroupEnd");
    load(&l.send, "ncclSend");
    load(&l.receive, "ncclRecv");
    load(&l.all_reduce, "ncclAllReduce");
    load(&l.all_gather, "ncclAllGather");
    load(&l.broadcast, "ncclBroadcast");
    load(&l.error_string, "ncclGetErrorString");
    if (!l.reason.empty()) {
      l.handle = nullptr;
    }
    return l;
  }
};

void Write(char* message, std::int64_t bytes, const std::string& text) {
  if (message != nullptr && bytes > 0) {
    std::snprintf(message, static_cast<std::size_t>(bytes), "%s", text.c_str());
  }
}

ncclDataType_t TypeOf(DType t) {
  switch (t) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kI64:
      return ncclInt64;
    default:
      return ncclBfloat16;
  }
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(cudaStream_t compute, cudaStream_t stream, int device, int* multiprocessors,
                   int rank, int size, Clock::duration timeout)
      : lib_(NcclLibrary::Get()),
        compute_(compute),
        stream_(stream),
        multiprocessors_(multiprocessors),
        all_multiprocessors_(*multiprocessors),
        ctas_(Ctas()),
        device_(device),
        rank_(rank),
        size_(size),
        timeout_(timeout) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override {
    if (watcher_.joinable()) {
      watcher_.request_stop();
      watcher_.join();
    }
    for (Pending& p : pending_) {
      (void)cudaEventDestroy(p.event);
    }
    for (cudaEvent_t e : spare_) {
      (void)cudaEventDestroy(e);
    }
    // Peers may be gone already: an abort never waits for them, while memory is only given back
    // when the device is done with it.
    Release(/*own_call=*/true);
    (void)cudaFree(token_);
    for (cudaEvent_t e : {fork_, join_, before_, after_}) {
      if (e != nullptr) {
        (void)cudaEventDestroy(e);
      }
    }
    if (side_ != nullptr) {
      (void)cudaStreamDestroy(side_);
    }
  }

  // "" or why not.
  std::string Init(const std::uint8_t* id) {
    ncclUniqueId unique;
    static_assert(sizeof(unique) == 128);
    std::memcpy(&unique, id, sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (ctas_ > 0) {
      config.maxCTAs = ctas_;
    }
    if (cudaSetDevice(device_) != cudaSuccess ||
        cudaMalloc(reinterpret_cast<void**>(&token_), 64) != cudaSuccess ||
        cudaMemset(token_, 0, 64) != cudaSuccess ||
        cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&join_, cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&before_, cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&after_, cudaEventDisableTiming) != cudaSuccess) {
      return "device " + std::to_string(device_) + " is not usable";
    }
    ncclComm_t made = nullptr;
    ncclResult_t status = lib_.init(&made, size_, unique, rank_, &config);
    comm_ = made;
    if (status == ncclSuccess || status == ncclInProgress) {
      status = Settle();
    }
    if (status == ncclInProgress) {
      return "not all " + std::to_string(size_) + " ranks came within the timeout";
    }
    if (status != ncclSuccess) {
      return lib_.error_string(status);
    }
    watcher_ = std::jthread([this](std::stop_token stop) { Watch(stop); });
    return "";
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool device_pointers() const override { return true; }

  CommResult AllToAllV(const AllToAllVArgs& args) override { return Joined(StartAllToAllV(args)); }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    return Joined(StartAllReduce(data, count, dtype, op));
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    return Joined(StartAllGather(send, receive, bytes));
  }

  CommResult StartAllToAllV(const AllToAllVArgs& args) override {
    counters_.all_to_all_calls += 1;
    *multiprocessors_ = std::max(all_multiprocessors_ - ctas_, 1);
    return Run("all_to_all_v", [&](ncclComm_t comm) {
      const auto* from = static_cast<const std::uint8_t*>(args.send);
      auto* to = static_cast<std::uint8_t*>(args.receive);
      (void)cudaEventRecord(fork_, stream_);
      PeerOffsets send_offsets(args.send_bytes, args.send_offsets);
      PeerOffsets receive_offsets(args.receive_bytes, args.receive_offsets);
      std::int64_t own_from = 0, own_to = 0, sent = 0, received = 0;
      ncclResult_t status = lib_.group_start();
      const auto keep = [&status](ncclResult_t result) {
        status = status == ncclSuccess || status == ncclInProgress ? result : status;
      };
      for (int peer = 0; peer < size_; ++peer) {
        const std::size_t i = static_cast<std::size_t>(peer);
        const std::int64_t out = args.send_bytes[i], in = args.receive_bytes[i];
        const std::int64_t send_at = send_offsets.Next(i), receive_at = receive_offsets.Next(i);
        if (peer == rank_) {
          own_from = send_at;
          own_to = receive_at;
          continue;
        }
        sent += out;
        received += in;
        if (out > 0) {
          keep(lib_.send(from + send_at, static_cast<std::size_t>(out), ncclUint8, peer, comm,
                         stream_));
          counters_.all_to_all_bytes += out;
        }
        if (in > 0) {
          keep(lib_.receive(to + receive_at, static_cast<std::size_t>(in), ncclUint8, peer, comm,
                            stream_));
        }
      }
      keep(lib_.group_end());
      if (status == ncclInProgress) {
        status = Settle();
      }
      CopyBeside(from + own_from, to + own_to, args.send_bytes[static_cast<std::size_t>(rank_)],
                 std::max(sent, received));
      (void)cudaStreamWaitEvent(stream_, join_);
      return status;
    });
  }

  CommResult StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    if (dtype != DType::kF32 && dtype != DType::kF64 && dtype != DType::kI64 &&
        dtype != DType::kBF16) {
      return Fault("all_reduce", "takes kF32, kF64, kI64 or kBF16");
    }
    counters_.all_reduce_calls += 1;
    counters_.all_reduce_bytes += size_ > 1 ? count * DTypeBytes(dtype) : 0;
    return Run("all_reduce", [&](ncclComm_t comm) {
      return count == 0
                 ? ncclSuccess
                 : lib_.all_reduce(data, data, static_cast<std::size_t>(count), TypeOf(dtype),
                                   op == ReduceOp::kSum ? ncclSum : ncclMax, comm, stream_);
    });
  }

  CommResult StartAllGather(const void* send, void* receive, std::int64_t bytes) override {
    counters_.all_gather_bytes += bytes * (size_ - 1);
    return Run("all_gather", [&](ncclComm_t comm) {
      return bytes == 0 ? ncclSuccess
                        : lib_.all_gather(send, receive, static_cast<std::size_t>(bytes), ncclUint8,
                                          comm, stream_);
    });
  }

  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    counters_.broadcast_bytes += rank_ == root ? bytes * (size_ - 1) : 0;
    return Joined(Run("broadcast", [&](ncclComm_t comm) {
      return bytes == 0 ? ncclSuccess
                        : lib_.broadcast(data, data, static_cast<std::size_t>(bytes), ncclUint8,
                                         root, comm, stream_);
    }));
  }

  void Join() override {
    *multiprocessors_ = all_multiprocessors_;
    (void)cudaSetDevice(device_);
    (void)cudaEventRecord(after_, stream_);
    (void)cudaStreamWaitEvent(compute_, after_);
  }

  // Host and compute lane have both passed it.
  CommResult Barrier() override {
    CommResult result = Joined(Run("barrier", [&](ncclComm_t comm) {
      return lib_.all_reduce(token_, token_, 1, ncclFloat32, ncclSum, comm, stream_);
    }));
    if (result.ok()) {
      // Bounded: the watcher aborts a barrier that does not complete, which releases the lane.
      (void)cudaStreamSynchronize(stream_);
      result = State("barrier");
    }
    return result;
  }

  void Abort() override {
    Fail(CommResult::Code::kPeerLost, "aborted by this rank", /*own_call=*/false);
  }

  CommResult Check() override { return State(last_); }

 private:
  struct Pending {
    cudaEvent_t event;
    const char* what;
    std::int64_t call;
    Clock::time_point deadline;
  };

  std::string Where(const char* what, std::int64_t call) const {
    return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ": " + what +
           " (call " + std::to_string(call) + "): ";
  }
  CommResult Fault(const char* what, const std::string& text) const {
    return {CommResult::Code::kFault, Where(what, calls_) + text};
  }
  CommResult State(const char* what) {
    std::lock_guard lock(mutex_);
    if (failure_.ok()) {
      return {};
    }
    return {failure_.code, Where(what, calls_) + failure_.message};
  }

  // Keeps the first failure, then releases NCCL's kernels. own_call: called from within Run.
  void Fail(CommResult::Code code, const std::string& text, bool own_call) {
    {
      std::lock_guard lock(mutex_);
      if (!failure_.ok()) {
        return;
      }
      failure_ = {code, text};
    }
    Release(own_call);
  }

  void Release(bool own_call) {
    std::unique_lock call(call_mutex_, std::defer_lock);
    if (!own_call) {
      (void)call.try_lock_for(kCallGrace);
    }
    if (ncclComm_t comm = comm_.exchange(nullptr); comm != nullptr) {
      (void)lib_.abort(comm);
    }
  }

  // What is put on the compute lane from now on comes after the call.
  CommResult Joined(CommResult result) {
    if (result.ok()) {
      Join();
    }
    return result;
  }

  // After what the lane held at fork_; join_ says when it is done.
  void CopyBeside(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes,
                  std::int64_t exchanged) {
    (void)cudaStreamWaitEvent(side_, fork_);
    CopyOwnRows(to, from, bytes, exchanged, side_);
    (void)cudaEventRecord(join_, side_);
  }

  // Waits until a non-blocking call is settled, at most the timeout.
  ncclResult_t Settle() {
    const Clock::time_point deadline = Clock::now() + timeout_;
    ncclResult_t state = ncclInProgress;
    while (Clock::now() < deadline) {
      const ncclComm_t comm = comm_;
      if (comm == nullptr || lib_.async_error(comm, &state) != ncclSuccess) {
        return ncclInternalError;
      }
      if (state != ncclInProgress) {
        return state;
      }
      std::this_thread::yield();
    }
    return ncclInProgress;
  }

  template <class Enqueue>
  CommResult Run(const char* what, Enqueue enqueue) {
    ++calls_;
    last_ = what;
    std::unique_lock call(call_mutex_);
    const ncclComm_t comm = comm_;
    CommResult state = State(what);
    if (!state.ok()) {
      return state;
    }
    if (comm == nullptr) {
      return Fault(what, "the communicator was not made");
    }
    (void)cudaSetDevice(device_);
    (void)cudaEventRecord(before_, compute_);
    (void)cudaStreamWaitEvent(stream_, before_);
    ncclResult_t status = enqueue(comm);
    if (status == ncclInProgress) {
      status = Settle();
    }
    if (status != ncclSuccess) {
      const bool late = status == ncclInProgress;
      const std::string text =
          late ? "was not accepted within the timeout" : lib_.error_string(status);
      Fail(late ? CommResult::Code::kTimeout : CommResult::Code::kFault, text, /*own_call=*/true);
      return State(what);
    }
    call.unlock();
    std::lock_guard lock(mutex_);
    cudaEvent_t event = nullptr;
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    } else if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
      return Fault(what, "no event");
    }
    (void)cudaEventRecord(event, stream_);
    pending_.push_back({event, what, calls_, Clock::now() + timeout_});
    wake_.notify_one();
    return {};
  }

  void Watch(std::stop_token stop) {
    (void)cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      if (pending_.empty()) {
        wake_.wait(lock, stop, [&] { return !pending_.empty(); });
        continue;
      }
      while (!pending_.empty() && cudaEventQuery(pending_.front().event) != cudaErrorNotReady) {
        spare_.push_back(pending_.front().event);
        pending_.pop_front();
        // The host enqueues far ahead: an operation's time begins when the one before it is done.
        if (!pending_.empty()) {
          pending_.front().deadline = std::max(pending_.front().deadline, Clock::now() + timeout_);
        }
      }
      if (!pending_.empty() && failure_.ok()) {
        const Pending& oldest = pending_.front();
        ncclResult_t state = ncclSuccess;
        const bool broken = lib_.async_error(comm_, &state) != ncclSuccess ||
                            (state != ncclSuccess && state != ncclInProgress);
        const bool late = Clock::now() >= oldest.deadline;
        if (broken || late) {
          failure_ = {broken ? CommResult::Code::kPeerLost : CommResult::Code::kTimeout,
                      std::string("an earlier ") + oldest.what + " (call " +
                          std::to_string(oldest.call) + ") " +
                          (broken ? std::string("failed: ") + lib_.error_string(state)
                                  : "did not complete within the timeout")};
          lock.unlock();
          Release(/*own_call=*/false);
          lock.lock();
        }
      }
      // Events cannot be waited for together with a deadline; look again soon.
      wake_.wait_for(lock, stop, std::chrono::milliseconds(20), [] { return false; });
    }
  }

  // Constant after Init.
  const NcclLibrary& lib_;
  const cudaStream_t compute_, stream_;  // the backend's lanes: computing, and ours
  int* const multiprocessors_;           // the backend's, for its kernels
  const int all_multiprocessors_, ctas_;
  const int device_, rank_, size_;
  const Clock::duration timeout_;
  float* token_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;     // our lane and the copy of own rows
  cudaEvent_t before_ = nullptr, after_ = nullptr;  // the compute lane and ours
  // The owning thread's.
  std::int64_t calls_ = 0;
  const char* last_ = "start";
  // Held by the owning thread while it is inside NCCL. Never waited for with mutex_ held.
  std::timed_mutex call_mutex_;
  std::atomic<ncclComm_t> comm_ = nullptr;
  // Guards what follows.
  std::mutex mutex_;
  std::condition_variable_any wake_;
  CommResult failure_;
  std::deque<Pending> pending_;
  std::vector<cudaEvent_t> spare_;
  std::jthread watcher_;
};

}  // namespace

// Entries for kernels/cuda/backend.cu.
int NcclVersion() {
  const NcclLibrary& lib = NcclLibrary::Get();
  int version = 0;
  if (lib.handle != nullptr) {
    (void)lib.version(&version);
  }
  return version;
}

int NcclUniqueId(std::uint8_t* id, char* message, std::int64_t message_bytes) {
  const NcclLibrary& lib = NcclLibrary::Get();
  ncclUniqueId unique;
  if (lib.handle == nullptr) {
    Write(message, message_bytes, "NCCL is not available: " + lib.reason);
    return 1;
  }
  const ncclResult_t status = lib.unique_id(&unique);
  if (status != ncclSuccess) {
    Write(message, message_bytes, std::string("ncclGetUniqueId: ") + lib.error_string(status));
    return 1;
  }
  std::memcpy(id, &unique, sizeof(unique));
  return 0;
}

Communicator* NcclCreate(void* compute, void* stream, int device, int* multiprocessors,
                         const std::uint8_t* id, int rank, int size, double timeout_seconds,
                         char* message, std::int64_t message_bytes) {
  const NcclLibrary& lib = NcclLibrary::Get();
  if (lib.handle == nullptr) {
    Write(message, message_bytes, "NCCL is not available: " + lib.reason);
    return nullptr;
  }
  auto comm = std::make_unique<NcclCommunicator>(
      static_cast<cudaStream_t>(compute), static_cast<cudaStream_t>(stream), device,
      multiprocessors, rank, size,
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds)));
  const std::string reason = comm->Init(id);
  if (!reason.empty()) {
    Write(message, message_bytes,
          "rank " + std::to_string(rank) + " of " + std::to_string(size) +
              ": NCCL initialisation on device " + std::to_string(device) + ": " + reason);
    return nullptr;
  }
  return comm.release();
}

}  // namespace octavo

#endif  // OCTAVO_HAVE_NCCL
