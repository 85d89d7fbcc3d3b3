# Shared by gpu_smoke.sh and many_gpus.sh, which source it: options, services and their end, jobs from
# gpu_job.yaml, loss curves and how far two of them are apart. Expects $here (the scripts' folder) and $run
# (the folder for this run's files, emptied by prepare).
#
# Tolerances of loss curves, with their reason: both backends follow one definition (same roundings, same
# scales), but sum in different orders, so BF16 and FP8 codes differ in the last place here and there, and
# 20 AdamW steps amplify that, as the CPU's own curves over 1 and 2 ranks show. First step: 0.01 (nothing
# amplified yet). Median distance over the curve: 0.03; of the last five steps, on average: 0.1. (A median,
# because a learning rate that is worth comparing under makes single steps jump by tenths, on either backend
# and at another step each time.)
bin=$here/../bin
steps=20
recipes="bf16 fp8_flow fp8_blockwise fp8_current fp8_delayed mxfp8"
text="/usr/include /usr/share/common-licenses"
device=cuda
limit=150      # seconds of a job
batch=8        # sequences of a step
job_edits=     # sed program over every job
pids=()
waits=()

# Takes one option that both scripts have and its value; 1: not one of them.
common_option() {
  case $1 in
    --dir) run=${2:?"$1 needs a value"} ;;
    --steps) steps=${2:?"$1 needs a value"} ;;
    --recipes) recipes=${2:?"$1 needs a value"} ;;
    --text) text=${2:?"$1 needs a value"} ;;
    --bin) bin=${2:?"$1 needs a value"} ;;
    --device) device=${2:?"$1 needs a value"} ;;
    --limit) limit=${2:?"$1 needs a value"} ;;
    *) return 1 ;;
  esac
}

pause() { read -rt "$1" <> <(:); }

cleanup() {
  trap '' EXIT INT TERM
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill -TERM "${pids[i]}" 2>/dev/null; done
  local end=$((SECONDS + 8))
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
    while kill -0 "${pids[i]}" 2>/dev/null && [ $SECONDS -lt $end ]; do pause 0.1; done
    kill -KILL "${pids[i]}" 2>/dev/null
  done
}

prepare() {
  export PATH=$bin:$PATH
  # cuDNN and NCCL where pip put them, unless the loader finds them or they are named.
  local pip_libs
  pip_libs=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)/nvidia
  [ -z "${OCTAVO_CUDNN:-}" ] && [ -e "$pip_libs/cudnn/lib/libcudnn.so.9" ] && export OCTAVO_CUDNN=$pip_libs/cudnn/lib/libcudnn.so.9
  [ -z "${OCTAVO_NCCL:-}" ] && [ -e "$pip_libs/nccl/lib/libnccl.so.2" ] && export OCTAVO_NCCL=$pip_libs/nccl/lib/libnccl.so.2
  rm -rf "$run"
  mkdir -p "$run/logs" "$run/jobs"
  trap cleanup EXIT
  trap 'exit 130' INT TERM
}

# FILE PID NAME: until the service has written its port file.
wait_for() {
  local end=$((SECONDS + 60))
  until [ -s "$1" ]; do
    kill -0 "$2" 2>/dev/null && [ $SECONDS -lt $end ] || { echo "error: $3 did not start:" >&2; tail -n 5 "$run/logs/$3.log" >&2; exit 1; }
    pause 0.05
  done
}

start_controller() {  # with a dataset for the jobs
  # shellcheck disable=SC2086
  octavo data build --output "$run/text.octd" --max-bytes 4MB $text >"$run/logs/data.log" 2>&1 || { cat "$run/logs/data.log"; exit 1; }
  octavo-controller --listen 127.0.0.1:0 --http 127.0.0.1:0 --data-dir "$run/controller" \
    --port-file "$run/controller.json" >"$run/logs/controller.log" 2>&1 &
  pids+=($!)
  wait_for "$run/controller.json" $! controller
  OCTAVO_CONTROLLER=$(sed -n 's/.*"grpc_address" *: *"\([^"]*\)".*/\1/p' "$run/controller.json")
  export OCTAVO_CONTROLLER
}

