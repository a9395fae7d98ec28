"""Random weights: the same on every replica, finite, and such that a norm keeps what it is given."""

import torch

from rolemesh.parallel.weights.random import STD, fill_random


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "decoder.layers.0.self_attention.linear_qkv.weight": (96, 64),
        "decoder.layers.1.self_attention.linear_qkv.weight": (96, 64),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (64,),
        "decoder.layers.0.self_attention.linear_qkv.bias": (96,),
        "decoder.layers.0.mlp.router.expert_bias": (8,),
    }
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


def test_replicas_get_the_same_and_layers_differ():
    one, other = parameters(), parameters()
    fill_random(one)
    fill_random(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second, norm, bias, router = one.values()
    assert not torch.equal(first, second)
    assert abs(first.std().item() - STD) < STD / 10
    assert (norm.tolist(), bias.any().item(), router.any().item()) == ([1.0] * 64, False, False)


def test_every_number_is_set_in_bfloat16_too():
    found = parameters(torch.bfloat16)
    fill_random(found)
    assert all(tensor.isfinite().all() for tensor in found.values())
