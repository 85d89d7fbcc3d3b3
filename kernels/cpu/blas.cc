#include "kernels/cpu/blas.h"

#include <cblas.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/check.h"

namespace octavo {
namespace {

constexpr char kProbeFlag[] = "--octavo-blas-probe";
constexpr char kCoreVariable[] = "OPENBLAS_CORETYPE";
constexpr int kProbeTimeoutMilliseconds = 5000;
constexpr const char* kCandidates[] = {"SKYLAKEX", "HASWELL", ""};

int Int(std::int64_t value) {
  OCTAVO_CHECK(value >= 0 && value <= 0x7FFFFFFF, "BLAS takes 32-bit sizes, got %lld",
               static_cast<long long>(value));
  return static_cast<int>(value);
}

void OneThread() {
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

// Numbers in [-1, 1) from a fixed congruential sequence.
std::vector<float> ProbeValues(std::size_t count, std::uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(seed)) * 0x1p-31f;
  }
  return values;
}

// Largest error of C = A·B (both transpositions) on one shape, relative to Σ|a·b|.
double ProbeError(std::int64_t m, std::int64_t n, std::int64_t k, Transposed ta, Transposed tb) {
  const std::vector<float> a = ProbeValues(static_cast<std::size_t>(m * k), 1);
  const std::vector<float> b = ProbeValues(static_cast<std::size_t>(k * n), 2);
  std::vector<float> c(static_cast<std::size_t>(m * n), NAN);
  Sgemm({.m = m,
         .n = n,
         .k = k,
         .a = a.data(),
         .a_transposed = ta,
         .lda = ta == Transposed::kYes ? m : k,
         .b = b.data(),
         .b_transposed = tb,
         .ldb = tb == Transposed::kYes ? k : n,
         .c = c.data(),
         .ldc = n,
         .beta = 0});
  double worst = 0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      double magnitude = 1e-30;
      for (std::int64_t l = 0; l < k; ++l) {
        const double product =
            static_cast<double>(
                a[static_cast<std::size_t>(ta == Transposed::kYes ? l * m + i : i * k + l)]) *
            static_cast<double>(
                b[static_cast<std::size_t>(tb == Transposed::kYes ? j * k + l : l * n + j)]);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(c[static_cast<std::size_t>(i * n + j)] - sum) / magnitude;
      worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
    }
  }
  return worst;
}

double ProbeGigaflops() {
  constexpr std::int64_t kEdge = 384;
  const std::vector<float> a = ProbeValues(kEdge * kEdge, 3);
  const std::vector<float> b = ProbeValues(kEdge * kEdge, 4);
  std::vector<float> c(kEdge * kEdge);
  double best_seconds = HUGE_VAL;
  for (int i = 0; i < 6; ++i) {  // the first calls warm up
    const auto begin = std::chrono::steady_clock::now();
    Sgemm({.m = kEdge,
           .n = kEdge,
           .k = kEdge,
           .a = a.data(),
           .a_transposed = Transposed::kNo,
           .lda = kEdge,
           .b = b.data(),
           .b_transposed = Transposed::kYes,
           .ldb = kEdge,
           .c = c.data(),
           .ldc = kEdge,
           .beta = 0});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best_seconds = std::min(best_seconds, seconds.count());
  }
  return 2e-9 * kEdge * kEdge * kEdge / best_seconds;
}

