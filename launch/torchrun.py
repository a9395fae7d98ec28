"""`torchrun ... -m rolemesh.launch.torchrun RECIPE [KEY=VALUE]...`: one Ray cluster over torchrun's nodes.

Rank 0 starts the Ray head, the first process of every other node joins, the rest stand by. Rank 0 then does
what `rolemesh train` does, with `run.address` set to this cluster; every rank ends with its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from rolemesh.engine.loggers.secrets import hide
from rolemesh.launch.process import end_with
from rolemesh.launch.rendezvous import LaunchError, LauncherWorld, interface_of, own_address

if TYPE_CHECKING:
    from torch.distributed import Store

    from rolemesh.engine.ray.node import RayNode

WAIT_S = 600.0
_START_S = 180.0  # for Ray on one node
_END_S = 60.0  # for all ranks to end once the run has
_STORE_S = 60.0
_POLL_S = 0.3
_LOST_NODE = 1
_RAY_PORT = 6379


@dataclass(frozen=True)
class Arguments:
    """The command line; `train` is what goes on to `rolemesh train`."""

    recipe: str
    overrides: list[str]
    train: list[str]
    wait_s: float

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Arguments:
        """Exits with 2 for a wrong command line."""
        parser = argparse.ArgumentParser("rolemesh.launch.torchrun", description=__doc__)
        parser.add_argument("recipe", metavar="RECIPE")
        parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
        parser.add_argument("--resume", default="", help="as of `rolemesh train`")
        parser.add_argument("--plan", default="", help="as of `rolemesh train`")
        parser.add_argument("--smoke", action="store_true", help="as of `rolemesh train`")
        parser.add_argument("--wait-s", type=float, default=WAIT_S, help="wait so long for all nodes")
        got = parser.parse_intermixed_args(arguments)
        options = [f"--{name}={value}" for name in ("resume", "plan") if (value := getattr(got, name))]
        options += ["--smoke"] * got.smoke
        return cls(got.recipe, got.overrides, options, got.wait_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start, run, end; the exit code of the training, on every rank."""
    given = Arguments.parse(sys.argv[1:] if arguments is None else arguments)
    with _sigterm_as_exit():
        try:
            world = LauncherWorld.take()
            meeting = Meeting(world, world.store(_STORE_S))
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if world.rank == 0:
            code = _lead(given, meeting)
        elif world.local_rank == 0:
            code = _follow(meeting, given.wait_s)
        else:
            code = meeting.wait_for_end()
        meeting.leave()
    return code