worker() {  # name device slots
  octavo-worker --name "$1" --controller "$OCTAVO_CONTROLLER" --slots "$3" --device "$2" --state-dir "$run/$1" \
    --advertise-address 127.0.0.1 --listen-http 127.0.0.1:0 --port-file "$run/$1.json" >"$run/logs/$1.log" 2>&1 &
  pids+=($!)
  wait_for "$run/$1.json" $! "$1"
}

# submit NAME RECIPE RANKS DEVICE STEPS [sed program more]: in the background; its exit code in a file.
submit() {
  local experts=8  # of the job
  sed "s|{NAME}|$1|; s|{DEVICE}|$4|; s|{RANKS}|$3|; s|{EXPERT_PARALLEL}|$(($3 < experts ? $3 : experts))|; s|{STEPS}|$5|
s|{BATCH}|$batch|; s|{MICROBATCH}|$((batch / $3))|; s|{DATA}|$run/text.octd|; s|{CHECKPOINTS}|$run/checkpoints-$1|
s|{RECIPE}|$2|; s|{EMULATION}|$([ "$2" = mxfp8 ] && echo true || echo false)|; $job_edits; ${6:-}" \
    "$here/gpu_job.yaml" >"$run/jobs/$1.yaml"
  { timeout -k 2 "$limit" octavo submit --follow "$run/jobs/$1.yaml" >"$run/logs/$1.follow" 2>&1; echo $? >"$run/jobs/$1.exit"; } &
  waits+=($!)
}
settle() { [ ${#waits[@]} = 0 ] || wait "${waits[@]}"; waits=(); }
ended_well() { [ "$(cat "$run/jobs/$1.exit" 2>/dev/null)" = 0 ]; }
explain() {  # what a job that did not end well said
  ended_well "$1" && return
  echo "  $1: exit $(cat "$run/jobs/$1.exit" 2>/dev/null)"
  tail -n 4 "$run/logs/$1.follow" | cut -c1-300 | sed 's/^/    /'
  timeout 5 octavo logs "$1" --tail 6 2>&1 | cut -c1-300 | sed 's/^/    /'
}
transport() {  # of a job, ? if no rank has said
  local said
  said=$(timeout 5 octavo logs "$1" --rank 0 2>/dev/null | sed -n 's/.*transport"\{0,1\}[:=] *"\{0,1\}\([a-z]*\).*/\1/p' | tail -n 1)
  echo "${said:-?}"
}

losses() {  # name → one loss a line, from the newest checkpoint's manifest
  cat "$(ls -d "$run/checkpoints-$1"/*/step-*/ 2>/dev/null | grep -v partial | sort | tail -n 1)manifest.json" 2>/dev/null | tr -d ' \n' |
    sed -n 's/.*"losses":\[\([^]]*\)\].*/\1/p' | tr ',' '\n'
}

# distance EXPECTED MEASURED STEPS [AFTER]: two jobs' curves, as far as STEPS, without the first AFTER steps.
# Prints verdict (ok, OFF, INCOMPLETE), distances: first median last-five largest, then first and last loss of
# both. After a continuation the first step has the amplified differences of those before it: allowed 0.1.
distance() {
  paste <(losses "$1" | head -n "$3") <(losses "$2") | awk -v steps="$3" -v after="${4:-0}" '
    NF == 2 && NR > after {
      d = $2 - $1; if (d < 0) d = -d
      all[++n] = d; if (d > max) max = d
      if (n == 1) { first = d; e1 = $1; m1 = $2 }
      en = $1; mn = $2
    }
    NF != 2 { ragged = 1 }
    END { for (i = n - 4; i <= n; i++) late += i > 0 ? all[i] / (n < 5 ? n : 5) : 0
          for (i = 2; i <= n; i++) for (j = i; j > 1 && all[j] < all[j - 1]; j--) { t = all[j]; all[j] = all[j - 1]; all[j - 1] = t }
          median = n ? all[int((n + 1) / 2)] : 0
          good = first <= (after > 0 ? 0.1 : 0.01) && median <= 0.03 && late <= 0.1
          printf "%s %.5f %.5f %.5f %.5f %.4f %.4f %.4f %.4f\n",
                 ragged || n != steps - after ? "INCOMPLETE" : good ? "ok" : "OFF", first, median, late, max, e1, m1, en, mn }'
}
