"""What does moving a batch between roles cost, by handle and through the driver?

Claims, for 8 tensor and 2 object columns, whether or not the rows divide evenly:
1. A consumer with another dp, or of 2 columns out of the 10, fetches at most 1.1 times what it reads.
2. By handle no column passes through the driver, whose memory stays flat. The version beside it gathers the
   whole batch on the driver and passes it on from there.
3. The right values arrive in the right rows: the sums of every row of every column are those of the closed
   form. A batch of the driver's own comes back from dp=4 as it went; beside it, as pickled arguments.

The producing ranks make the columns before the clock starts. Times are medians of the repeats after a first
one, and include reading what has arrived. Memory is the largest growth of the driver's RSS in any repeat:
what was mapped of the object store stays in it, so hops by handle come first. Exits with 1 when 1 or 3 fails.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pickle
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from rolemesh.engine.columns import object_column, values_equal
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.blocks import batch_future
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePool, create_pools
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.worker import Worker

INT64 = ("input_ids", "attention_mask", "position_ids", "response_mask")
FLOAT32 = ("old_log_probs", "ref_log_prob", "values", "advantages")
TENSORS, OBJECTS = INT64 + FLOAT32, ("uid", "extra_info")
COLUMNS, TWO_COLUMNS = TENSORS + OBJECTS, ("input_ids", "advantages")
DP_SIZES = (2, 3, 4)
MOST_FETCHED = 1.1  # times the bytes of a consumer's rows and columns
MIB = 2**20

Groups = Mapping[int, RayWorkerGroup]  # by dp
Names = Sequence[str]


def make_batch(rows: torch.Tensor, tokens: int) -> DataProto:
    """All columns of the row numbers [b]; tensor column k, [b, tokens], holds row * (k + 1) + token."""
    columns = {name: rows[:, None] * (k + 1) + torch.arange(tokens) for k, name in enumerate(TENSORS)}
    tensors = {name: column if name in INT64 else column.float() for name, column in columns.items()}
    uids = object_column(f"prompt-{row:08d}" for row in rows.tolist())
    infos = object_column({"index": row, "answer": f"the answer to {row}"} for row in rows.tolist())
    return DataProto.from_dict(tensors, {"uid": uids, "extra_info": infos})


def expected_sums(n_rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """What `Station.row_sums` gives for each column, in closed form: [n_rows] float64."""
    row = torch.arange(n_rows, dtype=torch.float64)
    sums = {name: tokens * row * (k + 1) + tokens * (tokens - 1) / 2 for k, name in enumerate(TENSORS)}
    batch = make_batch(torch.arange(n_rows), 1)
    return sums | {name: checksums(column) for name, column in batch.non_tensor_batch.items()}


def checksums(objects: Sequence[object]) -> torch.Tensor:
    """A number per object, [b] float64."""
    return torch.tensor([zlib.crc32(repr(value).encode()) for value in objects], dtype=torch.float64)


class Station(Worker):
    """Makes, returns or reads batches."""

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, rows: DataProto, tokens: int) -> DataProto:
        return make_batch(rows.batch["row"], tokens)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE)
    def echo_pickled(self, shard: bytes) -> bytes:
        return pickle.dumps(pickle.loads(shard))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def row_sums(self, batch: DataProto) -> DataProto:
        tensors = {f"{name}_sum": x.sum(dim=-1, dtype=torch.float64) for name, x in batch.batch.items()}
        objects = {f"{name}_sum": checksums(column) for name, column in batch.non_tensor_batch.items()}
        return DataProto.from_dict(tensors | objects)


@dataclass
class Cost:
    """Of one delivery, to the driver: how long it waited, and how much its RSS grew meanwhile."""

    seconds: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Trip:
    """One delivery, or several taken together."""

    cost: Cost
    driver_bytes: int  # that the driver stored, sent or fetched
    right: bool
    fetched: float = 0.0  # bytes over bytes needed, of the rank that fetched most


@dataclass(frozen=True)
class Case:
    """A delivery in two versions: in blocks that move by handle, and the one to compare with."""

    name: str
    ours: Callable[[], Trip]
    other: Callable[[], Trip]


@contextmanager
def watched() -> Iterator[Cost]:
    """The cost of the block, filled in when it ends."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed earlier would hide what is taken now
    cost, process, ended = Cost(), psutil.Process(), threading.Event()
    before, start = process.memory_info().rss, time.perf_counter()

    def sample() -> None:
        while not ended.wait(0.002):
            cost.memory_bytes = max(cost.memory_bytes, process.memory_info().rss - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield cost
    cost.seconds = time.perf_counter() - start
    ended.set()
    sampler.join()


def most_fetched(call: DataProtoFuture, batch: DataProtoFuture) -> float:
    """Bytes that a rank of `call` fetched over those of its part of `batch`: the largest of all ranks."""
    parts = batch.ref().chunk(len(call.spans))
    return max(span.nbytes_fetched / part.nbytes for span, part in zip(call.spans, parts, strict=True))


def hop(groups: Groups, dps: tuple[int, int], shape: tuple[int, int], names: Names, by_driver: bool) -> Trip:
    """Columns of a batch [rows, tokens] that lies with the ranks of one group, read by those of another."""
    made = groups[dps[0]].make(DataProto.from_dict({"row": torch.arange(shape[0])}), shape[1])
    wanted = made.select(names)
    wanted.ref()
    kinds = [[name for name in kind if name in names] for kind in (TENSORS, OBJECTS)]
    with watched() as cost:
        call = groups[dps[1]].row_sums(made.get().select(*kinds) if by_driver else wanted)
        sums = call.get()
    expected = {f"{name}_sum": total for name, total in expected_sums(*shape).items() if name in names}
    gathered = made.ref().nbytes + wanted.ref().nbytes if by_driver else 0
    right = values_equal(dict(sums.batch), expected)
    return Trip(cost, gathered + call.ref().nbytes, right, most_fetched(call, wanted))


def round_trip(group: RayWorkerGroup, batch: DataProto) -> Trip:
    """A batch of the driver's to all replicas and back, in blocks."""
    with watched() as cost:
        sent = batch_future(batch, group.resource_pool.dp_sizes)
        call = group.echo(sent)
        back = call.get()
    return Trip(cost, sent.ref().nbytes + call.ref().nbytes, same(batch, back), most_fetched(call, sent))


def pickled_round_trip(group: RayWorkerGroup, batch: DataProto) -> Trip:
    """The same, with each replica's shard as a pickled argument and a pickled result."""
    with watched() as cost:
        shards = [pickle.dumps(shard) for shard in batch.chunk(group.layout.dp)]
        returned = group.echo_pickled(shards)
        back = DataProto.concat([pickle.loads(shard) for shard in returned])
    return Trip(cost, sum(map(len, shards + returned)), same(batch, back))


def same(one: DataProto, other: DataProto) -> bool:
    """Whether two batches have the same columns."""
    return values_equal({**one.batch, **one.non_tensor_batch}, {**other.batch, **other.non_tensor_batch})


def repeated(trip: Callable[[], Trip], repeats: int) -> Trip:
    """Median time of all trips but the first, the most memory and fetched bytes of all, right if all are."""
    trips = [trip() for _ in range(repeats + 1)]
    seconds = statistics.median(one.cost.seconds for one in trips[1:])
    cost = Cost(seconds, max(one.cost.memory_bytes for one in trips))
    fetched = max(one.fetched for one in trips)
    return Trip(cost, trips[0].driver_bytes, all(one.right for one in trips), fetched)


def hop_cases(groups: Groups, n_rows: int, tokens: int) -> list[Case]:
    """Hops of all columns, and one of two of them."""
    cases = []
    for dps, names in (((4, 2), COLUMNS), ((2, 3), COLUMNS), ((3, 4), COLUMNS), ((4, 2), TWO_COLUMNS)):
        ways = (partial(hop, groups, dps, (n_rows, tokens), names, by_driver) for by_driver in (False, True))
        cases.append(Case(f"{n_rows:,} rows, {len(names)} columns, dp {dps[0]} to {dps[1]}", *ways))
    return cases


def round_trip_case(group: RayWorkerGroup, n_rows: int, tokens: int) -> Case:
    batch = make_batch(torch.arange(n_rows), tokens)
    ways = (partial(way, group, batch) for way in (round_trip, pickled_round_trip))
    return Case(f"{n_rows:,} rows, 10 columns, dp {group.layout.dp} and back", *ways)


def report(other: str, cases: Sequence[Case], repeats: int) -> bool:
    """Measure and print the cases; whether all values were right and no rank fetched too much."""
    ours = [repeated(case.ours, repeats) for case in cases]
    others = [repeated(case.other, repeats) for case in cases]
    both = f"{'blocks':>9}{other:>9}"
    print(f"\n{'':38}{'time, ms':>18}{'':7}{'driver growth, MiB':>18}{'via driver, MiB':>18}  fetched/")
    print(f"{'':38}{both}  ratio{both}{both}    needed")
    for case, a, b in zip(cases, ours, others, strict=True):
        times = (
            f"{a.cost.seconds * 1e3:9.0f}{b.cost.seconds * 1e3:9.0f}{b.cost.seconds / a.cost.seconds:7.2f}"
        )
        memory = f"{a.cost.memory_bytes / MIB:9.1f}{b.cost.memory_bytes / MIB:9.1f}"
        moved = f"{a.driver_bytes / MIB:9.2f}{b.driver_bytes / MIB:9.2f}{a.fetched:10.4f}"
        print(f"{case.name:38}{times}{memory}{moved}{'' if a.right and b.right else '  WRONG VALUES'}")
    return all(one.right for one in ours + others) and all(one.fetched <= MOST_FETCHED for one in ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 1001])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with local_cluster(slots=sum(DP_SIZES)):
        pools = [ResourcePool([dp], name_prefix=f"dp{dp}") for dp in DP_SIZES]
        create_pools(pools)
        groups = {pool.world_size: RayWorkerGroup(pool, RayClassWithInitArgs(Station)) for pool in pools}
        hops = [case for n_rows in args.rows for case in hop_cases(groups, n_rows, args.tokens)]
        good = report("gathered", hops, args.repeats)
        trips = [round_trip_case(groups[4], n_rows, args.tokens) for n_rows in args.rows]
        good = report("pickled", trips, args.repeats) and good
    print(f"\nright values, and at most {MOST_FETCHED} times the bytes needed: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
