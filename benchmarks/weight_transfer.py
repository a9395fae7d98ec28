"""What does it cost to bring new weights from the training ranks to the generation ranks?

Three ways from a Megatron layout to full copies in other processes, in turns in the same run:
- `planned`: each rank sends what its plan says, bucket by bucket, through shared memory on one machine;
- `network`: the same, as if every process were on a machine of its own (gloo over sockets);
- `gathered`: rank 0 gathers the whole model and broadcasts it, tensor by tensor (gloo).

Claims: 1. every copy is right, bit by bit. 2. A target receives at most 1.02 times what it must hold. 3. No
process holds more than its buckets beside its own part, where `gathered` holds the whole model on rank 0.
Seconds are medians over the repeats, after one that is not counted, from the driver's call to its return.
Memory is what processes grow by at most. Exits with 1 when 1, 2 or 3 fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePool, create_pools
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.weights import give, gives_weights, take, takes_weights
from rolemesh.parallel.weights.plan import hf_tensors
from rolemesh.parallel.weights.transfer_link import HALVES, Meeting
from rolemesh.parallel.weights.transfer_plan import plan_transfer
from rolemesh.parallel.weights.transfer_sides import EngineSide, MegatronSide
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

WAYS = ("planned", "network", "gathered")
MOST_RECEIVED = 1.02
MIB = 2**20


def number(name: str, version: int) -> float:
    """What all numbers of a tensor are, so that a copy is checked without another one of the model."""
    return float(sum(name.encode()) % 200 + version % 50)  # exact in bfloat16


class Watched(Worker):
    """A worker that knows how much its process has grown."""

    shape: ModelShape

    @register(Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
        self.before = _status("VmRSS")

    @register(Dispatch.ONE_TO_ALL)
    def grown_bytes(self) -> int:
        return max(0, _status("VmHWM") - self.before)

    def group(self, meeting: Meeting, name: str, rank: int, size: int) -> Any:
        """A gloo group over processes of both pools."""
        if name not in self.context.shared:
            store = dist.TCPStore(meeting.address, meeting.port, is_master=False)
            prefix = dist.PrefixStore(f"{name}/{meeting.id}", store)
            self.context.shared[name] = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=300))
        return self.context.shared[name]


class Source(Watched):
    """A training rank with its shard of the model."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.side = MegatronSide(shape, self.layout, dtype)
        self.held = self.side.holdings()[self.rank]
        self.tensors = {name: torch.zeros(cut.shape, dtype=dtype) for name, cut in self.held.items()}

    @register(Dispatch.ONE_TO_ALL)
    def update(self, version: int) -> None:
        """New weights."""
        for name, cut in self.held.items():
            for piece in cut.pieces:
                self.tensors[name][piece.target] = number(piece.tensor, version)

    @gives_weights
    def planned(self, meeting: Meeting) -> None:
        give(self, meeting, self.side, lambda: nullcontext(self.tensors))

    @gives_weights
    def network(self, meeting: Meeting) -> None:
        give(self, apart(meeting), self.side, lambda: nullcontext(self.tensors))

    @gives_weights
    def gathered(self, meeting: Meeting) -> None:
        """All parts of one replica to rank 0, which then sends whole tensors to everyone that generates."""
        n = meeting.n_sources
        sources = self.group(meeting, "sources", self.rank, n)
        holdings, replica = self.side.holdings(), self.layout.replica(0)
        if self.rank in replica and self.rank > 0:
            for name in self.held:
                sources.send([self.tensors[name]], 0, 0).wait()
        if self.rank > 0:
            return
        whole = {
            tensor.name: torch.empty(tensor.shape, dtype=self.side.dtype)
            for tensor in hf_tensors(self.shape).values()
        }
        for rank in replica:
            for name, cut in holdings[rank].items():
                part = self.tensors[name] if rank == 0 else torch.empty(cut.shape, dtype=self.side.dtype)
                if rank > 0:
                    sources.recv([part], rank, 0).wait()
                for piece in cut.pieces:
                    whole[piece.tensor][piece.source] = part[piece.target]
        readers = self.group(meeting, "readers", 0, 1 + meeting.n_targets)
        for tensor in whole.values():
            readers.broadcast([tensor]).wait()


class Target(Watched):
    """A generation rank with a full copy of the model."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.side = EngineSide(shape, dtype, replicas=self.world_size)
        self.tensors = {t.name: torch.zeros(t.shape, dtype=dtype) for t in hf_tensors(shape).values()}

    @takes_weights
    def planned(self, meeting: Meeting) -> None:
        for _ in take(self, meeting, self.side, lambda name, *_: self.tensors[name]):
            pass

    @takes_weights
    def network(self, meeting: Meeting) -> None:
        for _ in take(self, apart(meeting), self.side, lambda name, *_: self.tensors[name]):
            pass

    @takes_weights
    def gathered(self, meeting: Meeting) -> None:
        readers = self.group(meeting, "readers", 1 + self.rank, 1 + meeting.n_targets)
        for tensor in self.tensors.values():
            readers.broadcast([tensor]).wait()

    @register(Dispatch.ONE_TO_ALL)
    def right(self, version: int) -> bool:
        """Whether every number is that of the version."""
        return all(bool((tensor == number(name, version)).all()) for name, tensor in self.tensors.items())


def apart(meeting: Meeting) -> Meeting:
    """The same processes, as if each were on a machine of its own."""
    return dataclasses.replace(meeting, pair=f"{meeting.pair} apart", id=f"{meeting.id}-apart", shared=False)


@dataclasses.dataclass
class Measured:
    """One way's figures: seconds of each repeat; bytes received over those needed, and growth, at most."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    received: float = 0.0
    source_bytes: int = 0
    target_bytes: int = 0
    right: bool = True


