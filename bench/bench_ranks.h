// Ranks of a bench as threads of one process, each with a device and a communicator of its own, as
// rank processes have them: NCCL between GPUs, Gloo over loopback between CPU ranks or where there
// are fewer GPUs than ranks.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "worker/comm/gloo.h"
#include "worker/comm/rendezvous.h"
#include "worker/comm/self.h"
#include "worker/rank/backend_loader.h"

namespace octavo::bench {

struct RanksOptions {
  int ranks = 1;
  std::string device = "cuda";
  double timeout_seconds = 60;  // of every collective
};

struct BenchRank {
  int rank = 0, size = 1;
  const PluginTable* plugin = nullptr;  // null on the CPU
  Backend backend;
  Communicator* comm = nullptr;
  std::string transport;  // "self", "nccl" or "gloo"
};

// How many devices there are, up to `most`.
inline int CountDevices(const std::string& device, int most) {
  if (device == "cpu") {
    return most;
  }
  int count = 0;
  while (count < most && ProbeDevice(device, count).ok()) {
    ++count;
  }
  return count;
}

// Runs body once per rank, all at the same time; the first error in rank order. A rank that fails
// aborts its communicator, so that the others end too.
inline absl::Status RunRanks(const RanksOptions& options,
                             const std::function<absl::Status(BenchRank&)>& body) {
  const int devices = CountDevices(options.device, options.ranks);
  if (devices == 0) {
    return ProbeDevice(options.device, 0).status();
  }
  const bool nccl = options.device == "cuda" && devices == options.ranks && options.ranks > 1;
  InProcessStore store;
  std::vector<absl::Status> results(static_cast<std::size_t>(options.ranks));
  const auto run = [&](int r) -> absl::Status {
    ASSIGN_OR_RETURN(const std::unique_ptr<LoadedBackend> loaded,
                     LoadedBackend::Open(options.device, r % devices));
    BenchRank rank{.rank = r, .size = options.ranks, .plugin = loaded->plugin()};
    rank.backend = loaded->backend();
    std::unique_ptr<Communicator> comm;
    if (options.ranks == 1) {
      comm = CreateSelfCommunicator();
      rank.transport = "self";
    } else if (nccl) {
      if (rank.plugin->nccl_create == nullptr) {
        return FailedPreconditionError("the plug-in was built without NCCL");
      }
      char message[512] = {};
      std::string id(128, '\0');
      if (r == 0) {
        if (rank.plugin->nccl_unique_id(reinterpret_cast<std::uint8_t*>(id.data()), message,
                                        sizeof(message)) != 0) {
          return InternalError(message);
        }
        RETURN_IF_ERROR(store.Set("nccl-id", id));
      }
      ASSIGN_OR_RETURN(id, store.Get("nccl-id", options.timeout_seconds));
      comm.reset(rank.plugin->nccl_create(
          &rank.backend, reinterpret_cast<const std::uint8_t*>(id.data()), r, options.ranks,
          options.timeout_seconds, message, sizeof(message)));
      if (comm == nullptr) {
        return InternalError(message);
      }
      rank.transport = "nccl";
    } else {
      ASSIGN_OR_RETURN(comm,
                       CreateGlooCommunicator({.rank = r,
                                               .size = options.ranks,
                                               .group = "bench",
                                               .bind_address = "127.0.0.1",
                                               .store = &store,
                                               .connect_timeout_seconds = options.timeout_seconds,
                                               .timeout_seconds = options.timeout_seconds}));
      rank.transport = "gloo";
    }
    rank.comm = comm.get();
    const absl::Status status = body(rank);
    if (!status.ok()) {
      comm->Abort();
    }
    return status;
  };
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < options.ranks; ++r) {
      threads.emplace_back([&, r] { results[static_cast<std::size_t>(r)] = run(r); });
    }
  }
  for (int r = 0; r < options.ranks; ++r) {
    RETURN_IF_ERROR(Annotate(results[static_cast<std::size_t>(r)], StrCat("rank ", r)));
  }
  return absl::OkStatus();
}

}  // namespace octavo::bench
