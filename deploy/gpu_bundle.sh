#!/usr/bin/env bash
# Octavo for a GPU host without our packages: one relocatable archive of programs, the CUDA plug-in and
# every shared library that they need but libc's own, libgcc and CUDA's (the host's driver and toolkit
# provide those). Unpack it anywhere; bin/octavo-worker --device cuda is all a host needs.
#
#   deploy/gpu_bundle.sh [--build DIR] [--output FILE] [--no-build]
#     --build DIR    build folder (default: build-gpu-bundle); needs nvcc
#     --output FILE  archive (default: DIR/octavo-gpu.tar.gz)
#     --no-build     pack what DIR holds; programs that are not there are left out and named
# Exit codes: 0 made; 1 the archive is not relocatable or over 60 MiB; 2 usage; 3 the build failed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build-gpu-bundle
output=
make=1
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$(mkdir -p "${2:?--build needs a folder}" && cd "$2" && pwd); shift ;;
    --output) output=${2:?--output needs a file}; shift ;;
    --no-build) make=0 ;;
    -h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; valid: --build DIR, --output FILE, --no-build" >&2; exit 2 ;;
  esac
  shift
done
output=${output:-$build/octavo-gpu.tar.gz}
limit_mib=60
programs=(octavo octavo-controller octavo-worker octavo-rank octavo-tokenizer bench_train_step_gpu
  bench_train_step_ranks bench_all_to_all op_parity_test)
# The host's own: libc and its parts, the loader, libgcc, CUDA.
excluded='^(ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libcuda|libcudart|libcublas|libcublasLt|libcudnn.*|libnccl|libnvrtc.*)\.so'

if [ $make = 1 ]; then
  # DT_RPATH rather than DT_RUNPATH: it also serves the libraries that our libraries need.
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DOCTAVO_CUDA=ON \
    -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >"$build.cmake.log" 2>&1 ||
    { cat "$build.cmake.log" >&2; exit 3; }
  rm -f "$build.cmake.log"
  ninja -C "$build" octavo_cuda "${programs[@]}" || exit 3
fi

stage=$build/octavo-gpu
rm -rf "$stage"
mkdir -p "$stage/bin" "$stage/lib" "$stage/share"
missing=()
for name in "${programs[@]}"; do
  file=$(find "$build/bin" "$build/bench" -maxdepth 1 -name "$name" -type f -print -quit)
  if [ -z "$file" ]; then missing+=("$name"); continue; fi
  strip -o "$stage/bin/$name" "$file"
done
strip -o "$stage/lib/liboctavo_cuda.so" "$build/lib/liboctavo_cuda.so"
cp "$root/deploy/gpu_smoke.sh" "$root/deploy/many_gpus.sh" "$root/deploy/gpu_common.sh" "$root/deploy/gpu_job.yaml" \
  "$root/bench/torch_all_to_all.py" "$root/tests/interop/hf/check_transformers.py" "$stage/share/"

# Libraries by name from the loader's own answer (ldd), stripped; symbolic links resolved.
for file in "$stage"/bin/* "$stage/lib/liboctavo_cuda.so"; do
  ldd "$file" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}'
done | sort -u | while read -r name path; do
  if [[ $name =~ $excluded ]] || [ -e "$stage/lib/$name" ]; then continue; fi
  strip -o "$stage/lib/$name" "$(readlink -f "$path")"
done

# Relocatable: every program looks beside itself, and nothing needed is neither packed nor the host's.
bad=0
for file in "$stage"/bin/*; do
  readelf -d "$file" | grep -q 'Library rpath: \[.*\$ORIGIN/../lib' ||
    { echo "error: ${file#"$stage"/} has no \$ORIGIN/../lib in its rpath" >&2; bad=1; }
done
for file in "$stage"/bin/* "$stage"/lib/*; do
  readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | while read -r name; do
    [[ $name =~ $excluded ]] || [ -e "$stage/lib/$name" ] || echo "error: ${file#"$stage"/} needs $name" >&2
  done
done 2>&1 | tee "$stage.problems" >&2
[ -s "$stage.problems" ] && bad=1
rm -f "$stage.problems"

tar -C "$build" --owner=0 --group=0 -czf "$output" octavo-gpu
mib=$((($(stat -c %s "$output") + 1048575) / 1048576))
echo "$output: $mib MiB packed, $(du -sm "$stage" | cut -f1) MiB unpacked, $(ls "$stage/lib" | wc -l) libraries"
[ ${#missing[@]} = 0 ] || echo "left out (not built): ${missing[*]}"
[ $mib -le $limit_mib ] || { echo "error: over $limit_mib MiB" >&2; bad=1; }
exit $bad
