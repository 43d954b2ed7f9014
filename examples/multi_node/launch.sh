#!/usr/bin/env bash
# Start one Ray cluster over several machines, then run rolegraph on it from the first.
#   on every machine:  HEAD=10.0.0.1 examples/multi_node/launch.sh algorithm=grpo model.path=... train.gpus=8 ...
# The machine whose address is HEAD becomes the head and runs the driver; the others lend their devices and wait.
set -euo pipefail
: "${HEAD:?the address of the first machine}"
port=${RAY_PORT:-6379}
nodes=${NODES:-1}

if hostname -I | tr ' ' '\n' | grep -qx "$HEAD"; then
    ray start --head --node-ip-address="$HEAD" --port="$port" --disable-usage-stats
    trap 'ray stop' EXIT
    until [ "$(ray list nodes --filter state=ALIVE --format json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))')" -ge "$nodes" ]; do
        echo "waiting for $nodes nodes"
        sleep 5
    done
    RAY_ADDRESS="$HEAD:$port" rolegraph run "$@"
else
    until ray start --address="$HEAD:$port" --disable-usage-stats --block; do
        echo "no head at $HEAD:$port yet"
        sleep 5
    done
fi
