#!/usr/bin/env bash
# Start one Ray cluster over several machines, then run rolegraph on it from the first.
#   on every machine:  HEAD=10.0.0.1 NODES=2 examples/multi_node/launch.sh algorithm=grpo model.path=... train.gpus=8 ...
# The machine whose address is HEAD becomes the head and runs the driver; the others lend their devices and wait.
set -euo pipefail
: "${HEAD:?the address of the first machine}"
port=${RAY_PORT:-6379}
nodes=${NODES:-1} # how many machines to wait for

# Asked of Ray itself: `ray list nodes` wants the dashboard, which is no dependency here.
alive() {
    python -c "import ray; ray.init(address='$HEAD:$port', log_to_driver=False, logging_level='ERROR'); \
print(sum(node['Alive'] for node in ray.nodes()))"
}

if hostname -I | tr ' ' '\n' | grep -qx "$HEAD"; then
    ray start --head --node-ip-address="$HEAD" --port="$port" --disable-usage-stats
    trap 'ray stop' EXIT
    until found=$(alive) && [ "$found" -ge "$nodes" ]; do
        echo "${found:-0} of $nodes machines are there"
        sleep 5
    done
    RAY_ADDRESS="$HEAD:$port" rolegraph run "$@"
else
    until ray start --address="$HEAD:$port" --disable-usage-stats --block; do
        echo "no head at $HEAD:$port yet"
        sleep 5
    done
fi
