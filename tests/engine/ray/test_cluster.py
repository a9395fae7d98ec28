"""Our own Ray beside others, and that nothing stays behind however the driver ends."""

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from rolemesh.engine.ray.cluster import (
    RayStartError,
    cluster_address,
    joined_cluster,
    local_cluster,
    read_cluster,
)
from rolemesh.engine.ray.session import SessionError, session_directory
from rolemesh.launch.live_cluster import live_cluster

pytestmark = [pytest.mark.full, pytest.mark.alone]

LAUNCHER = {
    "RANK": "5",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "192.0.2.77",
    "MASTER_PORT": "1",
    "LOCAL_RANK": "3",
}
DRIVER = (
    f"""
LAUNCHER = {list(LAUNCHER)}
"""
    + """
import json, os, time
import ray, torch, torch.distributed as dist
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.ray.cluster import cluster_address, local_cluster
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.worker import Worker

class Probe(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        return {
            "leaked": [name for name in LAUNCHER if name in os.environ],
            "sum": total.item(),
        }

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self):
        time.sleep(600)

with local_cluster(4, object_store_bytes=2**28) as cluster:
    group = RayWorkerGroup(ResourcePool([2], name_prefix="p"), RayClassWithInitArgs(Probe), role="probe")
    found = {
        "address": cluster_address(),
        "session": os.path.dirname(ray.nodes()[0]["RayletSocketName"]),
        "kept": os.environ.get("RANK"),
        "looks": group.look(),
    }
    print(json.dumps(found), flush=True)
    group.sleep()
"""
)
OTHER_RAY = """
import json, time, ray
resources = {"rolemesh_slot": 3, "TPU": 1}
ray.init(address="local", num_cpus=1, num_gpus=1, resources=resources, include_dashboard=False)
print(json.dumps(ray.get_runtime_context().gcs_address), flush=True)
time.sleep(600)
"""


def first_line(driver: subprocess.Popen) -> dict:
    assert driver.stdout is not None
    return json.loads(driver.stdout.readline())


def ends(processes: list[psutil.Process], within_s: float) -> list[str]:
    """What is still there after that time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [" ".join(process.cmdline())[:80] for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def drivers():
    """Three runs started at once under a launcher, each asleep in a call; by the signal to stop it with."""
    env = {**os.environ, "RAY_ADDRESS": "192.0.2.1:6379", **LAUNCHER}
    started = {
        how: subprocess.Popen([sys.executable, "-c", DRIVER], env=env, stdout=subprocess.PIPE, text=True)
        for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    }
    yield {how: (driver, first_line(driver)) for how, driver in started.items()}
    for driver in started.values():
        with contextlib.suppress(ProcessLookupError):
            driver.kill()
        driver.wait(timeout=10)


def test_runs_at_once_each_have_their_own_cluster_and_no_launchers_world(drivers):
    found = [run for _, run in drivers.values()]
    assert len({run["address"] for run in found}) == 3
    for run in found:
        assert run["address"].startswith("127.0.0.1:")
        assert run["kept"] == "5", "the driver's own environment stays as it was"
        assert run["looks"] == [{"leaked": [], "sum": 2.0}] * 2


def test_whatever_a_run_listens_on_is_on_loopback(drivers):
    for driver, _ in drivers.values():
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        ports = [
            (connection.laddr, " ".join(process.cmdline())[:80])
            for process in family
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(ports) > 4
        assert [port for port in ports if not _is_loopback(port[0].ip)] == []


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.parametrize(
    ("how", "within_s"), [(signal.SIGINT, 15), (signal.SIGTERM, 15), (signal.SIGKILL, 30)]
)
def test_no_process_stays_after_the_driver_is_stopped(drivers, how, within_s):
    driver, found = drivers[how]
    session = found["session"]
    ours = psutil.Process(driver.pid).children(recursive=True)
    assert len(ours) > 4
    driver.send_signal(how)
    start = time.monotonic()
    assert ends(ours, within_s) == []
    code = driver.wait(timeout=within_s - (time.monotonic() - start))
    assert code == 143 if how == signal.SIGTERM else code != 0
    assert not Path(session).exists()


def test_a_start_that_takes_too_long_says_how_busy_the_machine_is(monkeypatch):
    def too_slow(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", too_slow)
    with (
        pytest.raises(RayStartError, match=r"not started within its 30 s: .* \(load .* on \d+ cores"),
        local_cluster(1),
    ):
        pass


def test_a_running_cluster_is_joined_by_address_and_left_running():
    other = subprocess.Popen([sys.executable, "-c", OTHER_RAY], stdout=subprocess.PIPE, text=True)
    try:
        address = first_line(other)
        for kind, n_devices in (("cpu", 3), (None, 1)):
            with joined_cluster(address, device_kind=kind) as cluster:
                assert cluster_address() == address
                assert (cluster.device_kind, cluster.n_devices) == (kind or "cuda", n_devices)
                assert [node.resources for node in cluster.nodes] == [{"TPU": 1.0}]
                with pytest.raises(RayStartError, match="already"), local_cluster(1):
                    pass
        told: list[str] = []
        live_cluster(address, tell=told.append)
        assert told == [f"run.address {address} is the Ray cluster at {address}: 1 nodes, 1 devices (cuda)"]
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGTERM)
        other.wait(timeout=30)
    start = time.monotonic()
    with pytest.raises(RayStartError, match="nothing answers"), joined_cluster("127.0.0.1:1"):
        pass
    assert time.monotonic() - start < 10


def test_slots_are_logical_gpus_stay_out_of_a_cpu_run_and_a_long_session_directory_goes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 2)
    parent = tmp_path / ("x" * 80)
    short = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", short)
    with local_cluster(64, device_kind="cpu", temp_dir=parent, object_store_bytes=2**27) as cluster:
        assert [node.devices for node in cluster.nodes] == [64]
        assert cluster.device_kind == "cpu"
        assert cluster.nodes[0].cpus == os.cpu_count()
        assert read_cluster("cuda").n_devices == ray.cluster_resources().get("GPU", 0) == 0
        assert len(list(parent.iterdir())) == len(os.listdir(short)) == 1
    assert list(parent.iterdir()) == []
    os.rmdir(short)  # empty: the short link is gone
    assert not ray.is_initialized()


def test_a_temp_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SessionError, match="cannot be written"),
        local_cluster(1, temp_dir=tmp_path / "file"),
    ):
        pass


def test_a_nearly_full_disk_is_warned_about(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * 2**30, 97 * 2**30, 3 * 2**30))
    with (
        pytest.warns(UserWarning, match=r"3\.0% of its disk free \(3\.0 GiB\)"),
        session_directory(tmp_path),
    ):
        pass
