#!/usr/bin/env bash
# deploy/gpu_common.sh: which loss curves the GPU scripts call equal, off and incomplete, and the jobs that
# they make. Usage: gpu_common_test.sh ROOT
set -uo pipefail
here=${1:?}/deploy
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
# shellcheck source=deploy/gpu_common.sh
. "$here/gpu_common.sh"
mkdir -p "$run/jobs" "$run/logs"
bad=0

curve() {  # NAME losses: as a job's newest checkpoint has them
  local folder=$run/checkpoints-$1/$1-0/step-000000000020.a000001
  mkdir -p "$folder" "${folder%20.a*}10.a000001"
  echo '{"losses": [9.0]}' >"${folder%20.a*}10.a000001/manifest.json"  # an older one
  printf '{\n "step": 20,\n "losses": [%s]\n}\n' "$2" >"$folder/manifest.json"
}
expect() {  # VERDICT EXPECTED MEASURED STEPS [AFTER]
  local said
  said=$(distance "$2" "$3" "$4" "${5:-0}")
  [ "${said%% *}" = "$1" ] || { echo "FAILED: $2 beside $3 over $4 steps after ${5:-0}: $said; expected $1"; bad=1; }
}

curve whole "5.5, 5.0, 4.5, 4.0, 3.5, 3.0, 2.9, 2.8, 2.7, 2.6"
curve same "5.505, 5.01, 4.52, 3.98, 3.52, 3.08, 2.95, 2.82, 2.71, 2.62"
curve part "5.5, 5.0, 4.5, 4.0, 3.5"
curve first_off "5.55, 5.0, 4.5, 4.0, 3.5, 3.0, 2.9, 2.8, 2.7, 2.6"
curve middle_off "5.5, 5.1, 4.6, 4.1, 3.6, 3.1, 2.9, 2.8, 2.7, 2.7"
curve late_off "5.5, 5.0, 4.5, 4.0, 3.5, 3.0, 3.2, 3.1, 2.7, 2.6"
curve continued_off "5.5, 5.0, 4.5, 4.0, 3.5, 3.05, 2.95, 2.85, 2.75, 2.65"
curve jumped "5.5, 5.0, 4.5, 4.0, 3.5, 3.2, 2.9, 2.8, 2.7, 2.6"
expect ok whole same 10
expect ok whole part 5                 # the expected curve may be longer
expect INCOMPLETE whole part 10
expect INCOMPLETE part whole 10
expect INCOMPLETE whole nothing 10
expect INCOMPLETE nothing nothing 10
expect OFF whole first_off 10
expect OFF whole middle_off 10
expect OFF whole late_off 10
expect ok whole continued_off 10       # half of the curve is equal: its median does not see it
expect OFF whole continued_off 10 5    # but the steps after the continuation do
expect OFF whole jumped 10 5           # one step is off by 0.2, the first one after it
expect ok whole same 10 5
read -r _ first median late most e1 m1 en mn <<<"$(distance whole same 10 5)"
[ "$first $median $late $most $e1 $m1 $en $mn" = "0.08000 0.02000 0.03600 0.08000 3.0000 3.0800 2.6000 2.6200" ] ||
  { echo "FAILED: distances $first $median $late $most, losses $e1 $m1 $en $mn"; bad=1; }

# A job of 16 ranks: more than experts, each with a sequence. The client is not there: an exit code says so.
batch=16
# shellcheck disable=SC2317
octavo() { return 3; }
timeout() { shift 3; "$@"; }
submit wide mxfp8 16 cuda 40 's|^checkpoint:|checkpoint:\n  start_state: all|'
settle
for line in 'name: wide' 'device: cuda' '  ranks: 16' '  expert_parallel: 8' '  global_batch: 16' '  microbatch: 1' \
  '  steps: 40' '  recipe: mxfp8' '  allow_emulation: true' '  start_state: all'; do
  grep -q "^$line" "$run/jobs/wide.yaml" || { echo "FAILED: the job has no line '$line'"; bad=1; }
done
! sed '/^#/d' "$run/jobs/wide.yaml" | grep '{[A-Z]' || { echo "FAILED: not filled in"; bad=1; }
if ended_well wide || [ "$(cat "$run/jobs/wide.exit")" != 3 ]; then echo "FAILED: exit $(cat "$run/jobs/wide.exit")"; bad=1; fi
[ $bad = 0 ] && echo "gpu_common.sh: ok"
exit $bad
