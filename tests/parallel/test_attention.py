import resource
from types import SimpleNamespace

import pytest
import torch
from gloo import run_ranks
from torch import Tensor

from rolemesh.parallel.attention import CausalAttention


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return CausalAttention(SimpleNamespace(), 1, None, "self")(query, key, value, None)


def inputs(length: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, 1, n, 16, generator=generator, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]


def test_causal_grouped_attention_equals_a_masked_softmax():
    query, key, value = inputs(9, heads=4, kv_heads=2)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(2, dim=2)) / 4
    masked = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhst,tbhd->sbhd", masked.softmax(-1), value.repeat_interleave(2, dim=2))
    torch.testing.assert_close(attend(query, key, value), expected.flatten(2))


@pytest.mark.full
def test_memory_is_linear_in_the_sequence():
    def growth_mb(rank: int, world: int) -> float:
        query, key, value = inputs(8192, heads=8, kv_heads=2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend(query, key, value).sum().backward()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    assert run_ranks(growth_mb, 1)[0] < 200  # one head's scores alone would be 256 MiB
