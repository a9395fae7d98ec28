"""The Ray cluster a run lives on: our own local one, or one that is there already; and its view as values."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil
import ray
from ray._private import ray_constants  # only `_loopback` uses it
from ray._private.authentication import authentication_token_setup  # only `joined_cluster` uses it

from rolemesh.engine.ray.session import session_directory
from rolemesh.placement.cluster import ClusterSpec, DeviceKind, NodeSpec

SLOT = "rolemesh_slot"  # custom resource: the place of one worker process on a CPU node
DEVICE_RESOURCE: dict[DeviceKind, str] = {"cuda": "GPU", "cpu": SLOT}
NODE_ID_LABEL = "ray.io/node-id"

_DEVICE_TYPE = "accelerator_type:"  # Ray's resource for it, "accelerator_type:A100"
_RAY_RESOURCES = {"CPU", "memory", "object_store_memory", *DEVICE_RESOURCE.values()}

_OBJECT_STORE_SHARE = 0.3  # of the machine's memory and of what /dev/shm has free
_CONNECT_S = 5.0
# A launcher (torchrun, Slurm through torchrun) describes its own world in these: ours must not read it.
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

_log = logging.getLogger(__name__)


class RayStartError(RuntimeError):
    """A Ray cluster that cannot be started or joined; the message says what to change."""


@contextlib.contextmanager
def local_cluster(
    slots: int = 0,
    *,
    device_kind: DeviceKind | None = None,
    temp_dir: str | os.PathLike[str] | None = None,
    object_store_bytes: int | None = None,
) -> Iterator[ClusterSpec]:
    """A Ray cluster of our own on this machine, stopped when the block ends however it ends.

    `slots` worker places exist whatever the number of cores. `device_kind` is as in `read_cluster`; with
    "cpu" the cluster has no GPUs. It listens on loopback only and ignores other clusters (and RAY_ADDRESS).
    `temp_dir` (default: the system's) holds its session while it runs.
    SIGTERM ends the block as Ctrl-C does.
    When this process is killed, what it started ends within seconds all the same.
    Raises RayStartError when this process is connected to a cluster already and when Ray does not start,
    SessionError for an unusable `temp_dir`.
    """
    if ray.is_initialized():
        raise RayStartError("this process is connected to a Ray cluster already: leave that one first")
    with _sigterm_as_exit() as handle_sigterm, session_directory(temp_dir) as session:
        try:
            with _without(LAUNCHER_VARIABLES), _loopback(), _start_in_words(session):
                ray.init(
                    address="local",
                    num_cpus=os.cpu_count(),
                    num_gpus=0 if device_kind == "cpu" else None,
                    resources={SLOT: slots} if slots else None,
                    object_store_memory=object_store_bytes or _default_object_store_bytes(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(session),
                )
            handle_sigterm()
            _log.info("started a Ray cluster of our own at %s", cluster_address())
            yield read_cluster(device_kind)
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _start_in_words(session: Path) -> Iterator[None]:
    """Ray's error for a start that takes too long says neither how long nor why."""
    try:
        yield
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        free = psutil.virtual_memory().available / 2**30
        raise RayStartError(
            f"Ray has not started within its 30 s: this machine is busy (load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores, {free:.1f} GiB of memory free), or the disk of {session} is slow. Try "
            "again when there is less to do, or set run.temp_dir"
        ) from error


@contextlib.contextmanager
def joined_cluster(
    address: str, *, device_kind: DeviceKind | None = None, env: Mapping[str, str] | None = None
) -> Iterator[ClusterSpec]:
    """A running cluster ("host:port", or "auto" for the one on this machine), left running at the end.

    `device_kind` is as in `read_cluster`; every process of this run has the variables `env`. What the run
    started on it is stopped with the connection.
    Raises RayStartError when nothing answers.
    """
    if ray.is_initialized():
        raise RayStartError("this process is connected to a Ray cluster already: leave that one first")
    if ":" in address and "://" not in address:
        _check_answers(address)
    # Ray starts clusters with the user's token where there is one, but joins them without it.
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    with _sigterm_as_exit() as handle_sigterm:
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": dict(env)} if env else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayStartError(f"no Ray cluster answers at {address!r}: {error}") from error
        try:
            handle_sigterm()
            _log.info("joined the Ray cluster at %s", cluster_address())
            yield read_cluster(device_kind)
        finally:
            ray.shutdown()


def cluster_address() -> str:
    """The address of the cluster this process is connected to."""
    return ray.get_runtime_context().gcs_address


def read_cluster(device_kind: DeviceKind | None = None) -> ClusterSpec:
    """The nodes alive now, with their GPUs ("cuda") or worker slots ("cpu") as devices.

    Without `device_kind`: GPUs if any node has one. A node without the resource has 0 devices; on a cluster
    started by others, slots are what its nodes declare (`ray start --resources='{"rolemesh_slot": 8}'`).
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if device_kind is None:
        device_kind = "cuda" if any(node["Resources"].get("GPU") for node in alive) else "cpu"
    names = _names(alive)
    return ClusterSpec(
        tuple(_node_spec(node, names[node["NodeID"]], device_kind) for node in alive), device_kind
    )


def node_ids() -> dict[str, str]:
    """Ray's own id of every node alive, by the node's name in `read_cluster`."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {name: node_id for node_id, name in _names(alive).items()}


def _names(nodes: list[dict]) -> dict[str, str]:
    """Name by Ray's node id: the host name, with the start of the id where several nodes share one."""
    hosts = Counter(node["NodeManagerHostname"] for node in nodes)
    names = {}
    for node in nodes:
        host, node_id = node["NodeManagerHostname"], node["NodeID"]
        names[node_id] = host if hosts[host] == 1 else f"{host}#{node_id[:8]}"
    return names


def _node_spec(node: dict, name: str, device_kind: DeviceKind) -> NodeSpec:
    resources = node["Resources"]
    kinds = [key.removeprefix(_DEVICE_TYPE) for key in resources if key.startswith(_DEVICE_TYPE)]
    return NodeSpec(
        name=name,
        devices=int(resources.get(DEVICE_RESOURCE[device_kind], 0)),
        cpus=float(resources.get("CPU", 0.0)),
        device_type=kinds[0] if kinds and device_kind == "cuda" else "",
        labels={key: value for key, value in node.get("Labels", {}).items() if key != NODE_ID_LABEL},
        resources={
            key: amount
            for key, amount in resources.items()
            if key not in _RAY_RESOURCES and not key.startswith(("node:", _DEVICE_TYPE))
        },
        address=node["NodeManagerAddress"],
    )


def _check_answers(address: str) -> None:
    """Ray itself asks for minutes before it gives up."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise RayStartError(f"nothing answers at {address} within {_CONNECT_S:g} s: {error}") from error


def _default_object_store_bytes() -> int:
    shared_memory = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 2**63
    return int(_OBJECT_STORE_SHARE * min(psutil.virtual_memory().total, shared_memory))


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray take 127.0.0.1 as a node's address; it does so only where it knows of no cluster support."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Hide environment variables from the processes that Ray starts."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[Callable[[], None]]:
    """SIGTERM unwinds the stack, so that what was started is stopped; only the main thread may ask for it.

    `ray.init` puts a handler of its own in place, whose exit code says nothing: the function takes it back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    def handle() -> None:
        signal.signal(signal.SIGTERM, leave)

    before = signal.getsignal(signal.SIGTERM)
    handle()
    try:
        yield handle
    finally:
        signal.signal(signal.SIGTERM, before)
