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
    --dir) run=$(realpath -m -- "${2:?--dir needs a folder}"); shift ;;
    --job) job=$(realpath -m -- "${2:?--job needs a file}"); shift ;;
    --stay) stay=1 ;;
    -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; valid: --no-install, --dir DIR, --job FILE, --stay" >&2; exit 2 ;;
  esac
  shift
done
say() { printf '\n== %s\n' "$*"; }

[ -r "$job" ] || { echo "error: cannot read the job file $job" >&2; exit 2; }
mkdir -p "$build"
# A pipe that nobody writes to: a bounded wait on it costs no process.
mkfifo "$build/tick.$$"
exec {tick}<>"$build/tick.$$"
rm "$build/tick.$$"
pause() { read -rt "$1" -u "$tick" || true; }

controller=
others=() # workers and Prometheus
front=    # what the script waits for: the build, then octavo submit
stopped=0

# ended_within SECONDS PID...: true when all have ended by then.
ended_within() {
  local end=$((SECONDS + $1)) pid
  shift
  for pid in "$@"; do
    while kill -0 "$pid" 2>/dev/null; do
      [ $SECONDS -lt $end ] || return 1
      pause 0.05
    done
  done
}
cleanup() {
  local code=$? pid
  [ "$stopped" = 1 ] && return
  stopped=1
  trap '' INT TERM HUP
  [ -n "$front" ] && kill -TERM "$front" 2>/dev/null || true
  # Workers first: they end their ranks (--drain-grace bounds it), then the controller.
  for pid in "${others[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  ended_within 7 "${others[@]}" || true
  [ -n "$controller" ] && kill -TERM "$controller" 2>/dev/null || true
  ended_within 2 $controller $front || true
  for pid in "${others[@]}" $controller; do
    kill -KILL -- "-$pid" 2>/dev/null || true # the service's whole group
  done
  exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

# attend COMMAND...: runs it so that a signal to this script is acted upon at once.
attend() {
  local code=0
  "$@" &
  front=$!
  wait "$front" || code=$?
  front=
  return $code
}
# serve NAME COMMAND...: a service in a session of its own, so that a Ctrl-C at the terminal reaches
# this script alone, which stops services in order. Its id: $!.
serve() {
  local name=$1
  shift
  setsid "$@" >"$run/logs/$name.log" 2>&1 &
}

[ $install = 1 ] && "$root/deploy/install_deps.sh" build
for tool in cmake ninja g++ protoc prometheus; do
  command -v $tool >/dev/null || { echo "error: $tool not found; run without --no-install, or deploy/install_deps.sh build" >&2; exit 3; }
done

say "building (CPU only) into ${build#"$root"/}"
start=$SECONDS
attend cmake -S "$root" -B "$build" -G Ninja -DOCTAVO_CUDA=OFF -DOCTAVO_TESTS=OFF -DOCTAVO_BENCH=OFF >"$build/cmake.log" 2>&1 ||
  { cat "$build/cmake.log" >&2; exit 3; }
attend ninja -C "$build" octavo octavo-controller octavo-worker octavo-rank || exit 3
echo "built in $((SECONDS - start)) s"
export PATH=$build/bin:$PATH

mkdir -p "$run"
rm -rf "$run/state"
mkdir -p "$run/state/controller" "$run/state/w0" "$run/state/w1" "$run/state/prometheus" "$run/logs"

data=$run/text.octd
if [ ! -s "$data" ]; then
  say "making a byte dataset from /usr/include and /usr/share/common-licenses"
  attend octavo data build --output "$data" --max-bytes 24MB /usr/share/common-licenses /usr/include
fi
octavo data inspect "$data"

# wait_for FILE PID NAME: until the process has written its ports, or died, or 30 s.
wait_for() {
  local end=$((SECONDS + 30))
  until [ -s "$1" ]; do
    kill -0 "$2" 2>/dev/null || { echo "error: $3 ended at start; its log: $run/logs/$3.log" >&2; tail -n 5 "$run/logs/$3.log" >&2; exit 1; }
    [ $SECONDS -lt $end ] || { echo "error: $3 did not report its ports within 30 s; its log: $run/logs/$3.log" >&2; exit 1; }
    pause 0.05
  done
}
field() { sed -n "s/.*\"$2\" *: *\"\{0,1\}\([^\",}]*\).*/\1/p" "$1" | head -n1; }

say "starting controller, two workers and Prometheus"
serve controller octavo-controller --listen 127.0.0.1:0 --http 127.0.0.1:0 --data-dir "$run/state/controller" \
  --port-file "$run/state/controller.json"
controller=$!
wait_for "$run/state/controller.json" $controller controller
OCTAVO_CONTROLLER=$(field "$run/state/controller.json" grpc_address)
http=$(field "$run/state/controller.json" http_address)
export OCTAVO_CONTROLLER
for w in w0 w1; do
  serve $w octavo-worker --name $w --controller "$OCTAVO_CONTROLLER" --slots 1 --state-dir "$run/state/$w" \
    --advertise-address 127.0.0.1 --listen-http 127.0.0.1:0 --drain-grace 3 --port-file "$run/state/$w.json"
  others+=($!)
  wait_for "$run/state/$w.json" $! $w
done
sed "s|{SD_URL}|http://$http/sd|" "$root/deploy/prometheus/prometheus.yml" >"$run/state/prometheus.yml"
mkdir -p "$run/state/rules"
cp "$root"/dashboards/rules/{recording,alerts}.yml "$run/state/rules/"
prom_port=0
for p in 9090 9091 9092 19090 29090; do
  if ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; then prom_port=$p; break; fi
done
if [ $prom_port != 0 ]; then
  serve prometheus prometheus --config.file="$run/state/prometheus.yml" --storage.tsdb.path="$run/state/prometheus" \
    --web.listen-address=127.0.0.1:$prom_port --log.level=warn
  others+=($!)
  echo "Prometheus: http://127.0.0.1:$prom_port   controller metrics: http://$http/metrics"
fi
octavo workers
echo "to use the client in another terminal:"
echo "  export PATH=$build/bin:\$PATH"
echo "  export OCTAVO_CONTROLLER=$OCTAVO_CONTROLLER"

say "submitting $(basename "$job") and following it"
literal() { printf '%s' "$1" | sed 's/[&|\\]/\\&/g'; }
sed "s|{DATA}|$(literal "$data")|; s|{CHECKPOINTS}|$(literal "$run/checkpoints")|" "$job" >"$run/state/job.yaml"
rm -rf "$run/checkpoints"
code=0
attend octavo submit --follow "$run/state/job.yaml" || code=$?

if [ $code = 0 ]; then
  say "dataset entropy (validation loss must end well below)"
  octavo data inspect "$data" | grep -i entropy
  if [ $prom_port != 0 ]; then
    echo "from Prometheus: targets up $(curl -fsS "http://127.0.0.1:$prom_port/api/v1/query" --data-urlencode 'query=sum(up)' |
      sed -n 's/.*"value":\[[^,]*,"\([^"]*\)"\].*/\1/p'), layers that ran in FP8 $(curl -fsS "http://127.0.0.1:$prom_port/api/v1/query" \
      --data-urlencode 'query=count(count by (layer) (max_over_time(octavo_layer_recipe_info{recipe=~"fp8.*|mxfp8"}[15m])))' |
      sed -n 's/.*"value":\[[^,]*,"\([^"]*\)"\].*/\1/p')"
  fi
  echo "logs: $run/logs   checkpoints: $run/checkpoints"
fi
if [ $stay = 1 ] && [ $code = 0 ]; then
  say "services stay up (controller $OCTAVO_CONTROLLER); Ctrl-C stops them"
  wait
fi
exit $code
