"""Findings about a machine follow from readings: each failure has its fix."""

import resource
from pathlib import Path

from rolemesh.launch.health import machine
from rolemesh.launch.health.machine import GIB, Holder


def port(root: Path, device: str, state: str) -> None:
    folder = root / device / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
        (folder / name).write_text(text + "\n")


def test_this_machine_is_read_and_breaks_nothing():
    found = {finding.name: finding for finding in machine.machine_findings()}
    assert {"cores", "memory", "shared memory", "open files", "locked memory"} <= set(found)
    assert not any(finding.required and finding.problem for finding in found.values())


def test_a_low_limit_is_a_warning():
    low = machine.limit("open files", 256, 4096, "ulimit -n 65536")
    assert "below 4096" in low.problem
    assert low.fix == "ulimit -n 65536"
    assert not low.required
    assert machine.limit("open files", resource.RLIM_INFINITY, 4096, "").value == "unlimited"


def test_locked_memory_has_to_be_unlimited_only_where_there_is_infiniband():
    assert not machine.memlock(8 << 20, has_ib=False).problem
    assert not machine.memlock(resource.RLIM_INFINITY, has_ib=True).problem
    bound = machine.memlock(8 << 20, has_ib=True)
    assert bound.required
    assert "ulimit -l unlimited" in bound.fix


def test_a_containers_default_shared_memory_is_broken_and_a_small_one_a_warning():
    default = machine.shared_memory((64 << 20, 64 << 20))
    assert default.required
    assert "--shm-size" in default.fix
    small = machine.shared_memory((1 << 30, 1 << 30))
    assert small.problem
    assert not small.required
    assert not machine.shared_memory((100 << 30, 100 << 30)).problem
    assert "no /dev/shm" in machine.shared_memory(None).value


def test_processes_that_hold_most_of_the_memory_are_named():
    holder = Holder(77, "python", "ann", 60 * GIB)
    full = machine.memory_finding(20 * GIB, 100 * GIB, [holder])
    assert "60.0 GiB by python (process 77 of ann)" in full.problem
    assert not machine.memory_finding(80 * GIB, 100 * GIB, [holder]).problem


def test_infiniband_ports_that_are_down_are_told_with_those_to_use_instead(tmp_path):
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "1: DOWN")
    good, bad = machine.infiniband(tmp_path)
    assert good.value == "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"
    assert not good.problem
    assert "DOWN" in bad.problem
    assert "NCCL_IB_HCA=mlx5_0" in bad.fix


def test_without_an_active_port_there_is_no_rdma(tmp_path):
    port(tmp_path, "mlx5_0", "2: INIT")
    (only,) = machine.infiniband(tmp_path)
    assert "no other is active" in only.problem
    (none,) = machine.infiniband(tmp_path / "absent")
    assert none.value.startswith("none")
