// Every bound of the service that more than one part must agree on. Times in milliseconds.
#pragma once

#include <cstdint>

namespace octavo {

inline constexpr std::int64_t kHeartbeatIntervalMs = 1000;   // worker → controller
inline constexpr std::int64_t kWorkerLeaseMs = 10000;        // silence before a worker is lost
inline constexpr std::int64_t kOrphanGraceMs = 600000;       // ranks go on without a controller
inline constexpr std::int64_t kReconnectBackoffMinMs = 100;
inline constexpr std::int64_t kReconnectBackoffMaxMs = 3000;
// How long one attempt to connect may take (gRPC's name for it: minimum of the reconnect back-off).
// A refusal is known at once; this bounds a handshake with a busy peer.
inline constexpr std::int64_t kConnectTimeoutMs = 5000;
inline constexpr std::int64_t kRankHelloTimeoutMs = 30000;   // process start to hello
inline constexpr std::int64_t kRankStopGraceMs = 30000;      // wish → SIGTERM
inline constexpr std::int64_t kRankTermGraceMs = 5000;       // SIGTERM → SIGKILL
inline constexpr std::int64_t kRankKillGraceMs = 10000;      // SIGKILL → slot poisoned
inline constexpr std::int64_t kShutdownLimitMs = 10000;      // server shutdown, all in all
inline constexpr std::int64_t kWatchBookmarkMs = 15000;
inline constexpr std::int64_t kUnaryDeadlineMs = 10000;
inline constexpr std::int64_t kRendezvousGetMs = 120000;

inline constexpr std::int64_t kMaxMessageBytes = 4 << 20;          // public service
inline constexpr std::int64_t kMaxInternalMessageBytes = 32 << 20; // controller ↔ worker
inline constexpr std::int64_t kMaxSpecBytes = 256 << 10;
inline constexpr std::int64_t kMaxLogChunkBytes = 256 << 10;
inline constexpr std::int64_t kMaxWatchQueue = 1024;               // events per watcher
inline constexpr std::int64_t kMaxReliableQueue = 65536;           // reports per worker
inline constexpr std::int64_t kMaxRankQueue = 1024;                // reports per rank before drops
inline constexpr std::int64_t kMaxEventsPerJob = 20000;
inline constexpr std::int64_t kMaxKeyValueBytes = 64 << 10;
inline constexpr std::int64_t kMaxKeysPerAttempt = 1 << 20;
inline constexpr std::int64_t kMaxMetricSeries = 50000;            // per process
inline constexpr std::int32_t kMaxPageSize = 1000;
inline constexpr std::int32_t kProfileStepsMax = 100;
inline constexpr std::int32_t kDefaultPageSize = 100;

static_assert(kWorkerLeaseMs >= 5 * kHeartbeatIntervalMs, "a lease outlives several lost heartbeats");
static_assert(kOrphanGraceMs > kWorkerLeaseMs, "ranks outlive a restart of the controller");
static_assert(kConnectTimeoutMs + kReconnectBackoffMaxMs < kWorkerLeaseMs,
              "a worker reconnects within its lease");
static_assert(kMaxLogChunkBytes < kMaxMessageBytes);

}  // namespace octavo
