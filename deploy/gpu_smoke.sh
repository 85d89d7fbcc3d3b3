#!/usr/bin/env bash
# The service on one GPU, end to end, from an unpacked bundle (deploy/gpu_bundle.sh): probe, controller,
# workers, and one small job per recipe on the GPU and on the CPU of the same host; prints how far their
# loss curves are apart (tolerances and their reason: gpu_common.sh). Two ranks share the GPU through Gloo
# and pinned memory.
#
#   gpu_smoke.sh [--dir DIR] [--steps N] [--recipes "bf16 fp8_flow …"] [--text "FOLDER …"] [--bin DIR]
#                [--device cuda|cpu] [--limit SECONDS]
#     --device cpu  tries the script itself where there is no GPU
#     --limit       longest time of a job (default 150)
# Exit codes: 0 all agree; 1 a job failed, a curve is off or a profile could not be taken; 2 usage.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
run=/tmp/octavo-gpu-smoke
# shellcheck source=deploy/gpu_common.sh
. "$here/gpu_common.sh"
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) common_option "$1" "${2:-}" || { echo "error: unknown option $1" >&2; exit 2; }; shift ;;
  esac
  shift
done
prepare

probe=$(octavo-rank --probe --device "$device") || exit 1
echo "probe: $probe"
start_controller
worker cpu cpu $(($(nproc) > 4 ? $(nproc) - 4 : 1))
worker gpu-a "$device" 1  # two workers, one GPU: two ranks may share it
worker gpu-b "$device" 1
octavo workers

cases=()
for recipe in $recipes; do cases+=("$recipe 1"); done
for recipe in bf16 fp8_flow fp8_current fp8_delayed; do [[ " $recipes " != *" $recipe "* ]] || cases+=("$recipe 2"); done
for c in "${cases[@]}"; do
  read -r recipe ranks <<<"$c"
  for where in gpu cpu; do
    submit "$where-${recipe//_/-}-r$ranks" "$recipe" "$ranks" "$([ $where = gpu ] && echo "$device" || echo cpu)" "$steps"
  done
done
settle

status=0
printf '%-14s %5s %9s | %8s %8s | %8s %8s | %8s %8s %8s %8s  %s\n' recipe ranks transport cpu1 gpu1 cpuN gpuN d_first d_median d_last5 d_max verdict
for c in "${cases[@]}"; do
  read -r recipe ranks <<<"$c"
  gpu=gpu-${recipe//_/-}-r$ranks cpu=cpu-${recipe//_/-}-r$ranks
  read -r verdict first median late most cpu1 gpu1 cpun gpun <<<"$(distance "$cpu" "$gpu" "$steps")"
  printf '%-14s %5d %9s | %8s %8s | %8s %8s | %8s %8s %8s %8s  %s\n' "$recipe" "$ranks" "$(transport "$gpu")" \
    "$cpu1" "$gpu1" "$cpun" "$gpun" "$first" "$median" "$late" "$most" "$verdict"
  [ "$verdict" = ok ] || { status=1; explain "$gpu"; explain "$cpu"; }
done
for recipe in bf16 fp8-flow fp8-current fp8-delayed; do
  read -r verdict _ median _ most _ <<<"$(distance "cpu-$recipe-r1" "cpu-$recipe-r2" "$steps")"
  [ "$verdict" = INCOMPLETE ] || echo "for scale: $recipe on the CPU alone, 1 rank against 2 (other orders of sums): median $median, largest $most"
done

# Where a step goes, by the service's own profile of a running job.
name=profile
submit $name fp8_flow 1 "$device" 100000
for _ in $(seq 100); do
  octavo profile "$name" --steps 5 --limit 15 --timeout 60 --output "$run/profile.json" >"$run/profile.txt" 2>"$run/profile.err" && break
  pause 0.3
done
if grep -q 'grouped_gemm' "$run/profile.txt"; then
  cat "$run/profile.txt"
else
  echo "no profile:" && cat "$run/profile.err" && status=1
fi
octavo cancel "$name" >/dev/null
settle
exit $status
