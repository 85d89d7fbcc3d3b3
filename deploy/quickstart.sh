#!/usr/bin/env bash
# Octavo's main job, end to end, on one machine without a GPU: builds the product, makes a dataset,
# starts Prometheus, the controller and two workers, trains an expert-parallel MoE model in fp8_flow
# over two rank processes, follows it, prints the summary and stops everything it started.
#
#   deploy/quickstart.sh [--no-install] [--dir DIR] [--job FILE] [--stay]
#     --no-install  do not install missing Debian packages
#     --dir DIR     where the dataset, logs and checkpoints go (default: build-quickstart/run)
#     --job FILE    another job; {DATA} and {CHECKPOINTS} in it are replaced
#     --stay        leave the services up after the summary, until Ctrl-C
# Exit codes: 0 trained; 1 the job failed; 2 usage; 3 packages or build; 130 interrupted.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build-quickstart
run=$build/run
job=$root/deploy/examples/quickstart.yaml
install=1
stay=0
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) install=0 ;;
    --dir) run=${2:?--dir needs a folder}; shift ;;
    --job) job=${2:?--job needs a file}; shift ;;
    --stay) stay=1 ;;
    -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; valid: --no-install, --dir DIR, --job FILE, --stay" >&2; exit 2 ;;
  esac
  shift
done
say() { printf '\n== %s\n' "$*"; }

pids=()
stopped=0
cleanup() {
  local code=$?
  [ "$stopped" = 1 ] && return
  stopped=1
  trap '' INT TERM
  # Workers first: they end their ranks; then the controller; each has a bounded shutdown of its own.
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill -TERM "${pids[i]}" 2>/dev/null || true; done
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
    local end=$((SECONDS + 20))
    while kill -0 "${pids[i]}" 2>/dev/null && [ $SECONDS -lt $end ]; do read -rt 0.1 <> <(:) || true; done
    kill -KILL "${pids[i]}" 2>/dev/null || true
    wait "${pids[i]}" 2>/dev/null || true
  done
  exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

[ $install = 1 ] && "$root/deploy/install_deps.sh" build
for tool in cmake ninja g++ protoc prometheus; do
  command -v $tool >/dev/null || { echo "error: $tool not found; run without --no-install, or deploy/install_deps.sh build" >&2; exit 3; }
done

say "building (CPU only) into ${build#"$root"/}"
start=$SECONDS
cmake -S "$root" -B "$build" -G Ninja -DOCTAVO_CUDA=OFF -DOCTAVO_TESTS=OFF -DOCTAVO_BENCH=OFF >"$build.cmake.log" 2>&1 ||
  { cat "$build.cmake.log" >&2; exit 3; }
ninja -C "$build" octavo octavo-controller octavo-worker octavo-rank || exit 3
rm -f "$build.cmake.log"
echo "built in $((SECONDS - start)) s"
export PATH=$build/bin:$PATH

mkdir -p "$run"
rm -rf "$run/state"
mkdir -p "$run/state/controller" "$run/state/w0" "$run/state/w1" "$run/state/prometheus" "$run/logs"

data=$run/text.octd
if [ ! -s "$data" ]; then
  say "making a byte dataset from /usr/include and /usr/share/common-licenses"
  octavo data build --output "$data" --max-bytes 24MB /usr/share/common-licenses /usr/include
fi
octavo data inspect "$data"

# wait_for FILE PID NAME: until the process has written its ports, or died, or 30 s.
wait_for() {
  local end=$((SECONDS + 30))
  until [ -s "$1" ]; do
    kill -0 "$2" 2>/dev/null || { echo "error: $3 ended at start; its log: $run/logs/$3.log" >&2; tail -n 5 "$run/logs/$3.log" >&2; exit 1; }
    [ $SECONDS -lt $end ] || { echo "error: $3 did not report its ports within 30 s; its log: $run/logs/$3.log" >&2; exit 1; }
    read -rt 0.05 <> <(:) || true
  done
}
field() { sed -n "s/.*\"$2\" *: *\"\{0,1\}\([^\",}]*\).*/\1/p" "$1" | head -n1; }

say "starting controller, two workers and Prometheus"
octavo-controller --listen 127.0.0.1:0 --http 127.0.0.1:0 --data-dir "$run/state/controller" \
  --port-file "$run/state/controller.json" >"$run/logs/controller.log" 2>&1 &
pids+=($!)
wait_for "$run/state/controller.json" ${pids[-1]} controller
OCTAVO_CONTROLLER=$(field "$run/state/controller.json" grpc_address)
http=$(field "$run/state/controller.json" http_address)
export OCTAVO_CONTROLLER
for w in w0 w1; do
  octavo-worker --name $w --controller "$OCTAVO_CONTROLLER" --slots 1 --state-dir "$run/state/$w" \
    --advertise-address 127.0.0.1 --listen-http 127.0.0.1:0 --port-file "$run/state/$w.json" >"$run/logs/$w.log" 2>&1 &
  pids+=($!)
  wait_for "$run/state/$w.json" ${pids[-1]} $w
done
sed "s|{SD_URL}|http://$http/sd|" "$root/deploy/prometheus/prometheus.yml" >"$run/state/prometheus.yml"
mkdir -p "$run/state/rules"
cp "$root"/dashboards/rules/{recording,alerts}.yml "$run/state/rules/"
prom_port=0
for p in 9090 9091 9092 19090 29090; do
  if ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; then prom_port=$p; break; fi
done
if [ $prom_port != 0 ]; then
  prometheus --config.file="$run/state/prometheus.yml" --storage.tsdb.path="$run/state/prometheus" \
    --web.listen-address=127.0.0.1:$prom_port --log.level=warn >"$run/logs/prometheus.log" 2>&1 &
  pids+=($!)
  echo "Prometheus: http://127.0.0.1:$prom_port   controller metrics: http://$http/metrics"
fi
octavo workers

say "submitting $(basename "$job") and following it"
sed "s|{DATA}|$data|; s|{CHECKPOINTS}|$run/checkpoints|" "$job" >"$run/state/job.yaml"
rm -rf "$run/checkpoints"
code=0
octavo submit --follow "$run/state/job.yaml" || code=$?

if [ $code = 0 ]; then
  say "dataset entropy (validation loss must end well below)"
  octavo data inspect "$data" | grep -i entropy
  if [ $prom_port != 0 ]; then
    echo "from Prometheus: targets up $(curl -fsS "http://127.0.0.1:$prom_port/api/v1/query" --data-urlencode 'query=sum(up)' |
      sed -n 's/.*"value":\[[^,]*,"\([^"]*\)"\].*/\1/p'), layers in FP8 $(curl -fsS "http://127.0.0.1:$prom_port/api/v1/query" \
      --data-urlencode 'query=count(count by (layer) (octavo_layer_recipe_info{recipe=~"fp8.*"}))' |
      sed -n 's/.*"value":\[[^,]*,"\([^"]*\)"\].*/\1/p')"
  fi
  echo "logs: $run/logs   checkpoints: $run/checkpoints"
fi
if [ $stay = 1 ] && [ $code = 0 ]; then
  say "services stay up (controller $OCTAVO_CONTROLLER); Ctrl-C stops them"
  wait
fi
exit $code
