#!/bin/sh
# A real llama-server before and after: with its defaults, and with the flags that kvsim recommends, sent the same in turns.
#   LLAMA_SERVER=build/bin/llama-server MODEL=$PWD/SmolLM2-135M-Instruct.Q4_1.gguf sh examples/own-server/before-after.sh
# Takes about 20 minutes with SmolLM2-135M on one slow thread; ports 8180 and 8181; what it writes is in results/own-server.
set -eu
scenario=$(dirname "$0")/team.toml
out=results/own-server
slo="ttft_p50<3s"
mkdir -p $out
servers=
trap 'kill $servers' EXIT

serve() {  # PORT FLAGS...
    port=$1
    shift
    "$LLAMA_SERVER" -m "$MODEL" --port "$port" --no-ui --log-file "$out/$port.log" --log-timestamps --log-prefix -lv 5 "$@" \
        >"$out/$port.out" 2>&1 &
    servers="$servers $!"
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do kill -0 $!; sleep 1; done
}

serve 8180 -t 1
kvsim calibrate --url http://127.0.0.1:8180 --flags "-t 1" --force --out $out/mine.profile.json
kvsim recommend --scenario "$scenario" --profile $out/mine.profile.json --slo "$slo" \
    --now "llama-server -m $MODEL -t 1" --out $out/recommend --json >$out/recommendation.json
flags=$(python3 -c "import json; print(json.load(open('$out/recommendation.json'))['best'][0]['typed'])")
echo "recommended: $flags"
serve 8181 $flags
kvsim validate "$scenario" --profile $out/mine.profile.json --repeat 2 --out $out \
    --url http://127.0.0.1:8180 --flags "-t 1" --log $out/8180.log --url http://127.0.0.1:8181 --flags "$flags" --log $out/8181.log
