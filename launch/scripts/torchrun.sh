#!/usr/bin/env bash
# Start a recipe over several nodes: run this, with the same arguments, on each of them. Copy it and change it.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/scripts/torchrun.sh recipe.yaml run.steps=100
#
# NNODES          number of nodes (1)
# NODE_RANK       number of this node, from 0; node 0 has the Ray head and the driver (0)
# MASTER_ADDR     an address or resolvable name of node 0 (127.0.0.1)
# MASTER_PORT     a free port of node 0, the same everywhere (29500)
# RUN_ID          a name of this run, the same everywhere (rolemesh)
# NPROC_PER_NODE  processes that torchrun starts on a node; all but the first stand by (1)
# MODULE          rolemesh.launch.torchrun, or rolemesh.launch.spmd to train without Ray
# PYTHON          the Python that rolemesh is installed for (python)
# ROLEMESH_INTERFACE  the network interface to use, where the way to MASTER_ADDR is not the right one
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: [NNODES=N NODE_RANK=I MASTER_ADDR=A] $0 RECIPE [KEY=VALUE]..." >&2
    exit 2
fi

exec "${PYTHON:-python}" -m rolemesh.launch.elastic \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC_PER_NODE:-1}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    --rdzv-id "${RUN_ID:-rolemesh}" \
    -m "${MODULE:-rolemesh.launch.torchrun}" "$@"
