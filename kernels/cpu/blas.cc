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
#include <ctime>
#include <vector>

#include "base/check.h"

namespace octavo {
namespace {

constexpr char kProbeFlag[] = "--octavo-blas-probe";
constexpr char kCoreVariable[] = "OPENBLAS_CORETYPE";
constexpr char kThreadsVariable[] = "OPENBLAS_NUM_THREADS";
constexpr char kSettledVariable[] = "OCTAVO_BLAS_SETTLED";  // of the process that re-executed
// A probe takes 0.1 s of processor time; what is longer is the machine's load, not the kernel.
constexpr int kProbeTimeoutMilliseconds = 10000;
constexpr int kProbeRuns = 2;
// The line that a probe prints once its products are right, before it takes times.
constexpr char kProbeCorrect[] = "correct\n";
// How many times slower than the next a correct candidate must be to be passed over. Noise of a
// busy machine stays far below; OpenBLAS's mistake about the CPU's model costs 5 and more.
constexpr double kMuchSlower = 4;

// Best first, of those that the CPU can execute. "" is OpenBLAS's own choice.
std::vector<std::string> Candidates() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    names.push_back("SKYLAKEX");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    names.push_back("HASWELL");
  }
#endif
  names.push_back("");
  return names;
}

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

// Of processor time: what else runs on the machine does not count.
double ProbeGigaflops() {
  constexpr std::int64_t kEdge = 384;
  const std::vector<float> a = ProbeValues(kEdge * kEdge, 3);
  const std::vector<float> b = ProbeValues(kEdge * kEdge, 4);
  std::vector<float> c(kEdge * kEdge);
  const auto processor_seconds = [] {
    timespec time = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  double best_seconds = HUGE_VAL;
  for (int i = 0; i < 6; ++i) {  // the first calls warm up
    const double begin = processor_seconds();
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
    best_seconds = std::min(best_seconds, processor_seconds() - begin);
  }
  return 2e-9 * kEdge * kEdge * kEdge / best_seconds;
}

// The environment without the variables that the probe or the re-execution sets itself.
bool IsOurs(const char* entry) {
  for (const char* name : {kCoreVariable, kThreadsVariable, kSettledVariable}) {
    const std::size_t length = std::strlen(name);
    if (std::strncmp(entry, name, length) == 0 && entry[length] == '=') {
      return true;
    }
  }
  return false;
}

// Runs this program with the probe flag under `core_type`. Not correct when it was wrong or crashed
// (an instruction that the machine lacks); `hung` when the time was over before it could say.
struct ProbeRun {
  BlasProbe result;
  bool hung = false;
};
ProbeRun RunProbeOnce(const std::string& core_type) {
  ProbeRun run = {.result = {.core_type = core_type}};
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) {
    return run;
  }
  // Everything the child needs is prepared before fork: after it only async-signal-safe calls.
  const std::string setting = std::string(kCoreVariable) + "=" + core_type;
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!IsOurs(*entry)) {
      environment.push_back(*entry);
    }
  }
  const std::string threads = std::string(kThreadsVariable) + "=1";
  environment.push_back(const_cast<char*>(threads.c_str()));
  if (!core_type.empty()) {
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
  bool timed_out = false;
  if (child > 0) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(kProbeTimeoutMilliseconds);
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd readable = {pipe_ends[0], POLLIN, 0};
      if (left.count() <= 0 || poll(&readable, 1, static_cast<int>(left.count())) <= 0) {
        kill(child, SIGKILL);
        timed_out = true;
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
    const bool ended_well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    const std::size_t said = std::strlen(kProbeCorrect);
    run.result.correct = (ended_well || timed_out) && text.compare(0, said, kProbeCorrect) == 0;
    if (run.result.correct && ended_well) {
      run.result.gigaflops = std::strtod(text.c_str() + said, nullptr);
    }
    run.hung = timed_out && !run.result.correct;
  }
  close(pipe_ends[0]);
  return run;
}

BlasProbe RunProbe(const std::string& core_type) {
  ProbeRun run;
  for (int i = 0; i < kProbeRuns; ++i) {
    run = RunProbeOnce(core_type);
    if (!run.hung) {
      break;
    }
  }
  return run.result;
}

// The program's path, so that ps and core dumps name it; /proc/self/exe when it was replaced.
std::string ProgramPath() {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  if (size > 0 && static_cast<std::size_t>(size) < sizeof(path)) {
    const std::string resolved(path, static_cast<std::size_t>(size));
    if (access(resolved.c_str(), X_OK) == 0) {
      return resolved;
    }
  }
  return "/proc/self/exe";
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
  std::fputs(kProbeCorrect, stdout);
  std::fflush(stdout);
  std::printf("%.3f %s\n", ProbeGigaflops(), BlasCoreType());
  std::exit(0);
}

std::string PickBlasCoreType(const std::vector<BlasProbe>& probes) {
  const BlasProbe* pick = nullptr;
  for (const BlasProbe& probe : probes) {
    if (!probe.correct) {
      continue;
    }
    const bool pick_is_much_slower =
        pick != nullptr && pick->gigaflops > 0 && probe.gigaflops >= kMuchSlower * pick->gigaflops;
    if (pick == nullptr || pick_is_much_slower) {
      pick = &probe;
    }
  }
  return pick == nullptr ? "" : pick->core_type;
}

std::string ChooseBlasCoreType() {
  if (const char* set = std::getenv(kCoreVariable); set != nullptr) {
    return set;
  }
  std::vector<BlasProbe> probes;
  for (const std::string& candidate : Candidates()) {
    probes.push_back(RunProbe(candidate));
  }
  return PickBlasCoreType(probes);
}

void EnsureBlasCoreType(char** argv) {
  if (std::getenv(kSettledVariable) != nullptr) {
    unsetenv(kSettledVariable);  // not for programs that this one starts
    return;
  }
  const char* core = std::getenv(kCoreVariable);
  const char* threads = std::getenv(kThreadsVariable);
  if (core != nullptr && threads != nullptr && std::strcmp(threads, "1") == 0) {
    return;
  }
  const std::string choice = ChooseBlasCoreType();
  if (!choice.empty()) {
    setenv(kCoreVariable, choice.c_str(), 1);
  }
  // No idle pool: its threads would be older than main, with signals that main blocks.
  setenv(kThreadsVariable, "1", 1);
  setenv(kSettledVariable, "1", 1);
  execv(ProgramPath().c_str(), argv);
  std::perror("re-executing with OPENBLAS_CORETYPE set failed; sgemm stays as it is");
  unsetenv(kSettledVariable);
}

}  // namespace octavo
