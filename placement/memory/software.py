"""What the training software keeps in memory: facts about programs, apart from models and layouts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from rolemesh.placement.hints import did_you_mean

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
_DATA = Path(__file__).parents[1] / "data" / "memory.yaml"


class SoftwareError(ValueError):
    """Training software that is not known, or whose description contradicts itself."""


@dataclass(frozen=True)
class Software:
    """How a program trains; the presets of `software` say where each of their figures is from.

    Attributes:
        weights: bytes of a stored weight; 0: those of the dtype it computes in.
        gradients: bytes of a stored gradient.
        optimizer: bytes of optimizer state per parameter, an fp32 master copy (if any) included.
        step: bytes per parameter of the optimizer's share that exist only while it steps.
        grad_copy: bytes per value of the largest gradient, copied before it is added up.
        loose_grad: a gradient is made outside of the stored ones, in the dtype, and then added to them.
        sharding: what data-parallel ranks share out: nothing, optimizer state (ZeRO-1), also gradients
            (ZeRO-2), also weights (ZeRO-3, FSDP).
        flash: attention keeps no scores; without it heads x seq_len^2 of them are kept.
        norm: bytes that a norm keeps per value, beside the output; 0: its input in the dtype.
        glu: tensors as wide as the feed-forward that a gated one keeps beside gate and up projection.
        rope: rotated queries and keys are kept beside the projections that they were made from.
        rotary: tables of cosines and sines that each layer keeps, one row per position.
        by_sample: attention runs on one packed sample after the other: its output is kept twice, of the
            sample and of all, and rotary tables have a row per token.
        dropout: masks of one byte per value are kept.
        logit: bytes per logit at the peak of a head that makes all logits, loss and gradient included.
        expert_saved, expert_grad: bytes per hidden value of a token sent to an expert, kept and at the
            backward pass.
        imbalance: tokens of the fullest rank's experts, against the mean.
        gathered: bytes per parameter of a layer that is whole on the device for its turn (ZeRO-3), frozen.
        gathered_grad: further bytes where it is trained.
        gathered_ends, ends_grad: the same for the embedding's or head's matrix.
        ends_stay: that matrix stays whole while the layers go backward.
        cut_vocab: tensor-parallel ranks share out the vocabulary.
        schedule: order of micro-batches: `1f1b`, or `gpipe` (all forward passes, then all backward).
        stage_outputs: a stage keeps what it sent on until the backward pass.
        buckets: bytes of communication buffers that stay.
        expandable: the allocator maps memory in pieces (`expandable_segments`), so that little is lost
            between blocks.
    """

    name: str
    weights: float = 0
    gradients: float = 4
    optimizer: float = 12
    step: float = 0
    grad_copy: float = 0
    loose_grad: bool = False
    sharding: Sharding = "optimizer"
    flash: bool = True
    norm: float = 0
    glu: float = 1
    rope: bool = True
    by_sample: bool = False
    rotary: float = 0
    dropout: bool = False
    logit: float = 10
    expert_saved: float = 4
    expert_grad: float = 4
    imbalance: float = 1
    gathered: float = 0
    gathered_grad: float = 0
    gathered_ends: float = 0
    ends_grad: float = 0
    ends_stay: bool = False
    cut_vocab: bool = True
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    stage_outputs: bool = False
    buckets: float = 0
    expandable: bool = False

    def __post_init__(self) -> None:
        if self.sharding not in get_args(Sharding):
            raise SoftwareError(
                f"sharding {self.sharding!r} is none of {', '.join(get_args(Sharding))}"
                f"{did_you_mean(str(self.sharding), get_args(Sharding))}"
            )
        if self.schedule not in ("1f1b", "gpipe"):
            raise SoftwareError(f"schedule {self.schedule!r} is neither 1f1b nor gpipe")
        below = [
            field.name
            for field in fields(self)
            if field.name not in ("name", "sharding", "schedule") and getattr(self, field.name) < 0
        ]
        if below:
            raise SoftwareError(f"{self.name}: {', '.join(below)} below 0")

    def shards(self, what: Sharding) -> bool:
        """Whether data-parallel ranks share out `what`."""
        levels = get_args(Sharding)
        return levels.index(self.sharding) >= levels.index(what)


def software(name: str) -> Software:
    """The description of a program by name. Raises SoftwareError for an unknown one, naming the nearest."""
    known = softwares()
    if name not in known:
        raise SoftwareError(
            f"no description of the memory of {name!r} (known: {', '.join(known)}){did_you_mean(name, known)}"
        )
    return known[name]


@functools.cache
def softwares() -> Mapping[str, Software]:
    """Every description that comes with the package."""
    described = memory_data()["software"]
    return {
        name: Software(name, **{key: value for key, value in facts.items() if key != "sources"})
        for name, facts in described.items()
    }


@functools.cache
def memory_data() -> Mapping[str, Any]:
    """The data file: descriptions of software, and what a process takes on each type of device."""
    with _DATA.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
