#!/usr/bin/env bash
# Builds chosen tests with sanitizers and runs them; any report fails.
#   tests/sanitize.sh [--build-dir PREFIX] [--only address|thread|annotations]
# address: AddressSanitizer with leaks and UndefinedBehaviorSanitizer, in PREFIX-address.
# thread: ThreadSanitizer over code with threads of its own, in PREFIX-thread.
# annotations: clang's -Wthread-safety over files with lock annotations, where clang++ is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
prefix=$root/build
only=
while [ $# -gt 0 ]; do
  case $1 in
    --build-dir) prefix=${2:?--build-dir needs a folder}; shift ;;
    --only) only=${2:?--only needs address, thread or annotations}; shift ;;
    -h|--help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; valid: --build-dir PREFIX, --only address|thread|annotations" >&2; exit 2 ;;
  esac
  shift
done
case $only in
  ''|address|thread|annotations) ;;
  *) echo "error: --only $only; valid: address, thread, annotations" >&2; exit 2 ;;
esac

# Parsers of what comes from outside, owners of files, the state machines, and the CPU's kernels.
address_tests="unit_base unit_kernels unit_proto_spec unit_proto_precision unit_proto_convert
  unit_worker_data unit_worker_comm unit_worker_checkpoint unit_controller_store unit_controller_core
  unit_controller_policy unit_controller_scheduler cluster_sim_test"
# Debian's gRPC is not instrumented: whatever is handed over through it would be reported, so what
# needs it is not here. For Abseil's mutex see tests/support/tsan_absl.cc.
thread_tests="unit_base unit_worker_comm"

# name, sanitizers, optimisation: builds and runs $4...
run_tree() {
  local name=$1 sanitizers=$2 optimisation=$3 build=$prefix-$1
  shift 3
  local start=$SECONDS
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Sanitize "-DCMAKE_CXX_FLAGS=$optimisation -g1" \
    -DOCTAVO_SANITIZE="$sanitizers" -DOCTAVO_CUDA=OFF -DOCTAVO_BENCH=OFF -DOCTAVO_WERROR=OFF \
    >"$build.cmake.log" 2>&1 || { cat "$build.cmake.log"; exit 3; }
  rm -f "$build.cmake.log"
  ninja -C "$build" --quiet "$@" || ninja -C "$build" -j1 "$@"
  echo "sanitize $name: built in $((SECONDS - start)) s"
  start=$SECONDS
  local test failed=
  for test in "$@"; do
    # Simulations are one thread and slow under a sanitizer: fewer seeds find what it can.
    if ! OCTAVO_SIM_RUNS=12 OCTAVO_HISTORIES=300 timeout -k 5 400 "$build/bin/$test" --gtest_brief=1 \
        >"$build/$test.log" 2>&1; then
      tail -n 80 "$build/$test.log"
      echo "sanitize $name: $test failed; all of its output: $build/$test.log" >&2
      failed="$failed $test"
    fi
  done
  [ -z "$failed" ] || exit 1
  echo "sanitize $name: $# tests in $((SECONDS - start)) s"
}

# Lock annotations are checked by clang alone, and need no code to be generated.
check_annotations() {
  local clang
  clang=$(command -v clang++ || command -v clang++-14 || true)
  if [ -z "$clang" ]; then
    echo "sanitize annotations: no clang++ here, not checked"
    return
  fi
  local files file
  files=$(cd "$root" && grep -rlE 'ABSL_GUARDED_BY|ABSL_LOCKS|ABSL_EXCLUSIVE|absl::Mutex' \
    base controller worker tests/support --include='*.cc')
  for file in $files; do
    (cd "$root" && "$clang" -std=c++20 -fsyntax-only -Wthread-safety -Wthread-safety-beta -Werror -I. "$file")
  done
  echo "sanitize annotations: $(echo "$files" | wc -w) files"
}

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export LSAN_OPTIONS=suppressions=$root/tests/lsan.supp:print_suppressions=0
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
[ -n "$only" ] && [ "$only" != annotations ] || check_annotations
# shellcheck disable=SC2086  # lists of words
[ -n "$only" ] && [ "$only" != address ] || run_tree address address,undefined -O1 $address_tests
# shellcheck disable=SC2086
[ -n "$only" ] && [ "$only" != thread ] || run_tree thread thread -O0 $thread_tests
