"""Flat ranges of parameters as boxes of Hugging Face tensors."""

import itertools

import pytest
import torch

from rolemesh.parallel.weights.boxes import boxes
from rolemesh.parallel.weights.pieces import (
    Columns,
    GateUp,
    HfTensor,
    QueryKeyValue,
    Replicated,
    VocabRows,
)

RULES = {
    "vector": Replicated(HfTensor("a", (7,))),
    "columns": Columns(HfTensor("a", (5, 12))),
    "padded vocabulary": VocabRows(HfTensor("a", (5, 3))),
    "gate and up": GateUp(HfTensor("a", (8, 3)), HfTensor("b", (8, 3))),
    "attention": QueryKeyValue(HfTensor("q", (8, 5)), HfTensor("k", (4, 5)), HfTensor("v", (4, 5)), 2),
    "attention biases": QueryKeyValue(HfTensor("q", (8,)), HfTensor("k", (4,)), HfTensor("v", (4,)), 2),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dp", [1, 2, 3, 7])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_boxes_hold_every_number_once_and_in_its_place(name, dp, tp):
    """Every rank writes its range through boxes into whole tensors, and reads it back from them."""
    rule = RULES[name]
    numbers = {t.name: torch.arange(1.0, 1 + torch.Size(t.shape).numel()).view(t.shape) for t in rule.tensors}
    written = {t.name: torch.zeros(t.shape) for t in rule.tensors}
    for rank in range(tp):
        cut = rule.cut(tp, rank)
        whole = torch.zeros(cut.shape)
        for piece in cut.pieces:
            whole[piece.target] = numbers[piece.tensor][piece.source]
        n = whole.numel()
        bounds = [round(n * part / dp) for part in range(dp + 1)]
        for low, high in itertools.pairwise(bounds):
            flat = whole.view(-1)[low:high].clone()
            back = torch.zeros_like(flat)
            for box in boxes(cut, low, high):
                part = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
                if rank == 0 or not isinstance(rule, Replicated):
                    assert (written[box.tensor][part] == 0).all()
                    written[box.tensor][part] = box.view(flat)
                box.view(back).copy_(numbers[box.tensor][part])
            assert torch.equal(back, flat)
    assert all(torch.equal(written[t.name], numbers[t.name]) for t in rule.tensors)


def test_an_empty_range_has_no_boxes():
    assert not list(boxes(RULES["columns"].cut(2, 0), 7, 7))
