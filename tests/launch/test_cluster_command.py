"""`rolemesh cluster` on this machine and on presets, and what is made of a node's own tools."""

import os
import subprocess
import sys

import pytest

from rolemesh.engine import machine
from rolemesh.engine.machine import MachineFacts, described
from rolemesh.launch.cluster import cluster_lines, find_cluster, this_machine
from rolemesh.placement.cluster import ClusterError, ClusterSpec, NodeSpec

GIB = 2**30


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that prints these lines."""

    def install(*lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_this_machine_is_a_node_of_slots_whose_memory_is_counted_once():
    cluster, notes = this_machine(slots=4, kind="cpu")
    (node,) = cluster.nodes
    facts = machine.look()
    assert (cluster.device_kind, node.devices, node.cpus, notes) == ("cpu", 4, facts.cores, [])
    assert 4 * node.memory_bytes + node.host_bytes == pytest.approx(facts.memory_bytes)
    assert ClusterSpec.from_yaml(cluster.to_yaml()) == cluster
    assert "4 x cpu" in "\n".join(cluster_lines(cluster))


def test_gpus_get_their_profile_by_the_name_that_the_driver_gives(smi):
    smi("NVIDIA A100-SXM4-40GB, 40960", "NVIDIA A100-SXM4-40GB, 40960")
    cluster, notes = this_machine()
    assert (cluster.device_kind, cluster.device_types, notes) == ("cuda", {"a100-40": 2}, [])
    assert cluster.nodes[0].memory_bytes is None  # the profile knows what of it can be allocated
    assert ClusterSpec.from_yaml(cluster.to_yaml()) == cluster


def test_a_gpu_without_a_profile_keeps_its_name_and_memory_and_is_noted(smi):
    smi("NVIDIA Quantum 9000, 102400")
    cluster, notes = this_machine()
    (node,) = cluster.nodes
    assert (node.device_type, node.labels["device-name"]) == ("", "NVIDIA Quantum 9000")
    assert node.memory_bytes == 100 * GIB
    assert "Quantum 9000" in notes[0]
    assert ClusterSpec.from_yaml(cluster.to_yaml()) == cluster
    assert "unknown" in "\n".join(cluster_lines(cluster))


def test_mixed_gpus_of_a_node_are_noted_and_rays_type_helps():
    facts = MachineFacts(64 * GIB, 8, (("NVIDIA A10", 22 * GIB), ("NVIDIA A10", 22 * GIB), ("T4", 15 * GIB)))
    node, notes = described(NodeSpec("n", 3), facts, "cuda")
    assert node.device_type in ("a10-24", "")
    assert "several types" in notes[0]
    odd = MachineFacts(64 * GIB, 8, (("Graphics Device", 80 * GIB),))
    assert described(NodeSpec("n", 1, device_type="H100"), odd, "cuda")[0].device_type == "h100-80"


def test_no_nvidia_smi_or_a_broken_one_is_no_gpu(smi, monkeypatch):
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver")
    assert machine.look().gpus == ()
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.look().gpus == ()


def test_presets_and_files_are_shown_in_a_table(tmp_path):
    cluster, _ = find_cluster(preset="16 x h100x8 + 2 x v100x4")
    lines = cluster_lines(cluster)
    assert lines[0] == "nodes with devices: 18; devices: 136 (128 x h100-80, 8 x v100-32)"
    assert "node-0 ... node-15 (16)" in lines[2]
    assert "79.18 GiB" in lines[2]
    (tmp_path / "c.yaml").write_text(cluster.to_yaml())
    assert find_cluster(preset=str(tmp_path / "c.yaml"))[0] == cluster
    with pytest.raises(ClusterError, match="no preset"):
        find_cluster(preset="16 h100")
    with pytest.raises(ClusterError, match="not both"):
        find_cluster(address="auto", preset="1 x h100x8")


def test_the_command_writes_a_file_that_is_read_back(tmp_path):
    out = tmp_path / "c.yaml"
    command = [
        sys.executable,
        "-m",
        "rolemesh.launch",
        "cluster",
        "--preset",
        "4 x a100x8",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "32 x a100-80" in done.stdout
    assert ClusterSpec.from_yaml(out.read_text()) == ClusterSpec.preset("4 x a100x8")
    command = [sys.executable, "-m", "rolemesh.launch", "cluster", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "nothing answers at 127.0.0.1:1" in done.stderr
