"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on the linear layers of attention and feed-forward.

A layer W gets `scale * B A` beside it: A has `rank` rows and starts at random, B starts at zero. Query, key
and value, which are one layer here, share an A, as gate and up projection do. Routed experts have none. On
the side where tp cuts W it cuts A or B alike; the narrow values between them are what the ranks exchange.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.parallel.weights.pieces import Columns, GateUp, HfTensor, QueryKeyValue, Replicated, Rule
from rolemesh.parallel.weights.plan import ParameterPlan
from rolemesh.placement.model import ModelError

ADAPTED = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of `rank`, scaled by alpha / rank. Raises ValueError for numbers that are not above 0."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"lora needs rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}")

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


class Adapter(nn.Module):
    """A and B of one linear layer, on one tp rank."""

    def __init__(self, linear: Any, config: LoraConfig, group: dist.ProcessGroup, parallel: bool) -> None:
        super().__init__()
        out, inside = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = nn.Parameter(torch.zeros(config.rank, inside, **like))
        self.b = nn.Parameter(torch.zeros(out, config.rank, **like))
        self.scale, self.group, self.on = config.scale, group, True
        self.sequence_parallel = parallel
        self.by_columns = isinstance(linear, ColumnParallelLinear)
        cut, copied = (self.b, self.a) if self.by_columns else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if self.by_columns else 1, 1)
        # Its gradient is then summed over tp, whose ranks each see a piece of the sequence.
        copied.sequence_parallel = parallel  # type: ignore[attr-defined]

    def add(self, linear: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        """The layer's output with the adapter's; a forward hook of the layer."""
        if not self.on:
            return output
        narrow = F.linear(args[0], self.a)
        return output[0] + self.scale * F.linear(self._exchanged(narrow), self.b), output[1]

    def _exchanged(self, narrow: Tensor) -> Tensor:
        if self.by_columns and self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, group=self.group)
        if self.by_columns:
            return copy_to_tensor_model_parallel_region(narrow, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self.group)


def add_adapters(
    parts: Sequence[Any], config: LoraConfig, group: dist.ProcessGroup, sequence_parallel: bool
) -> None:
    """Freeze a stage's parameters, but for a value head's, and give its linear layers adapters to train.

    Raises ModelError for layers without linear layers that can have one.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name == "output_layer.weight" and parameter.shape[0] == 1)
        if part.pre_process:
            # Recomputed layers have gradients only where their input asks for one.
            part.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
        for layer in part.decoder.layers:
            modules = dict(layer.named_modules())
            if "self_attention.linear_qkv" not in modules:
                raise ModelError("lora is not supported for latent attention: leave lora out")
            for name in ADAPTED:
                if name in modules:
                    _adapt(modules[name], config, group, sequence_parallel)


def _adapt(linear: Any, config: LoraConfig, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    if hasattr(linear, "layer_norm_weight"):
        raise ModelError("lora is not supported where Transformer Engine fuses norms into linear layers")
    linear.adapter = Adapter(linear, config, group, sequence_parallel)
    linear.register_forward_hook(linear.adapter.add)


def adapters(parts: Sequence[nn.Module]) -> Iterator[Adapter]:
    """Every adapter of a stage."""
    return (module for part in parts for module in part.modules() if isinstance(module, Adapter))


@contextmanager
def adapters_off(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the stage is the model that it was before it had adapters."""
    for adapter in adapters(parts):
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters(parts):
            adapter.on = True


def is_adapters(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return ".adapter." in name


@torch.no_grad()
def merged(named: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A rank's weights by name with the adapters among them added: new tensors for the adapted ones."""
    out = {}
    for name, weight in named.items():
        beside = name.removesuffix("weight") + "adapter."
        if f"{beside}a" in named:
            low = named[f"{beside}b"].float() @ named[f"{beside}a"].float()
            weight = (weight.float() + scale * low).to(weight.dtype)
        if not is_adapters(name):
            out[name] = weight
    return out


def adapter_plans(plans: Sequence[ParameterPlan], config: LoraConfig, tp: int) -> tuple[ParameterPlan, ...]:
    """The adapters' parameters of a stage whose own parameters `plans` are of."""
    return tuple(
        ParameterPlan(name, rule, tuple(rule.cut(tp, rank) for rank in range(tp)))
        for plan in plans
        if plan.name.removesuffix(".weight").endswith(ADAPTED) and plan.name.endswith(".weight")
        for name, rule in _rules(plan, config.rank).items()
    )


def _rules(plan: ParameterPlan, rank: int) -> dict[str, Rule]:
    """A and B of a layer, in Hugging Face's terms: B is cut as the layer's rows are, A as its columns are."""
    first, rule = plan.tensors[0], plan.rule
    inside = first.shape[1]
    a = HfTensor(f"{stem(first.name)}.lora_A", (rank, inside))
    b = {x.name: HfTensor(f"{stem(x.name)}.lora_B", (x.shape[0], rank)) for x in plan.tensors}
    base = plan.name.removesuffix("weight") + "adapter."
    if isinstance(rule, QueryKeyValue):
        wide: Rule = replace(rule, query=b[rule.query.name], key=b[rule.key.name], value=b[rule.value.name])
    elif isinstance(rule, GateUp):
        wide = replace(rule, gate=b[rule.gate.name], up=b[rule.up.name])
    else:
        return {f"{base}a": Columns(a), f"{base}b": Replicated(b[first.name])}
    return {f"{base}a": Replicated(a), f"{base}b": wide}


def stem(name: str) -> str:
    """A weight's name without its last part."""
    return name.removesuffix(".weight")


@torch.no_grad()
def start(parameters: Mapping[str, Tensor], plans: Sequence[ParameterPlan], tp_rank: int) -> None:
    """Set A's numbers, the same for every layout: they follow from the tensor's name."""
    for plan in plans:
        if plan.name.endswith(".a"):
            (tensor,) = plan.tensors
            generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
            whole = torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[1])
            for piece in plan.cuts[tp_rank].pieces:
                parameters[plan.name][piece.target].copy_(whole[piece.source])
