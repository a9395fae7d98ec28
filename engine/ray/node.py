"""One node of a Ray cluster of our own that spans machines: a process beside this one, ended with it.

`python -m rolemesh.engine.ray.node ARGUMENTS` is `ray start ARGUMENTS` that takes 127.0.0.1 too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # `_as_driver_of`

from rolemesh.engine.ray.cluster import LAUNCHER_VARIABLES, SLOT, RayStartError, _loopback
from rolemesh.engine.ray.session import session_directory

_STARTED = "Ray runtime started"
_LOG = "node.log"
_LOG_LINES = 15
_POLL_S = 0.2
_TRIES = 3
_PASSING = ("in use", "timed out during startup")


@dataclass(frozen=True)
class NodeOptions:
    """How a node takes part. `slots`: worker places of a CPU run; None: its GPUs count.

    `token` is the secret of the cluster: who does not have it cannot join or connect.
    """

    address: str  # IPv4, its own
    slots: int | None
    token: str
    object_store_bytes: int | None = None
    temp_dir: str | None = None


@dataclass
class RayNode:
    """A node that runs: the cluster's address, and the process that holds Ray's processes."""

    cluster: str
    process: subprocess.Popen
    log: Path

    def ended(self) -> str | None:
        """How the node ended, with the end of its log; None while it is there."""
        code = self.process.poll()
        return None if code is None else f"exit code {code}\n{_tail(self.log)}"


@contextlib.contextmanager
def ray_head(options: NodeOptions, limit_s: float) -> Iterator[RayNode]:
    """Start a cluster at a free port of this node, whatever other clusters there are.

    When the block ends, or this process dies, all its processes are ended and its files removed.
    Raises RayStartError, SessionError for an unusable `temp_dir`.
    """
    with session_directory(options.temp_dir) as session:
        node = _started(session, limit_s, functools.partial(_start_head, options))
        try:
            with _as_driver_of(options):
                yield node
        finally:
            _stop(node)


@contextlib.contextmanager
def ray_member(cluster: str, options: NodeOptions, limit_s: float) -> Iterator[RayNode]:
    """Join `cluster` with this node; ends as `ray_head`. Raises RayStartError, SessionError."""
    _wait_for_head(cluster, limit_s)
    with session_directory(options.temp_dir) as session:
        joining = functools.partial(_start, [f"--address={cluster}"], options, cluster)
        node = _started(session, limit_s, joining)
        try:
            yield node
        finally:
            _stop(node)


def _started(session: Path, limit_s: float, start: Callable[[Path], RayNode]) -> RayNode:
    """A node that is up. It gets another try where a port was taken meanwhile, or Ray, which waits 30 s for
    itself, was too slow on a busy machine.
    """
    for attempt in range(_TRIES):
        node = start(session / str(attempt) if attempt else session)  # a short path
        try:
            _wait(node, limit_s)
            return node
        except BaseException as error:
            _stop(node)
            again = isinstance(error, RayStartError) and any(why in _tail(node.log) for why in _PASSING)
            if attempt == _TRIES - 1 or not again:
                raise
    raise AssertionError("unreachable")


def _start_head(options: NodeOptions, folder: Path) -> RayNode:
    port = _free_port(options.address)
    arguments = ["--head", f"--port={port}", "--include-dashboard=false"]
    return _start(arguments, options, f"{options.address}:{port}", folder)


@contextlib.contextmanager
def _as_driver_of(options: NodeOptions) -> Iterator[None]:
    """Let this process connect: it has the secret, and takes 127.0.0.1 for what it is."""
    before = dict(os.environ)
    os.environ.update(_token_variables(options.token))
    Config.initialize("")  # Ray has read the environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        with _loopback() if options.address.startswith("127.") else contextlib.nullcontext():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _token_variables(token: str) -> dict[str, str]:
    """What a process has in its environment to take part in a cluster with this secret."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _start(arguments: list[str], options: NodeOptions, cluster: str, folder: Path) -> RayNode:
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "rolemesh.engine.ray.node", "--block", *arguments,
        f"--node-ip-address={options.address}",
        f"--num-cpus={os.cpu_count()}",
        f"--temp-dir={folder}",
        "--min-worker-port=0", "--max-worker-port=0",
        "--disable-usage-stats", "--include-log-monitor=false", "--log-color=false",
    ]  # fmt: skip
    if options.slots is not None:
        command += ["--num-gpus=0", f"--resources={json.dumps({SLOT: options.slots})}"]
    if options.object_store_bytes is not None:
        command.append(f"--object-store-memory={options.object_store_bytes}")
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in (*LAUNCHER_VARIABLES, "RAY_ADDRESS") and not name.startswith("TORCHELASTIC_")
    }
    own |= _token_variables(options.token)
    log = folder / _LOG
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            start_new_session=True,  # a launcher signals the group of the process that it started
        )
    return RayNode(cluster, process, log)


def _wait(node: RayNode, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while _STARTED not in node.log.read_text(errors="replace"):
        if (how := node.ended()) is not None:
            raise RayStartError(f"Ray did not start on {socket.gethostname()}: {how}")
        if time.monotonic() > deadline:
            raise RayStartError(
                f"Ray did not start on {socket.gethostname()} within {limit_s:g} s:\n{_tail(node.log)}"
            )
        time.sleep(_POLL_S)


def _wait_for_head(cluster: str, limit_s: float) -> None:
    host, _, port = cluster.rpartition(":")
    deadline, last = time.monotonic() + limit_s, ""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except OSError as error:
            last = str(error)
            time.sleep(_POLL_S)
    raise RayStartError(
        f"the Ray head at {cluster} cannot be reached from {socket.gethostname()} within {limit_s:g} s "
        f"({last}): is there a firewall between the nodes, or another network to take?"
    )


def _stop(node: RayNode) -> None:
    """Ask the node's processes to end; what is left falls to the session's reaper."""
    node.process.terminate()
    try:
        node.process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        node.process.kill()
        node.process.wait()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_LINES:])


def main() -> None:
    """`ray start`, with a Ray client server, where Ray has one, at a free port too."""
    from ray._private import services
    from ray._private.parameter import get_ray_client_dependency_error
    from ray.scripts.scripts import cli

    services.resolve_ip_for_localhost = lambda host: host  # Ray takes another address for 127.0.0.1
    arguments = sys.argv[1:]
    if "--head" in arguments and get_ray_client_dependency_error() is None:
        own = next(value.partition("=")[2] for value in arguments if value.startswith("--node-ip-address="))
        arguments.append(f"--ray-client-server-port={_free_port(own)}")
    cli(["start", *arguments])


if __name__ == "__main__":
    main()
