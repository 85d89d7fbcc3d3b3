#include "worker/agent/inventory.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "base/bounded_queue.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "base/subprocess.h"
#include "nlohmann/json.hpp"

namespace octavo {
namespace {

constexpr std::size_t kShownOutputMax = 300;

std::string LastPart(std::string text) {
  text = std::string(StripSpace(text));
  return text.size() <= kShownOutputMax ? text : text.substr(text.size() - kShownOutputMax);
}

}  // namespace

absl::StatusOr<v1::SlotFacts> ParseProbe(std::string_view json) {
  const nlohmann::json parsed = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    return InvalidArgumentError(
        StrCat("the probe's output is not a JSON object: \"", LastPart(std::string(json)), "\""));
  }
  v1::SlotFacts facts;
  const auto text = [&parsed](const char* key) {
    const auto found = parsed.find(key);
    return found != parsed.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const auto number = [&parsed](const char* key) {
    const auto found = parsed.find(key);
    return found != parsed.end() && found->is_number() ? found->get<std::int64_t>() : 0;
  };
  facts.set_device_name(text("device_name"));
  facts.set_sm(static_cast<std::int32_t>(number("sm")));
  facts.set_memory_bytes(number("memory_bytes"));
  facts.set_driver(text("driver"));
  facts.set_cuda(text("cuda"));
  facts.set_nccl(text("nccl"));
  facts.set_cublaslt(text("cublaslt"));
  facts.set_cudnn(text("cudnn"));
  if (facts.device_name().empty()) {
    return InvalidArgumentError("the probe's output has no \"device_name\"");
  }
  return facts;
}

absl::StatusOr<std::vector<v1::SlotFacts>> ProbeSlots(const ProbeOptions& options) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  std::vector<absl::StatusOr<std::unique_ptr<Subprocess>>> probes;
  std::vector<std::string> out_paths, error_paths;
  for (int slot = 0; slot < options.slots; ++slot) {
    out_paths.push_back(JoinPath(options.folder, StrCat("probe-", slot, ".json")));
    error_paths.push_back(JoinPath(options.folder, StrCat("probe-", slot, ".log")));
    RETURN_IF_ERROR(fs.RemoveTree(out_paths.back()));
    RETURN_IF_ERROR(fs.RemoveTree(error_paths.back()));
    probes.push_back(Subprocess::Spawn({.argv = {options.rank_binary, "--probe", "--device",
                                                 options.device, "--device-ordinal", StrCat(slot)},
                                        .stdout_path = out_paths.back(),
                                        .stderr_path = error_paths.back()}));
  }
  const SteadyTime deadline = DeadlineAfter(kProbeTimeLimit);
  std::vector<v1::SlotFacts> slots;
  absl::Status first_error;
  int usable = 0;
  for (int slot = 0; slot < options.slots; ++slot) {
    const auto at = static_cast<std::size_t>(slot);
    const auto probe = [&]() -> absl::StatusOr<v1::SlotFacts> {
      RETURN_IF_ERROR(probes[at]);
      const std::optional<ExitReason> exit = (*probes[at])->Wait(deadline);
      if (!exit.has_value()) {
        return DeadlineExceededError(StrCat("no answer within ", kProbeTimeLimit.count(), " s"));
      }
      if (!exit->success()) {
        const absl::StatusOr<std::string> said = fs.ReadFile(error_paths[at]);
        return FailedPreconditionError(
            StrCat(exit->DebugString(), ": ", LastPart(said.ok() ? *said : "")));
      }
      ASSIGN_OR_RETURN(const std::string json, fs.ReadFile(out_paths[at]));
      return ParseProbe(json);
    };
    absl::StatusOr<v1::SlotFacts> facts = probe();
    if (facts.ok()) {
      ++usable;
      slots.push_back(*std::move(facts));
    } else {
      const absl::Status status =
          Annotate(facts.status(), StrCat("probing slot ", slot, " with ", options.rank_binary));
      LogError("probe_failed", {{"slot", slot}, {"error", ToString(status)}});
      UpdateStatus(&first_error, status);
      v1::SlotFacts broken;
      broken.set_device_name(StrCat("probe failed: ", Message(facts.status())));
      broken.set_poisoned(true);
      slots.push_back(std::move(broken));
    }
    slots.back().set_slot(slot);
  }
  if (usable == 0) {
    return Annotate(first_error, "no usable slot");
  }
  return slots;
}

std::string DefaultAdvertiseAddress() {
  std::string address = "127.0.0.1";
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    return address;
  }
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET ||
        (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    char text[INET_ADDRSTRLEN];
    const auto* in = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (::inet_ntop(AF_INET, &in->sin_addr, text, sizeof(text)) != nullptr) {
      address = text;
      break;
    }
  }
  ::freeifaddrs(list);
  return address;
}

std::string HostName() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

}  // namespace octavo
