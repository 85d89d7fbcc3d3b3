#!/usr/bin/env bash
# Expert parallelism over the GPUs of one host, end to end, in a single call from an unpacked bundle
# (deploy/gpu_bundle.sh): NCCL's collectives, the service with one worker of N GPUs, every recipe's loss
# beside the CPU backend's, training that goes on with other numbers of ranks, a killed rank, benches.
#
#   many_gpus.sh [--gpus N] [--parts "collectives losses resume kill all_to_all train_step"]
#                [--recipes "bf16 fp8_flow …"] [--steps N] [--dir DIR] [--bin DIR] [--text "FOLDER …"]
#                [--device cuda|cpu] [--limit SECONDS]
#     --gpus N     ranks, a GPU each (default: the GPUs of this host)
#     --device cpu tries the script itself where there is no GPU
#     --limit      longest time of each part (default 150)
# Tolerances of losses: gpu_smoke.sh's and for its reasons (first step 0.01, median over the curve 0.03,
# mean of the last five steps 0.1). Continued training is held to the same beside one that never stopped:
# other numbers of ranks only change the order of sums. NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
# Exit codes: 0 all parts are ok; 1 one is not; 2 usage.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$here/../bin
run=/tmp/octavo-many-gpus
gpus=
steps=20
parts="collectives losses resume kill all_to_all train_step"
recipes="bf16 fp8_flow fp8_blockwise fp8_current fp8_delayed mxfp8"
text="/usr/include /usr/share/common-licenses"
device=cuda
limit=150
while [ $# -gt 0 ]; do
  case $1 in
    --gpus) gpus=${2:?}; shift ;;
    --parts) parts=${2:?}; shift ;;
    --recipes) recipes=${2:?}; shift ;;
    --steps) steps=${2:?}; shift ;;
    --dir) run=${2:?}; shift ;;
    --bin) bin=${2:?}; shift ;;
    --text) text=${2:?}; shift ;;
    --device) device=${2:?}; shift ;;
    --limit) limit=${2:?}; shift ;;
    -h|--help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
export PATH=$bin:$PATH NCCL_NVLS_ENABLE=0
[ -n "$gpus" ] || gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
[ "$gpus" -ge 2 ] || { echo "error: $gpus GPUs here; valid: --gpus of at least 2" >&2; exit 2; }
# cuDNN and NCCL where pip put them, unless the loader finds them or they are named.
pip_libs=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)/nvidia
[ -z "${OCTAVO_CUDNN:-}" ] && [ -e "$pip_libs/cudnn/lib/libcudnn.so.9" ] && export OCTAVO_CUDNN=$pip_libs/cudnn/lib/libcudnn.so.9
[ -z "${OCTAVO_NCCL:-}" ] && [ -e "$pip_libs/nccl/lib/libnccl.so.2" ] && export OCTAVO_NCCL=$pip_libs/nccl/lib/libnccl.so.2

rm -rf "$run"
mkdir -p "$run/logs" "$run/jobs"
pids=()
cleanup() {
  trap '' EXIT INT TERM
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill -TERM "${pids[i]}" 2>/dev/null; done
  local end=$((SECONDS + 8))
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
    while kill -0 "${pids[i]}" 2>/dev/null && [ $SECONDS -lt $end ]; do pause 0.1; done
    kill -KILL "${pids[i]}" 2>/dev/null
  done
}
pause() { read -rt "$1" <> <(:); }
trap cleanup EXIT
trap 'exit 130' INT TERM

table=()
status=0
result() {  # part case verdict note
  table+=("$(printf '%-12s %-30s %-8s %s' "$1" "$2" "$3" "$4")")
  printf '[%4d s] %s\n' $SECONDS "${table[-1]}"
  [ "$3" = ok ] || [ "$3" = skipped ] || status=1
}
wants() { [[ " $parts " = *" $1 "* ]]; }

wait_for() {
  local end=$((SECONDS + 60))
  until [ -s "$1" ]; do
    kill -0 "$2" 2>/dev/null && [ $SECONDS -lt $end ] || { echo "error: $3 did not start:" >&2; tail -n 5 "$run/logs/$3.log" >&2; exit 1; }
    pause 0.05
  done
}
worker() {  # name device slots
  octavo-worker --name "$1" --controller "$OCTAVO_CONTROLLER" --slots "$3" --device "$2" --state-dir "$run/$1" \
    --advertise-address 127.0.0.1 --listen-http 127.0.0.1:0 --port-file "$run/$1.json" >"$run/logs/$1.log" 2>&1 &
  pids+=($!)
  wait_for "$run/$1.json" $! "$1"
}
start_services() {
  octavo data build --output "$run/text.octd" --max-bytes 4MB $text >"$run/logs/data.log" 2>&1 || { cat "$run/logs/data.log"; exit 1; }
  octavo-controller --listen 127.0.0.1:0 --http 127.0.0.1:0 --data-dir "$run/controller" \
    --port-file "$run/controller.json" >"$run/logs/controller.log" 2>&1 &
  pids+=($!)
  wait_for "$run/controller.json" $! controller
  OCTAVO_CONTROLLER=$(sed -n 's/.*"grpc_address" *: *"\([^"]*\)".*/\1/p' "$run/controller.json")
  export OCTAVO_CONTROLLER
  # One worker owns all GPUs: a job of N ranks there has a GPU a rank, so NCCL.
  worker gpus "$device" "$gpus"
  [ "$device" = cpu ] || worker cpu cpu $(($(nproc) > 2 * gpus ? $(nproc) - gpus : gpus))
  octavo workers
}

