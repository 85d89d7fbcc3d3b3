#!/usr/bin/env bash
# Expert parallelism over the GPUs of one host, end to end, in a single call from an unpacked bundle
# (deploy/gpu_bundle.sh), for 2, 4 and 8 GPUs as far as the host has them: NCCL's collectives, the service
# with one worker of all GPUs, every recipe's loss beside the CPU backend's, training that goes on with other
# numbers of ranks, a killed rank, dispatch and combine, whole steps. One table for each number of GPUs; a
# number that the host has not is named as skipped.
#
#   many_gpus.sh [--ranks "2 4 8"] [--gpus N] [--parts "collectives losses resume kill all_to_all train_step"]
#                [--recipes "bf16 fp8_flow …"] [--configs "A B"] [--steps N] [--dir DIR] [--bin DIR] [--text "FOLDER …"]
#                [--device cuda|cpu] [--limit SECONDS]
#     --ranks      numbers of ranks to run, a GPU each
#     --gpus N     GPUs that may be used (default: the GPUs of this host)
#     --device cpu tries the script itself where there is no GPU: every number of ranks, tiny shapes
#     --configs    models of bench_train_step_ranks
#     --limit      longest time of a job and of a bench (default 150)
# Tolerances of losses and their reason: gpu_common.sh. Continued training is held to the same beside one that
# never stopped, over the steps after it went on: other numbers of ranks only change the order of sums.
# Environment: OCTAVO_ALL_TO_ALL, OCTAVO_TRAIN_STEP (more options of the benches), OCTAVO_RESUME_EDIT (a sed
# program over continued jobs: proves that the part notices a job that goes on differently).
# NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
# Exit codes: 0 all that was run is ok; 1 a part is not; 2 usage.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
run=/tmp/octavo-many-gpus
# shellcheck source=deploy/gpu_common.sh
. "$here/gpu_common.sh"
numbers="2 4 8"
gpus=
parts="collectives losses resume kill all_to_all train_step"
configs="A B"
while [ $# -gt 0 ]; do
  case $1 in
    --ranks) numbers=${2:?} ;;
    --gpus) gpus=${2:?} ;;
    --parts) parts=${2:?} ;;
    --configs) configs=${2:?} ;;
    -h|--help) sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) common_option "$1" "${2:-}" || { echo "error: unknown option $1" >&2; exit 2; } ;;
  esac
  shift 2
done
[ "$device" = cpu ] || export NCCL_NVLS_ENABLE=0
if [ -z "$gpus" ]; then
  if [ "$device" = cpu ]; then gpus=8; else gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l); fi
fi
run_of=() skipped_of=()
for n in $numbers; do
  if ! [[ $n =~ ^[0-9]+$ ]] || [ "$n" -lt 2 ]; then echo "error: --ranks $n; valid: numbers of at least 2" >&2; exit 2; fi
  if [ "$n" -le "$gpus" ]; then run_of+=("$n"); else skipped_of+=("$n"); fi