// Runs this program with the probe flag under `core_type`; GFLOP/s, or 0 when it was wrong, crashed
// (an instruction that the machine lacks) or hung.
double RunProbe(const char* core_type) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) {
    return 0;
  }
  // Everything the child needs is prepared before fork: after it only async-signal-safe calls.
  const std::string setting = std::string(kCoreVariable) + "=" + core_type;
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, kCoreVariable, std::strlen(kCoreVariable)) != 0) {
      environment.push_back(*entry);
    }
  }
  if (core_type[0] != '\0') {
    environment.push_back(const_cast<char*>(setting.c_str()));
  }
  environment.push_back(nullptr);
  char program[] = "octavo-blas-probe";
  char flag[sizeof(kProbeFlag)];
  std::memcpy(flag, kProbeFlag, sizeof(kProbeFlag));
  std::array<char*, 3> arguments = {program, flag, nullptr};

  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDOUT_FILENO);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    execve("/proc/self/exe", arguments.data(), environment.data());
    _exit(127);
  }
  close(pipe_ends[1]);
  std::string text;
  if (child > 0) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(kProbeTimeoutMilliseconds);
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd readable = {pipe_ends[0], POLLIN, 0};
      if (left.count() <= 0 || poll(&readable, 1, static_cast<int>(left.count())) <= 0) {
        kill(child, SIGKILL);
        break;
      }
      char buffer[256];
      const ssize_t got = read(pipe_ends[0], buffer, sizeof(buffer));
      if (got <= 0) {
        break;
      }
      text.append(buffer, static_cast<std::size_t>(got));
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      text.clear();
    }
  }
  close(pipe_ends[0]);
  return text.empty() ? 0 : std::strtod(text.c_str(), nullptr);
}

}  // namespace

void Sgemm(const SgemmArgs& args) {
  OneThread();
  if (args.m == 0 || args.n == 0) {
    return;
  }
  if (args.k == 0) {
    for (std::int64_t i = 0; i < args.m && args.beta == 0; ++i) {
      std::fill_n(args.c + i * args.ldc, args.n, 0.0f);
    }
    return;
  }
  cblas_sgemm(CblasRowMajor, args.a_transposed == Transposed::kYes ? CblasTrans : CblasNoTrans,
              args.b_transposed == Transposed::kYes ? CblasTrans : CblasNoTrans, Int(args.m),
              Int(args.n), Int(args.k), 1.0f, args.a, Int(args.lda), args.b, Int(args.ldb),
              args.beta, args.c, Int(args.ldc));
}

const char* BlasCoreType() { return openblas_get_corename(); }

void MaybeRunBlasProbe(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], kProbeFlag) != 0) {
    return;
  }
  // Relative to Σ|a·b| a correct sgemm is far below k·2^-24; a wrong kernel is far above.
  for (const Transposed ta : {Transposed::kNo, Transposed::kYes}) {
    for (const Transposed tb : {Transposed::kNo, Transposed::kYes}) {
      if (ProbeError(33, 47, 129, ta, tb) > 129 * 0x1p-24 ||
          ProbeError(1, 65, 384, ta, tb) > 384 * 0x1p-24) {
        std::exit(1);
      }
    }
  }
  std::printf("%.3f %s\n", ProbeGigaflops(), BlasCoreType());
  std::exit(0);
}

std::string ChooseBlasCoreType() {
  if (const char* set = std::getenv(kCoreVariable); set != nullptr) {
    return set;
  }
  std::string best;
  double best_rate = 0;
  for (const char* candidate : kCandidates) {
    const double rate = RunProbe(candidate);
    // A later candidate must be clearly faster: noise must not make ranks of one job differ.
    if (rate > best_rate * 1.25) {
      best = candidate;
      best_rate = rate;
    }
  }
  return best;
}

void EnsureBlasCoreType(char** argv) {
  if (std::getenv(kCoreVariable) != nullptr) {
    return;
  }
  const std::string choice = ChooseBlasCoreType();
  if (choice.empty()) {
    return;
  }
  setenv(kCoreVariable, choice.c_str(), 1);
  setenv("OPENBLAS_NUM_THREADS", "1", 0);  // no idle pool, and no thread before main forks
  execv("/proc/self/exe", argv);
  std::perror("re-executing with OPENBLAS_CORETYPE set failed; sgemm stays slow");
  unsetenv(kCoreVariable);
}

}  // namespace octavo
