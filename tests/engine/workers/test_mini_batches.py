"""Mini-batches of the global batch: nothing dropped, ranks balanced."""

import itertools

import numpy as np
import pytest

from rolemesh.engine.workers.mini_batches import MiniBatchPlan, plan_mini_batches


def mini_batch_rows(plan: MiniBatchPlan, k: int) -> list[list[int]]:
    """Each rank's rows of mini-batch `k`."""
    starts = [sum(sizes[:k]) for sizes in plan.sizes]
    return [
        list(rows[start : start + sizes[k]])
        for rows, sizes, start in zip(plan.rows, plan.sizes, starts, strict=True)
    ]


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize(("n_rows", "size"), [(33, 32), (10, 4), (3, 1), (206, 206), (5, 100)])
def test_every_row_is_in_the_mini_batch_of_its_place_whatever_dp(n_rows: int, size: int, dp: int):
    plan = plan_mini_batches([1 + i % 7 for i in range(n_rows)], size, dp)
    assert plan.n_mini_batches == -(-n_rows // size)
    for k in range(plan.n_mini_batches):
        ranks = mini_batch_rows(plan, k)
        assert sorted(itertools.chain(*ranks)) == list(range(k * size, min((k + 1) * size, n_rows)))
        counts = [len(rows) for rows in ranks]
        assert max(counts) - min(counts) <= 1


def test_33_rows_in_batches_of_32_make_a_step_of_the_last_row():
    assert plan_mini_batches([1] * 33, 32, 1).sizes == ((32, 1),)


def test_206_rows_left_by_a_filter_are_balanced_by_tokens():
    tokens = np.arange(1, 207)
    plan = plan_mini_batches(tokens.tolist(), 208, 4)
    assert sorted(len(rows) for rows in plan.rows) == [51, 51, 52, 52]
    sums = [int(tokens[list(rows)].sum()) for rows in plan.rows]
    assert max(sums) / min(sums) < 1.05


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="mini_batch_samples=0 and dp=2"):
        plan_mini_batches([1], 0, 2)
