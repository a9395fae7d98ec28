"""The launcher's world as its processes see it, and the messages where a start cannot succeed."""

import os
import socket
import subprocess
import sys
from unittest.mock import MagicMock

import psutil
import pytest

from rolemesh.launch import rendezvous
from rolemesh.launch.rendezvous import INTERFACE, LaunchError, LauncherWorld, own_address

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_the_launchers_world_is_taken_out_of_the_environment():
    environ = {**TORCHRUN, "PATH": "/bin", "MASTER_KEY": "mine"}
    world = LauncherWorld.take(environ)
    assert (world.rank, world.local_rank, world.node, world.n_nodes) == (3, 1, 1, 2)
    assert world.agent_has_store
    assert environ == {"PATH": "/bin", "MASTER_KEY": "mine"}


def test_without_a_launcher_the_command_is_shown():
    with pytest.raises(LaunchError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node"):
        LauncherWorld.take({})


@pytest.mark.full
@pytest.mark.parametrize(("users", "left"), [(True, "7"), (False, None)])
def test_only_a_users_own_number_of_threads_stays(users, left):
    """What torchrun sets is not in the environment that torchrun itself was started with."""
    program = (
        "import os, subprocess, sys\n"
        "os.environ['OMP_NUM_THREADS'] = '7'\n"
        "code = 'import os; from rolemesh.launch.rendezvous import LauncherWorld as W; W.take();'\n"
        "code += 'print(os.environ.get(\"OMP_NUM_THREADS\"))'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | TORCHRUN
    if users:
        environ["OMP_NUM_THREADS"] = "7"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(left)


def test_a_name_that_does_not_resolve_is_told_with_what_to_do():
    world = LauncherWorld.take({**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid.*does not resolve.*--local-addr"):
        world.store(limit_s=1)


def test_a_store_that_is_not_there_is_told_within_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = LauncherWorld.take({**TORCHRUN, "MASTER_PORT": str(port)})
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port} does not answer within 1 s"):
        world.store(limit_s=1)


def test_ipv6_alone_is_told_with_the_interfaces_that_would_do(monkeypatch):
    monkeypatch.delenv(INTERFACE, raising=False)
    with pytest.raises(LaunchError, match=rf"::1 has IPv6 addresses only.*{INTERFACE}.*127\.0\.0\.1"):
        own_address("::1")


def say_ways(monkeypatch, own: str, there: dict[str, str]) -> None:
    """Let names resolve to `own`, from which the way starts, and the node have these interfaces."""
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setattr(rendezvous, "resolve", lambda host, what: [own])
    monkeypatch.setattr(rendezvous, "_interfaces", lambda: there)
    probe = MagicMock(**{"__enter__.return_value.getsockname.return_value": (own, 1)})
    monkeypatch.setattr(rendezvous.socket, "socket", lambda *given: probe)


def test_a_host_name_that_means_loopback_on_its_own_node_is_not_what_others_get(monkeypatch):
    say_ways(monkeypatch, "127.0.1.1", {"lo": "127.0.0.1", "eth0": "10.0.0.7", "usb0": "169.254.0.1"})
    assert own_address("node-a", n_nodes=2) == "10.0.0.7"
    assert own_address("node-a", n_nodes=1) == "127.0.1.1", "alone it may stay on loopback"
    say_ways(monkeypatch, "127.0.1.1", {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"})
    with pytest.raises(
        LaunchError, match=rf"node-a starts at 127\.0\.1\.1.*set {INTERFACE}.*ib0 10\.1\.0\.7"
    ):
        own_address("node-a", n_nodes=2)


def test_a_link_local_address_is_never_taken_unless_it_is_set(monkeypatch):
    say_ways(monkeypatch, "169.254.0.1", {"lo": "127.0.0.1", "usb0": "169.254.0.1"})
    with pytest.raises(LaunchError, match=r"169\.254\.0\.1, which other nodes cannot reach"):
        own_address("169.254.0.9", n_nodes=2)
    monkeypatch.setenv(INTERFACE, "usb0")
    assert own_address("169.254.0.9", n_nodes=2) == "169.254.0.1"


def test_an_address_to_listen_on_is_none_to_connect_to(monkeypatch):
    monkeypatch.delenv(INTERFACE, raising=False)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is 0\.0\.0\.0.*give the address of node 0"):
        own_address("0.0.0.0")


def test_on_one_machine_nodes_stay_on_loopback(monkeypatch):
    monkeypatch.delenv(INTERFACE, raising=False)
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_the_interface_that_is_set_decides(monkeypatch):
    name, address = next(iter(rendezvous._interfaces().items()))
    monkeypatch.setenv(INTERFACE, name)
    assert own_address("::1") == address
    monkeypatch.setenv(INTERFACE, "eth77")
    with pytest.raises(LaunchError, match=r"'eth77' is no network interface.*there are: .*127\.0\.0\.1"):
        own_address("127.0.0.1")
    assert name in psutil.net_if_addrs()
