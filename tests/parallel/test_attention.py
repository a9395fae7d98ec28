import resource
from types import SimpleNamespace

import pytest
import torch
from gloo import run_ranks
from torch import Tensor

from rolemesh.parallel.attention import CausalAttention
from rolemesh.parallel.context import Packed


def attend(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...]) -> Tensor:
    packed = Packed.of(bounds, 1, 0, query.device)
    return CausalAttention(SimpleNamespace(window_size=None), 1, None, "self")(
        query, key, value, None, packed_seq_params=packed
    )


def inputs(length: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, n, 16, generator=generator, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]


def test_packed_causal_grouped_attention_and_its_gradients_equal_a_masked_softmax():
    query, key, value = inputs(9, heads=4, kv_heads=2)
    segment = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    hidden = torch.ones(9, 9).triu(1).bool() | (segment[:, None] != segment)
    scores = torch.einsum("shd,thd->hst", query, key.repeat_interleave(2, dim=1)) / 4
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hst,thd->shd", weights, value.repeat_interleave(2, dim=1))
    found = attend(query, key, value, (0, 4, 5, 5, 9))
    torch.testing.assert_close(found, expected.flatten(1))
    upstream = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = [
        torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected.flatten(1))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.full
def test_memory_is_linear_in_the_sequence():
    def growth_mb(rank: int, world: int) -> float:
        query, key, value = inputs(8192, heads=8, kv_heads=2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend(query, key, value, (0, 8192)).sum().backward()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    assert run_ranks(growth_mb, 1)[0] < 200  # one head's scores alone would be 256 MiB
