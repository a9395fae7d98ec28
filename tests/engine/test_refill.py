"""Dynamic sampling: which groups a step keeps, when it is full, and what it says when it never is."""

import numpy as np
import torch

from rolemesh.engine.batch_ref import BatchRef, pack
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.refill import Refill, RefillSpec


def batch(n_rows: int) -> BatchRef:
    return pack(DataProto.from_dict({"responses": torch.zeros(n_rows, 2)}))[0].stored(range(9))


def refill(prompts: int = 2, tries: int = 3) -> Refill:
    return Refill(RefillSpec(prompts, tries))


def test_groups_of_equal_scores_are_left_out():
    step = refill()
    step.add(batch(6), list("aabbcc"), [1.0, 1.0, 0.0, 1.0, 0.5, 0.5])
    assert (step.n_kept, step.full, step.exhausted) == (1, False, False)
    step.add(batch(4), list("ddee"), [0.0, 0.0, -1.0, 2.0])
    assert step.full
    kept = step.batch()
    assert kept.n_rows == 4
    pieces = kept.columns["responses"].pieces
    assert [(piece.start, piece.stop) for piece in pieces] == [(2, 4), (2, 4)]  # b, then e
    assert step.metrics() == {
        "train/num_gen_batches": 2,
        "training/groups_kept": 2,
        "training/groups_seen": 5,
        "training/groups_without_spread": 3,
        "training/generated_rows": 10,
    }


def test_no_more_groups_than_needed_are_kept_and_they_come_in_the_order_made():
    step = refill(prompts=2)
    step.add(batch(6), list("abcabc"), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])  # the samples of a prompt apart
    assert (step.n_kept, step.batch().n_rows) == (2, 4)
    rows = [row for p in step.batch().columns["responses"].pieces for row in range(p.start, p.stop)]
    assert rows == [0, 3, 1, 4]


def test_a_group_that_lost_a_sample_is_not_kept():
    step = refill(prompts=1)
    step.add(batch(4), list("aabb"), [0.0, 1.0, 0.0, 1.0], dropped=[True, False, False, False])
    assert step.full
    assert step.n_dropped == 1
    assert [(p.start, p.stop) for p in step.batch().columns["responses"].pieces] == [(2, 4)]


def test_the_last_word_has_the_numbers_and_what_to_do():
    step = refill(prompts=4, tries=10)
    scores = np.tile([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], 10)
    for n in range(10):
        step.add(batch(8), list("aabbccdd"), scores[8 * n : 8 * n + 8].tolist())
        if step.n_kept == 3:
            break
    step.spec = RefillSpec(4, 3)
    assert not step.full
    assert step.exhausted
    assert step.shortfall().startswith(
        "dynamic sampling kept 3 groups of the 4 that a step needs, after 3 tries with 12 groups (24 "
        "samples). Mean score 0.625; 9 groups have equal scores (in 6 of them every sample got 1; in 3 of "
        "them every sample got 0). Prompts that are always or never solved teach nothing"
    )


def test_it_gives_up_without_a_single_group_or_score():
    step = refill(tries=1)
    step.add(batch(2), ["a", "a"], [0.0, 0.0], dropped=[True, True])
    assert step.exhausted
    assert "kept 0 groups of the 2" in step.shortfall()
    assert (
        "Mean score unknown; 0 groups have equal scores, 1 lost samples to a failed reward."
        in step.shortfall()
    )