class Meeting:
    """What the ranks tell each other through the launcher's store."""

    def __init__(self, world: LauncherWorld, store: Store) -> None:
        self.world, self.store = world, store

    def tell(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def told(self, key: str) -> Any:
        """What was told under `key`; None when nothing was yet."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait_for_end(self) -> int:
        """The run's exit code, once it has one; the launcher ends this process when rank 0 dies before."""
        while (code := self.told("end")) is None:
            time.sleep(_POLL_S)
        return int(code)

    def leave(self) -> None:
        """Go together: the launcher ends the others of its node when one rank ends with an error."""
        world = self.world
        with contextlib.suppress(Exception):  # the store is gone where its node is
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes as soon as the first rank has gone
            here = self.store.add("left", 1)
            deadline = time.monotonic() + _END_S
            while here < world.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                here = self.store.add("left", 0)
            seen = self.store.add("gone", 1)  # the store is rank 0's, or its launcher's: it goes last
            while world.rank == 0 and seen < here and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                seen = self.store.add("gone", 0)


def _lead(given: Arguments, meeting: Meeting) -> int:
    """Rank 0: head, nodes, training; whatever happens, the others are told how it ended."""
    code = _code_of(functools.partial(_run, given, meeting))
    meeting.tell("end", code)
    return code


def _code_of(do: Callable[[], int]) -> int:
    """The exit code of `do`; an error is printed."""
    from rolemesh.launch.cli import EXIT_BAD_RECIPE, EXIT_FAILED, EXIT_INTERRUPTED, describe_error
    from rolemesh.launch.fields import RecipeError

    try:
        return do()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except Exception as error:
        print(hide(describe_error(error)), file=sys.stderr, flush=True)
        return EXIT_BAD_RECIPE if isinstance(error, RecipeError) else EXIT_FAILED


def _run(given: Arguments, meeting: Meeting) -> int:
    from rolemesh.engine.ray.cluster import _default_object_store_bytes
    from rolemesh.engine.ray.node import NodeOptions, ray_head

    world = meeting.world
    slots, temp_dir, settled = _expected(given, world.n_nodes)
    address = _told_address(world)
    options = NodeOptions(
        address=address,
        slots=slots,
        token=secrets.token_hex(32),
        object_store_bytes=_default_object_store_bytes() // (world.n_nodes if _loop(address) else 1),
        temp_dir=temp_dir,
    )
    if _answers(address, _RAY_PORT) or _answers("127.0.0.1", _RAY_PORT):
        print(
            f"port {_RAY_PORT} is in use, maybe by another Ray: this run has a cluster of its own", flush=True
        )
    with ray_head(options, _START_S) as head:
        meeting.tell("join", {"cluster": head.cluster, "options": asdict(options)})
        code = _code_of(functools.partial(_train_on, head.cluster, given, settled, meeting))
        meeting.tell("end", code)  # the members leave before the head does
    return code


def _train_on(cluster: str, given: Arguments, settled: list[str], meeting: Meeting) -> int:
    _wait_for_nodes(meeting, given.wait_s)
    print(f"Ray at {cluster}, nodes: {meeting.world.n_nodes}", flush=True)
    return _train(given, [f"run.address={cluster}", *settled])


def _expected(given: Arguments, n_nodes: int) -> tuple[int | None, str | None, list[str]]:
    """Worker slots of each node (None on GPUs), the folder for Ray's files, and overrides of the recipe.

    Raises RecipeError for a recipe that is wrong, or made for another number of nodes.
    """
    import torch

    from rolemesh.launch.check import check_recipe
    from rolemesh.launch.config import load_recipe
    from rolemesh.launch.fields import RecipeError

    recipe = load_recipe(given.recipe, given.overrides)
    if recipe.run.address is not None:
        raise RecipeError("run.address: torchrun's nodes become a Ray cluster of their own; leave it out")
    if "cluster.nodes" in recipe.given and recipe.cluster.nodes != n_nodes:
        raise RecipeError(f"cluster.nodes is {recipe.cluster.nodes}, torchrun started {n_nodes} nodes")
    settled = [f"cluster.nodes={n_nodes}", "run.temp_dir=null"]  # a joined cluster has its own
    on_cpu = "cpu" in (recipe.run.device, recipe.cluster.device)
    if not on_cpu and torch.cuda.is_available():
        return None, recipe.run.temp_dir, settled
    if not on_cpu and (recipe.run.device == "cuda" or recipe.cluster.device is not None):
        raise RecipeError(f"the recipe asks for GPUs, torch sees none on {socket.gethostname()}")
    settled.append("run.device=cpu")
    if recipe.cluster.per_node is not None:
        return recipe.cluster.per_node, recipe.run.temp_dir, settled
    report = check_recipe(load_recipe(given.recipe, [*given.overrides, *settled]), offline=True)
    if report.plan is None:
        raise RecipeError("; ".join(report.problems) or "cluster.per_node is missing: how many worker slots?")
    slots = (report.plan.n_devices + sum(report.plan.idle.values())) // n_nodes
    return slots, recipe.run.temp_dir, settled


def _train(given: Arguments, settled: list[str]) -> int:
    """What `rolemesh train` does with these arguments; its exit code."""
    import typer.main

    from rolemesh.launch.cli import main as rolemesh

    command = typer.main.get_command(rolemesh)
    line = ["train", given.recipe, *given.overrides, *settled, *given.train]
    code = command.main(line, prog_name="rolemesh", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _wait_for_nodes(meeting: Meeting, wait_s: float) -> None:
    """Until every node's Ray has joined. Raises LaunchError naming those that are missing, and why."""
    world = meeting.world
    deadline, reported = time.monotonic() + wait_s, ""
    while True:
        missing: list[str] = []
        for node in range(1, world.n_nodes):
            told = meeting.told(f"node/{node}")
            if told is not None and told["error"]:
                raise LaunchError(f"node {node} ({told['where']}) could not join: {told['error']}")
            if told is None:
                missing.append(f"node {node} (has not called)")
            elif not told["joined"]:
                missing.append(f"node {node} ({told['where']}: has called, its Ray has not joined)")
        if not missing:
            return
        there = f"{world.n_nodes - len(missing)}/{world.n_nodes} nodes"
        if time.monotonic() > deadline:
            raise LaunchError(f"{there} after {wait_s:g} s; missing: {', '.join(missing)}")
        if there != reported:
            print(f"{there}, waiting up to {wait_s:g} s for {', '.join(missing)}", flush=True)
            reported = there
        time.sleep(_POLL_S)


def _follow(meeting: Meeting, wait_s: float) -> int:
    """The first process of another node: its Ray joins, and stays until the run ends.

    A first SIGTERM, which schedulers send to all nodes, leaves the run the time to save.
    """
    from rolemesh.engine.ray.node import NodeOptions, ray_member

    world, where = meeting.world, socket.gethostname()
    state = {"where": where, "joined": False, "error": None}
    key = f"node/{world.node}"
    try:
        address = _told_address(world)
        state["where"] = f"{where}, {address}"
        meeting.tell(key, state)
        deadline = time.monotonic() + wait_s
        while (join := meeting.told("join")) is None:
            if (code := meeting.told("end")) is not None:
                return int(code)
            if time.monotonic() > deadline:
                raise LaunchError(f"rank 0 has not started its Ray within {wait_s:g} s")
            time.sleep(_POLL_S)
        options = replace(NodeOptions(**join["options"]), address=address)
        with ray_member(join["cluster"], options, _START_S) as node:
            meeting.tell(key, state | {"joined": True})
            return _stay(meeting, node, where)
    except (LaunchError, RuntimeError, OSError) as error:
        print(f"error: node {world.node} ({where}): {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            meeting.tell(key, state | {"error": str(error)})
        return _LOST_NODE


def _stay(meeting: Meeting, node: RayNode, where: str) -> int:
    asked = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, note)
    try:
        while (code := meeting.told("end")) is None:
            if (how := node.ended()) is not None:
                raise LaunchError(f"Ray ended: {how}")
            time.sleep(_POLL_S)
        return int(code)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, before)


def _told_address(world: LauncherWorld) -> str:
    """This node's address, which is printed with its interface."""
    address = own_address(world.master_addr, world.n_nodes)
    print(f"node {world.node}: {address} on {interface_of(address) or 'no interface'}", flush=True)
    return address


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _loop(address: str) -> bool:
    return address.startswith("127.")


if __name__ == "__main__":
    end_with(main)
