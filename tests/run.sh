#!/usr/bin/env bash
# Passes the tests: installs what is missing, builds everything, runs ctest, then tests/sanitize.sh.
#   tests/run.sh [--no-install] [--no-sanitize] [--build-dir DIR] [-- ctest arguments]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build
install=1
sanitize=1
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) install=0 ;;
    --no-sanitize) sanitize=0 ;;
    --build-dir) build=${2:?--build-dir needs a folder}; shift ;;
    --) shift; break ;;
    -h|--help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; valid: --no-install, --no-sanitize, --build-dir DIR, -- ctest arguments" >&2; exit 2 ;;
  esac
  shift
done
[ $install = 1 ] && "$root/deploy/install_deps.sh" build test
start=$SECONDS
cmake -S "$root" -B "$build" -G Ninja >"$build.cmake.log" 2>&1 || { cat "$build.cmake.log"; exit 3; }
grep -- '-- Octavo:' "$build.cmake.log" || true
rm -f "$build.cmake.log"
ninja -C "$build" --quiet || ninja -C "$build" -j1
echo "built in $((SECONDS - start)) s"
start=$SECONDS
# GPU tests skip themselves where there is no device; everything else must pass.
(cd "$build" && ctest --output-on-failure -j2 "$@")
echo "tests in $((SECONDS - start)) s"
[ $sanitize = 0 ] || "$root/tests/sanitize.sh" --build-dir "$build"
