"""Nodes on networks of their own: namespaces of the kernel, joined by a pair of virtual interfaces."""

import json
import os
import subprocess
import sys

import pytest
from small_runs import small_recipe, users_of

from rolemesh.launch.rendezvous import INTERFACE

NODES = """
set -eu
mount -t tmpfs none /run
ip netns add b
ip link add a0 type veth peer name b0
ip link add a1 type veth peer name b1
ip link set b0 netns b
ip link set b1 netns b
ip addr add 10.77.0.1/24 dev a0
ip addr add 169.254.0.1/16 dev a1
ip -n b addr add 10.77.0.2/24 dev b0
ip -n b addr add 169.254.0.2/16 dev b1
for name in lo a0 a1; do ip link set "$name" up; done
for name in lo b0 b1; do ip -n b link set "$name" up; done
"""
"""Run as root of namespaces of its own: here node a; node b is in `ip netns exec b`. The second interface
of each has a link-local address."""


def on_nodes(script: str, limit_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on node a, which may run commands on node b."""
    return subprocess.run(
        ["unshare", "-rnm", "bash", "-c", NODES + script],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    try:
        done = on_nodes("ip netns exec b true", 20)
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces: {error}")
    if done.returncode:
        pytest.skip(f"no network namespaces: {done.stderr}")


@pytest.mark.full
def test_a_node_finds_the_address_that_others_reach_and_the_one_that_is_set():
    code = "from rolemesh.launch.rendezvous import own_address as own; import os;"
    code += "print(own('10.77.0.2', 2)); print(own('169.254.0.2', 2));"
    code += f"os.environ['{INTERFACE}'] = 'a1'; print(own('10.77.0.2', 2)); print(own('127.0.0.1'))"
    done = on_nodes(f'"$PYTHON" -c "{code}"', 60)
    assert done.stdout.split() == ["10.77.0.1", "10.77.0.1", "169.254.0.1", "169.254.0.1"], done.stderr


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(500)
def test_two_nodes_on_a_network_train(tmp_path):
    temp = tmp_path / "temp"
    recipe = small_recipe(tmp_path)
    script = """
node() {
    "$PYTHON" -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank="$1" \\
        --master-addr=10.77.0.1 --master-port=29511 -m rolemesh.launch.torchrun \\
        "$RECIPE" "run.temp_dir=$TEMP" > "$LOGS/$1.log" 2>&1
}
export -f node
ip netns exec b bash -c "node 1" &
node 0
wait $!
"""
    done = on_nodes(script, 400, RECIPE=str(recipe), TEMP=str(temp), LOGS=str(tmp_path))
    said = [(tmp_path / f"{node}.log").read_text() for node in (0, 1)]
    assert done.returncode == 0, "\n".join([done.stderr, *said])
    assert "node 0: 10.77.0.1 on a0" in said[0]
    assert "node 1: 10.77.0.2 on b0" in said[1]
    assert "Ray at 10.77.0.1:" in said[0]
    assert "all: 2 devices" in said[0]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    assert not users_of(temp)