def transfer(way: str, source: RayWorkerGroup, target: RayWorkerGroup, needed: int, into: Measured) -> float:
    """One transfer; the driver's seconds."""
    for group in (source, target):
        group.reset()
    start = time.perf_counter()
    given = getattr(source, way)(blocking=False)
    taken = getattr(target, way)(given, blocking=False)
    taken.get()
    given.ref()
    seconds = time.perf_counter() - start
    received = [span.notes.get("received_bytes", 0) / needed for span in taken.spans]
    into.received = max(into.received, *received)
    into.source_bytes = max(into.source_bytes, *_with_buffers(source, given))
    into.target_bytes = max(into.target_bytes, *_with_buffers(target, taken))
    return seconds


def _with_buffers(group: RayWorkerGroup, call: DataProtoFuture) -> list[int]:
    """By how much each process grew, and what it keeps for the next transfer."""
    kept = [span.notes.get("buffer_bytes", 0) for span in call.spans]
    return [grown + buffers for grown, buffers in zip(group.grown_bytes(), kept, strict=True)]


def measure(
    shape: ModelShape, layout: Layout, targets: int, dtype: torch.dtype, repeats: int
) -> dict[str, Measured]:
    """Every way's figures, taken in turns."""
    train = ResourcePool([layout.world], name_prefix="train", device="cpu")
    generate = ResourcePool([targets], name_prefix="generate", device="cpu")
    create_pools([train, generate])
    source = RayWorkerGroup(train, RayClassWithInitArgs(Source, shape, dtype), layout=layout, role="actor")
    target = RayWorkerGroup(generate, RayClassWithInitArgs(Target, shape, dtype), role="rollout")
    needed = model_bytes(shape, dtype)
    found, version = {way: Measured() for way in WAYS}, 0
    for repeat in range(repeats + 1):
        for way in WAYS:
            version += 1
            source.update(version)
            into = Measured() if repeat == 0 else found[way]
            seconds = transfer(way, source, target, needed, into)
            found[way].right &= all(target.right(version))
            if repeat > 0:
                into.seconds.append(seconds)
    for pool in (train, generate):
        pool.shutdown()
    return found


def report(found: Mapping[str, Measured], n_bytes: int, bucket_bytes: int) -> bool:
    """Print the table; whether the claims hold."""
    ours = statistics.median(found["planned"].seconds)
    print(f"{'':10}{'seconds':>9}{'GB/s':>7}{'of planned':>12}{'received':>10}{'growth, MiB':>22}")
    print(f"{'':10}{'':9}{'':7}{'':12}{'/needed':>10}{'training':>11}{'generation':>11}")
    for way, figures in found.items():
        seconds = statistics.median(figures.seconds)
        received = f"{figures.received:.4f}" if figures.received else "-"
        print(
            f"{way:10}{seconds:9.3f}{n_bytes / seconds / 1e9:7.2f}{seconds / ours:12.2f}{received:>10}"
            f"{figures.source_bytes / MIB:11.0f}{figures.target_bytes / MIB:11.0f}"
        )
    planned = [found["planned"], found["network"]]
    right = all(figures.right for figures in found.values())
    few = all(0 < figures.received <= MOST_RECEIVED for figures in planned)
    slack = 2 * bucket_bytes  # allocators round up, and sockets have buffers
    small = all(
        max(figures.source_bytes, figures.target_bytes) <= HALVES * bucket_bytes + slack
        for figures in planned
    )
    claims = {
        "right values": right,
        f"at most {MOST_RECEIVED} of the bytes": few,
        "no process beyond its buckets": small,
    }
    print("\n" + "; ".join(f"{claim}: {'yes' if holds else 'no'}" for claim, holds in claims.items()))
    return right and few and small


def model_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the whole model."""
    return sum(prod(tensor.shape) for tensor in hf_tensors(shape).values()) * dtype.itemsize


def model(hidden: int, layers: int) -> ModelShape:
    """A Llama of that size."""
    heads = max(4, hidden // 128)
    return ModelShape(
        "llama", layers, hidden, hidden * 11 // 4, heads, heads // 2, hidden // heads, 16_000, 4096
    )


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plan", action="store_true", help="print the plan and move nothing")
    args = parser.parse_args(argv)
    shape, dtype = model(args.hidden, args.layers), torch.bfloat16
    layout = Layout(tp=args.tp, pp=args.pp, dp=args.dp)
    n_bytes = model_bytes(shape, dtype)
    print(f"{n_bytes / MIB:,.0f} MiB in bfloat16 from {layout} to {args.targets} full copies\n")
    if args.plan:
        print(
            plan_transfer(
                MegatronSide(shape, layout, dtype), EngineSide(shape, dtype, 1, args.targets)
            ).table()
        )
        return 0
    with local_cluster(layout.world + args.targets, object_store_bytes=2**28):
        found = measure(shape, layout, args.targets, dtype, args.repeats)
    bucket_bytes = next(f.default for f in dataclasses.fields(Meeting) if f.name == "bucket_bytes")
    return 0 if report(found, n_bytes, bucket_bytes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