done
most=$(printf '%s\n' 0 "${run_of[@]}" | sort -n | tail -n 1)
[ ${#run_of[@]} -gt 0 ] || { echo "error: $gpus GPUs here; nothing of --ranks $numbers can run" >&2; exit 2; }
if [ "$device" = cpu ]; then  # enough to try the script
  job_edits='s|layers: 4|layers: 2|; s|hidden: 256|hidden: 128|; s|sequence_length: 128|sequence_length: 32|'
fi
prepare

table=()
status=0
result() {  # part case verdict note
  table+=("$(printf '%-12s %-32s %-8s %s' "$1" "$2" "$3" "$4")")
  printf '[%4d s] %s\n' $SECONDS "${table[-1]}"
  [ "$3" = ok ] || [ "$3" = skipped ] || status=1
}
wants() { [[ " $parts " = *" $1 "* ]]; }

judge() {  # part job expected steps [after]
  local verdict first median late mn
  read -r verdict first median late _ _ _ _ mn <<<"$(distance "$3" "$2" "$4" "${5:-0}")"
  result "$1" "$2" "$verdict" "$(transport "$2"): loss $mn after $4 steps; distance first $first, median $median, last five $late"
  [ "$verdict" = ok ] || { explain "$2"; explain "$3"; }
}
step_of() { timeout 5 octavo list 2>/dev/null | awk -v job="$1" '$1 == job { split($5, s, "/"); print s[1] + 0 }'; }

collectives() {  # N
  local begin=$SECONDS code passed absent verdict visible
  [ "$device" = cuda ] || { result collectives "NCCL" skipped "no GPU"; return; }
  visible=$(seq -s, 0 $(($1 - 1)))
  CUDA_VISIBLE_DEVICES=$visible timeout -k 2 "$limit" op_parity_test --gtest_filter='Nccl*' >"$run/logs/collectives-n$1.log" 2>&1
  code=$?
  [ $code != 127 ] || echo "op_parity_test is not in the bundle" >>"$run/logs/collectives-n$1.log"
  passed=$(grep -c '^\[       OK \]' "$run/logs/collectives-n$1.log")
  absent=$(grep -c '^\[  SKIPPED \] Nccl' "$run/logs/collectives-n$1.log")
  if [ $code = 0 ] && [ "$passed" -gt 0 ] && [ "$absent" = 0 ]; then verdict=ok; else verdict=FAILED; fi
  result collectives "NCCL, $1 GPUs" $verdict "$passed passed, $absent skipped, exit $code, $((SECONDS - begin)) s"
  [ $verdict = ok ] || grep -E 'Failure|needs|FAILED|hung|^rank|message|bundle' "$run/logs/collectives-n$1.log" | head -n 12
}

all_losses() {  # N
  local recipe
  for recipe in $recipes; do
    submit "n$1-${recipe//_/-}" "$recipe" "$1" "$device" "$steps"
    submit "n$1-${recipe//_/-}-cpu" "$recipe" "$1" cpu "$steps"
  done
  settle
  for recipe in $recipes; do judge losses "n$1-${recipe//_/-}" "n$1-${recipe//_/-}-cpu" "$steps"; done
}

# A quarter of the steps each with N ranks, N/2, N, 2N (where GPUs do not suffice, two ranks share one through
# Gloo), each going on from the one before with its whole state; beside a curve of N ranks that never stopped
# (on the same device: the CPU's has drifted away by as much as the limit allows after 20 steps).
resume() {  # N
  local whole=n$1-fp8-flow quarter=$((steps / 4 > 0 ? steps / 4 : 1)) part=0 ranks job last="" from begin
  if ! { wants losses && [[ " $recipes " = *" fp8_flow "* ]]; } || [ $((4 * quarter)) -gt "$steps" ]; then
    whole=n$1-whole
    submit "$whole" fp8_flow "$1" "$device" $((4 * quarter))
    settle
  fi
  local jobs=()
  for ranks in "$1" $(($1 / 2)) "$1" $((2 * $1)); do
    part=$((part + 1))
    job=n$1-part$part-r$ranks
    from=
    [ -z "$last" ] || from="s|^checkpoint:|checkpoint:\n  start_from: $(echo "$run/checkpoints-$last"/*/)\n  start_state: all|; ${OCTAVO_RESUME_EDIT:-}"
    begin=$SECONDS
    submit "$job" fp8_flow "$ranks" "$device" $((part * quarter)) "$from"
    wait "${waits[-1]}"
    echo "  $job: $((SECONDS - begin)) s"
    jobs+=("$job")
    ended_well "$job" || { result resume "$job" FAILED "did not end well"; explain "$job"; break; }
    last=$job
  done
  settle
  for ((part = 1; part <= ${#jobs[@]}; part++)); do
    ended_well "${jobs[part - 1]}" && judge resume "${jobs[part - 1]}" "$whole" $((part * quarter)) $(((part - 1) * quarter))
  done
}

# A rank dies in the middle: the others, held in a collective, are released; the next attempt goes on.
kill_one() {  # N
  local job=n$1-killed total=400 every=20 at=50 end=$((SECONDS + limit)) victim="" step="" p line killed_at second="" restarts verdict
  if [ "$device" = cpu ]; then total=60 every=5 at=12; fi
  submit "$job" bf16 "$1" "$device" $total "s|keep: 1|keep: 2\n  interval_steps: $every|; s|interval_steps: 5\$|interval_steps: $every|"
  while [ $SECONDS -lt $end ] && { step=$(step_of "$job"); [ "${step:-0}" -lt "$at" ]; } && [ ! -e "$run/jobs/$job.exit" ]; do pause 0.1; done
  for p in /proc/[0-9]*; do
    line=$(tr '\0' ' ' 2>/dev/null <"$p/cmdline") || continue
    [[ $line = *octavo-rank*"$run/gpus"*"--rank 1"* || $line = *octavo-rank*"$run/gpus"*"--rank=1"* ]] && victim=${p#/proc/}
  done
  killed_at=$SECONDS
  if [ -z "$victim" ] || ! kill -KILL "$victim" 2>/dev/null; then
    result kill "rank 1 of $1" FAILED "no rank to kill at step ${step:-?}"
    timeout 5 octavo cancel "$job" >/dev/null 2>&1
    settle
    explain "$job"
    return
  fi
  # The second attempt's first step says that work goes on.
  while [ $SECONDS -lt $end ] && [ -z "$second" ] && [ ! -e "$run/jobs/$job.exit" ]; do
    timeout 5 octavo events "$job" 2>/dev/null | grep -q 'attempt 2 continues' && second=$((SECONDS - killed_at))
    pause 0.1
  done
  settle
  restarts=$(timeout 5 octavo describe "$job" 2>/dev/null | grep -i -m1 restarts | tr -s ' ')
  if ended_well "$job" && [ -n "$second" ]; then verdict=ok; else verdict=FAILED; fi
  result kill "rank 1 of $1 at step $step" $verdict "second attempt after ${second:-?} s; ${restarts# }"
  timeout 5 octavo events "$job" 2>/dev/null | grep -v CHECKPOINT | grep -E 'signal|killed|aborted|attempt 2|SUCCEEDED' | cut -c1-260 | tail -n 8 | sed 's/^/    /'
  [ $verdict = ok ] || explain "$job"
}

bench() {  # part case program arguments…
  local part=$1 name=$2 log=$run/logs/$1-${2//[^a-zA-Z0-9]/-}.log code
  shift 2
  timeout -k 2 "$limit" "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  result "$part" "$name" "$([ "$code" = 0 ] && echo ok || echo FAILED)" "exit $code, $(wc -l <"$log") lines"
}
all_to_all() {  # N
  local shape=
  [ "$device" = cuda ] || shape="--tokens 64 --hidden 256 --samples 2 --inner 2"
  # shellcheck disable=SC2086
  bench all_to_all "$1 ranks" bench_all_to_all --ranks "$1" --device "$device" $shape ${OCTAVO_ALL_TO_ALL:-}
  # PyTorch's all_to_all_single of the same bytes in the same run, where it is installed.
  if [ "$device" = cuda ] && python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    bench all_to_all "$1 ranks, PyTorch" python3 "$here/torch_all_to_all.py" --ranks "$1"
  fi
}

if wants losses || wants resume || wants kill; then
  start_controller
  # One worker owns all GPUs: a job of N ranks there has a GPU a rank, so NCCL. A second one for 2N ranks.
  worker gpus "$device" "$most"
  if wants resume; then worker gpus-b "$device" "$most"; fi
  [ "$device" = cpu ] || worker cpu cpu $(($(nproc) > 2 * most ? $(nproc) - most : most))
  octavo workers
fi
tables=()
close_table() {  # heading
  tables+=("" "$1" "$(printf '%-12s %-32s %-8s %s' part case verdict note)" "${table[@]}")
  table=()
}
for n in "${run_of[@]}"; do
  echo "== $n ranks =="
  begin=$SECONDS
  batch=$((2 * n > 8 ? 2 * n : 8))  # a sequence for each of 2N ranks
  if wants collectives; then collectives "$n"; fi
  if wants losses; then all_losses "$n"; fi
  if wants resume; then resume "$n"; fi
  if wants kill; then kill_one "$n"; fi
  if wants all_to_all; then all_to_all "$n"; fi
  close_table "$n ranks on $device, $((SECONDS - begin)) s"
done
if wants train_step; then  # at the end and in one program each: every number beside one rank
  begin=$SECONDS
  shape=
  if [ "$device" = cpu ]; then configs=tiny shape="--sequence 64 --sequences 1 --steps 2 --warmup 1"; fi
  for config in $configs; do
    # shellcheck disable=SC2086
    bench train_step "$config" bench_train_step_ranks --ranks "$(printf '%s\n' 1 "${run_of[@]}" | paste -sd,)" --device "$device" \
      --config "$config" $shape ${OCTAVO_TRAIN_STEP:-}
  done
  close_table "whole steps over 1 ${run_of[*]} ranks, $((SECONDS - begin)) s"
fi
printf '%s\n' "${tables[@]}"
for n in "${skipped_of[@]}"; do printf '\n%s ranks: not run, there are %s GPUs here\n' "$n" "$gpus"; done
exit $status