# submit NAME RECIPE RANKS DEVICE STEPS [sed program more]: in the background; its exit code in a file.
waits=()
submit() {
  sed "s|{NAME}|$1|; s|{DEVICE}|$4|; s|{RANKS}|$3|; s|{STEPS}|$5|; s|{MICROBATCH}|$((8 / $3))|; s|{DATA}|$run/text.octd|
s|{CHECKPOINTS}|$run/checkpoints-$1|; s|{RECIPE}|$2|; s|{EMULATION}|$([ "$2" = mxfp8 ] && echo true || echo false)|" \
    "$here/gpu_job.yaml" | sed "s|{RANKS}|$3|; ${6:-}" >"$run/jobs/$1.yaml"
  { timeout -k 2 "$limit" octavo submit --follow "$run/jobs/$1.yaml" >"$run/logs/$1.follow" 2>&1; echo $? >"$run/jobs/$1.exit"; } &
  waits+=($!)
}
settle() { [ ${#waits[@]} = 0 ] || wait "${waits[@]}"; waits=(); }
ended_well() { [ "$(cat "$run/jobs/$1.exit" 2>/dev/null)" = 0 ]; }
explain() {  # what a job that did not end well said
  echo "  $1: exit $(cat "$run/jobs/$1.exit" 2>/dev/null)"
  tail -n 4 "$run/logs/$1.follow" | cut -c1-300 | sed 's/^/    /'
  timeout 5 octavo logs "$1" --tail 6 2>&1 | cut -c1-300 | sed 's/^/    /'
}
losses() {  # name → one loss a line, from the newest checkpoint's manifest
  cat "$(ls -d "$run/checkpoints-$1"/*/step-*/ 2>/dev/null | grep -v partial | sort | tail -n 1)manifest.json" 2>/dev/null | tr -d ' \n' |
    sed -n 's/.*"losses":\[\([^]]*\)\].*/\1/p' | tr ',' '\n'
}
# compare EXPECTED MEASURED STEPS: jobs; the expected curve may be longer → verdict and distances
compare() {
  paste <(losses "$1" | head -n "$3") <(losses "$2") | awk -v steps="$3" '
    NF == 2 { d = $2 - $1; if (d < 0) d = -d; all[++n] = d; if (n == 1) first = d; last = $2 }
    END { for (i = n - 4; i <= n; i++) late += (i > 0 ? all[i] : 0) / 5
          for (i = 2; i <= n; i++) for (j = i; j > 1 && all[j] < all[j - 1]; j--) { t = all[j]; all[j] = all[j - 1]; all[j - 1] = t }
          median = n ? all[int((n + 1) / 2)] : 0
          printf "%s loss %.4f after %d steps; distance first %.5f, median %.5f, last five %.5f",
                 n != steps ? "INCOMPLETE" : first <= 0.01 && median <= 0.03 && late <= 0.1 ? "ok" : "OFF", last, n, first, median, late }'
}
transport() { timeout 5 octavo logs "$1" --rank 0 2>/dev/null | sed -n 's/.*transport"\{0,1\}[:=] *"\{0,1\}\([a-z]*\).*/\1/p' | tail -n1; }
judge() {  # part name expected steps
  local verdict note
  read -r verdict note <<<"$(compare "$3" "$2" "$4")"
  result "$1" "$2" "$verdict" "$(transport "$2"): $note"
  [ "$verdict" = ok ] || { explain "$2"; ended_well "$3" || explain "$3"; }
}
step_of() { timeout 5 octavo list 2>/dev/null | awk -v job="$1" '$1 == job { split($5, s, "/"); print s[1] + 0 }'; }

if wants collectives; then
  begin=$SECONDS
  timeout -k 2 "$limit" op_parity_test --gtest_filter='Nccl*' >"$run/logs/collectives.log" 2>&1
  code=$?
  [ $code != 127 ] || echo "op_parity_test is not in the bundle" >>"$run/logs/collectives.log"
  passed=$(grep -c '^\[       OK \]' "$run/logs/collectives.log")
  skipped=$(grep -c '^\[  SKIPPED \]' "$run/logs/collectives.log")
  if [ $code != 0 ]; then verdict=FAILED; elif [ "$passed" = 0 ]; then verdict=skipped; else verdict=ok; fi
  result collectives "NCCL, $gpus GPUs" $verdict "$passed passed, $skipped skipped, exit $code, $((SECONDS - begin)) s"
  [ $verdict = ok ] || grep -E 'Failure|needs|FAILED|message|bundle' "$run/logs/collectives.log" | head -n 8
fi

if wants losses || wants resume || wants kill; then start_services; fi

if wants losses; then
  for recipe in $recipes; do
    submit "gpus-${recipe//_/-}" "$recipe" "$gpus" "$device" "$steps"
    submit "cpu-${recipe//_/-}" "$recipe" "$gpus" cpu "$steps"
  done
  settle
  for recipe in $recipes; do judge losses "gpus-${recipe//_/-}" "cpu-${recipe//_/-}" "$steps"; done
fi

if wants resume; then
  # N ranks, then N/2, N, 2N (two ranks a GPU: Gloo), each going on from the one before with its whole state.
  part=$((steps / 2 > 0 ? steps / 2 : 1))
  worker gpus-b "$device" "$gpus"
  for recipe in bf16 fp8_flow; do
    name=${recipe//_/-}
    submit "whole-$name" "$recipe" "$gpus" cpu $((4 * part))
    before=
    for ranks in "$gpus" $((gpus / 2)) "$gpus" $((2 * gpus)); do
      part_name=part$((${#before} > 0 ? ${before//[^0-9]/} + 1 : 1))
      job=$part_name-$name-r$ranks
      from=
      [ -z "$before" ] || from="s|^checkpoint:|checkpoint:\n  start_from: $(ls -d "$run/checkpoints-$last"/*/ | head -n 1)\n  start_state: all|"
      submit "$job" "$recipe" "$ranks" "$device" $((part * ${part_name#part})) "$from"
      wait "${waits[-1]}"
      ended_well "$job" || { explain "$job"; result resume "$job" FAILED "did not end well"; break; }
      before=$part_name last=$job
    done
    settle
    for n in 1 2 3 4; do
      for job in "$run"/jobs/part$n-"$name"-r*.yaml; do
        [ -e "$job" ] || continue
        job=$(basename "$job" .yaml)
        judge resume "$job" "whole-$name" $((n * part))
      done
    done
  done
fi

if wants kill; then
  # A rank dies in the middle: the others, held in a collective, are released; the next attempt goes on.
  job=killed
  submit $job bf16 "$gpus" "$device" 800 's|keep: 1|keep: 2\n  interval_steps: 20|; s|interval_steps: 5$|interval_steps: 20|'
  end=$((SECONDS + limit)) victim= step=
  while [ $SECONDS -lt $end ] && { step=$(step_of $job); [ "${step:-0}" -lt 60 ]; } && [ ! -e "$run/jobs/$job.exit" ]; do pause 0.1; done
  for p in /proc/[0-9]*; do
    line=$(tr '\0' ' ' 2>/dev/null <"$p/cmdline") || continue
    [[ $line = *octavo-rank*"$run/gpus"*"--rank 1"* || $line = *octavo-rank*"$run/gpus"*"--rank=1"* ]] && victim=${p#/proc/}
  done
  killed_at=$SECONDS
  if [ -n "$victim" ] && kill -KILL "$victim" 2>/dev/null; then
    # The first step of the second attempt says that work goes on.
    second=
    while [ $SECONDS -lt $end ] && [ -z "$second" ] && [ ! -e "$run/jobs/$job.exit" ]; do
      timeout 5 octavo events $job 2>/dev/null | grep -q 'attempt 2 continues' && second=$((SECONDS - killed_at))
      pause 0.1
    done
    settle
    restarts=$(timeout 5 octavo describe $job 2>/dev/null | grep -i -m1 restarts | tr -s ' ')
    if ended_well $job && [ -n "$second" ]; then verdict=ok; else verdict=FAILED; fi
    result kill "rank 1 of $gpus at step $step" $verdict "second attempt after $second s; ${restarts# }"
    timeout 5 octavo events $job 2>/dev/null | grep -i -E 'attempt|rank|signal|kill' | cut -c1-260 | tail -n 8 | sed 's/^/    /'
    [ $verdict = ok ] || explain $job
  else
    result kill "rank 1 of $gpus" FAILED "no rank to kill at step ${step:-?}"
    settle
    explain $job
  fi
fi

bench() {  # part program arguments…
  local part=$1; shift
  timeout -k 2 "$limit" "$@" 2>&1 | tee "$run/logs/$part.log"
  local code=${PIPESTATUS[0]}
  result "$part" "$1" "$([ "$code" = 0 ] && echo ok || echo FAILED)" "exit $code, $(wc -l <"$run/logs/$part.log") lines"
}
if wants all_to_all; then bench all_to_all bench_all_to_all --ranks "$gpus" --device "$device" ${OCTAVO_ALL_TO_ALL:-}; fi
if wants train_step; then bench train_step bench_train_step_ranks --ranks "1,$gpus" --device "$device" ${OCTAVO_TRAIN_STEP:-}; fi

printf '\n%-12s %-30s %-8s %s\n' part case verdict note
printf '%s\n' "${table[@]}"
exit $status
