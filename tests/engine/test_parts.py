"""Results in parts of rows: what a stream gives when, and what comes back as one."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rolemesh.engine.batch_ref import BatchRef, pack, unpack
from rolemesh.engine.columns import ProtoError
from rolemesh.engine.parts import Part, PartFeed, PartRef, RowStream, combine_metrics, join_parts
from rolemesh.engine.protocol import DataProto

VALUES: dict[str, object] = {}  # what is stored, by handle


def part(*rows: int) -> PartRef:
    """Rows whose column `x` holds their own numbers."""
    manifest, blocks = pack(DataProto.from_dict({"x": torch.tensor(rows, dtype=torch.int64)}))
    handles = [f"block {len(VALUES) + i}" for i in range(len(blocks))]
    VALUES.update(zip(handles, blocks, strict=True))
    return PartRef(rows, manifest.stored(handles))


def numbers(ref: BatchRef) -> list[int]:
    return unpack(ref, VALUES).batch["x"].tolist()


def given(stream: RowStream) -> Sequence[int] | None:
    taken = stream.take()
    if taken is None:
        return None
    assert numbers(taken.ref) == list(taken.rows)
    return taken.rows


def test_parts_come_back_in_row_order():
    assert numbers(join_parts([part(4, 2), part(0, 1), part(3)], 5)) == [0, 1, 2, 3, 4]
    assert numbers(join_parts([part(0, 1), part(2)], 3)) == [0, 1, 2]


@pytest.mark.parametrize("rows", [[(0, 1), (3,)], [(0, 1), (1, 2, 3)], [(0, 1, 2, 3, 4)]])
def test_rows_that_lack_or_come_twice_are_an_error(rows: list[tuple[int, ...]]):
    with pytest.raises(ProtoError, match="parts of a batch of 4 rows"):
        join_parts([part(*some) for some in rows], 4)


def test_a_part_says_its_rows():
    with pytest.raises(ProtoError, match="for 3 rows holds 2"):
        Part([0, 1, 2], DataProto.from_dict({"x": torch.zeros(2)}))


def test_single_rows_go_as_soon_as_they_come_and_together_with_what_waits():
    stream = RowStream(5)
    assert given(stream) is None
    stream.add(part(3, 4))
    assert given(stream) == (3, 4)
    stream.add(part(2))
    stream.add(part(0, 1))
    assert given(stream) == (0, 1, 2)
    assert given(stream) is None
    assert stream.n_given == 5


def test_a_group_waits_for_its_last_row():
    stream = RowStream(6, ["a", "a", "b", "b", "b", "c"])
    stream.add(part(0, 2, 5))
    assert given(stream) == (5,)
    stream.add(part(1, 3))
    assert given(stream) == (0, 1)
    stream.add(part(4))
    assert given(stream) == (2, 3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_goes_once_with_its_whole_group_whatever_the_parts(seed: int):
    random = np.random.default_rng(seed)
    groups = random.integers(0, 6, size=24).tolist()
    rows = random.permutation(24)
    stream, gone = RowStream(24, groups), []
    for some in np.split(rows, sorted(random.choice(24, size=5, replace=False))):
        stream.add(part(*some.tolist()))
        taken = given(stream) or ()
        assert all((groups[row] in {groups[r] for r in taken}) == (row in taken) for row in range(24))
        gone += taken
    assert sorted(gone) == list(range(24))


def test_a_stream_joins_what_came_back():
    stream = RowStream(3)
    stream.returned(part(2), {"reward/failed": 1})
    with pytest.raises(ProtoError, match="missing: \\[0, 1\\]"):
        stream.result()
    stream.returned(part(0, 1), {"reward/failed": 1, "reward/length/mean": 3.0})
    joined, metrics = stream.result()
    assert numbers(joined) == [0, 1, 2]
    assert metrics == {"reward/failed": 2.0, "reward/length/mean": 3.0}


def test_counts_add_and_means_are_weighted_by_rows():
    parts = [
        ({"n": 1, "x/mean": 2.0, "x/max": 5.0, "x/min": 1.0, "t_p99_s": 3.0, "y/mean": math.nan}, 1),
        ({"n": 3, "x/mean": 6.0, "x/max": 4.0, "x/min": 0.0, "t_p99_s": 2.0, "y/mean": math.nan}, 3),
        ({"n": 2, "x/mean": math.nan}, 4),
    ]
    combined = combine_metrics(parts)
    assert math.isnan(combined.pop("y/mean"))
    assert combined == {"n": 6, "x/mean": 5.0, "x/max": 5.0, "x/min": 0.0, "t_p99_s": 3.0}


def test_who_listens_late_hears_of_every_part_once():
    feed, heard = PartFeed(), []
    feed.put(part(0))
    feed.listen(lambda made: heard.append(made.rows))
    feed.put(part(1))
    assert heard == [(0,), (1,)]
