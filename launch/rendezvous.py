"""What torchrun tells each process it starts, and where this machine can be reached.

`LauncherWorld.take` reads the launcher's variables and removes them: whatever a run starts afterwards
inherits none of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from rolemesh.launch.environment import INTERFACE, LAUNCHER, THREADS

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LaunchError(RuntimeError):
    """A start that cannot succeed; the message says what to change."""


@dataclass(frozen=True)
class LauncherWorld:
    """This process's place among those of torchrun, and the store that they share.

    `agent_has_store`: the launcher's own process holds the store; otherwise rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    n_nodes: int
    master_addr: str
    master_port: int
    agent_has_store: bool = False
    attempt: str = "0"

    @classmethod
    def take(cls, environ: MutableMapping[str, str] = os.environ) -> LauncherWorld:
        """The world in `environ`, whose variables are removed, with an OMP_NUM_THREADS that is torchrun's.

        Raises LaunchError where there is no launcher's world.
        """
        missing = [name for name in _NEEDED if name not in environ]
        if missing:
            raise LaunchError(
                f"{', '.join(missing)} not set: this is started by torchrun, as in "
                "`torchrun --nproc-per-node 1 -m rolemesh.launch.torchrun recipe.yaml`"
            )
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1))
        world = cls(
            rank=rank,
            world_size=world_size,
            local_rank=int(environ["LOCAL_RANK"]),
            local_world_size=local_world_size,
            node=int(environ.get("GROUP_RANK", rank // local_world_size)),
            n_nodes=int(environ.get("GROUP_WORLD_SIZE", max(1, world_size // local_world_size))),
            master_addr=environ["MASTER_ADDR"],
            master_port=int(environ["MASTER_PORT"]),
            agent_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        for name in list(environ):
            if name in LAUNCHER or name.startswith("TORCHELASTIC_"):
                del environ[name]
        if THREADS in environ and THREADS not in _environ_of(os.getppid()):
            del environ[THREADS]
        return world

    def store(self, limit_s: float) -> dist.Store:
        """A connection of its own to the store of all processes, for one thread.

        Raises LaunchError when the name does not resolve or nothing answers within `limit_s` seconds.
        """
        resolve(self.master_addr, "MASTER_ADDR")
        is_master = self.rank == 0 and not self.agent_has_store
        try:
            store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=limit_s),
                multi_tenant=True,
            )
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"the launcher's store at {self.master_addr}:{self.master_port} does not answer within "
                f"{limit_s:g} s: {str(error).partition(chr(10))[0]}"
            ) from error
        return dist.PrefixStore(f"rolemesh/{self.attempt}", store)


def resolve(host: str, what: str) -> list[str]:
    """The addresses of a host name. Raises LaunchError where it has none."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise LaunchError(
            f"{what} is {host!r}, which does not resolve on {socket.gethostname()} ({error}): give an "
            "address (torchrun --local-addr, or --master-addr), or put the name into /etc/hosts on every node"
        ) from error


def own_address(master_addr: str, n_nodes: int = 1) -> str:
    """The IPv4 address by which the other nodes reach this one: of the network interface that
    ROLEMESH_INTERFACE names, else of the way to `master_addr`; 127.0.0.1 where all is on one machine.

    Raises LaunchError for an interface that is not there, where there is IPv6 alone, and where the way to
    `master_addr` has an address that others cannot use.
    """
    chosen = os.environ.get(INTERFACE)
    if chosen:
        return _address_of(chosen)
    found = resolve(master_addr, "MASTER_ADDR")
    targets = [address for address in found if _ip(address).version == 4]
    if not targets:
        raise LaunchError(
            f"{master_addr} has IPv6 addresses only ({', '.join(found)}); the nodes of a run talk IPv4: set "
            f"{INTERFACE} to an interface with an IPv4 address on every node ({_listed(_interfaces())})"
        )
    if _ip(targets[0]).is_unspecified:
        raise LaunchError(
            f"MASTER_ADDR is {master_addr}, where a server listens on every interface but nobody can connect "
            f"to: give the address of node 0 ({_listed(_interfaces())})"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((targets[0], 9))
        except OSError as error:
            raise LaunchError(
                f"no way from {socket.gethostname()} to {targets[0]} ({error}): set {INTERFACE} "
                f"({_listed(_interfaces())})"
            ) from error
        own = str(probe.getsockname()[0])
    named = n_nodes > 1 and targets[0] not in (
        master_addr,
        "127.0.0.1",
    )  # as 127.0.1.1 in Debian's /etc/hosts
    if (_ip(own).is_loopback and named) or _ip(own).is_link_local:
        return _only_other(own, master_addr)
    return own


def interface_of(address: str) -> str:
    """The network interface with this address; empty where there is none."""
    return next((name for name, own in _interfaces().items() if own == address), "")


def _only_other(own: str, master_addr: str) -> str:
    """The one address of this node that others can reach, where the way to `master_addr` has none such."""
    others = {
        name: address
        for name, address in _interfaces().items()
        if not _ip(address).is_loopback and not _ip(address).is_link_local
    }
    if len(others) == 1:
        return next(iter(others.values()))
    raise LaunchError(
        f"the way from {socket.gethostname()} to MASTER_ADDR {master_addr} starts at {own}, which other "
        f"nodes cannot reach: set {INTERFACE} on this node ({_listed(_interfaces())})"
    )


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def use_interface_of(address: str) -> None:
    """Let collectives use the interface with this address, unless the user chose one."""
    if name := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _address_of(interface: str) -> str:
    interfaces = _interfaces()
    if interface not in interfaces:
        known = psutil.net_if_addrs()
        what = "has no IPv4 address" if interface in known else "is no network interface"
        raise LaunchError(
            f"{INTERFACE}: {interface!r} {what} on {socket.gethostname()} ({_listed(interfaces)})"
        )
    return interfaces[interface]


def _interfaces() -> dict[str, str]:
    """IPv4 address by network interface."""
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in reversed(entries)
        if entry.family == socket.AF_INET
    }


def _listed(interfaces: Mapping[str, str]) -> str:
    there = ", ".join(f"{name} {address}" for name, address in interfaces.items())
    return f"there are: {there or 'none with IPv4'}"


def _environ_of(pid: int) -> set[str]:
    """Names of the variables that a process was started with; this one's own where that is not to be seen."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return set(os.environ)
    return {entry.partition(b"=")[0].decode(errors="replace") for entry in entries}
