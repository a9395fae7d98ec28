"""Bytes of a role's options: what stays, what each operation works with, what waits on the host.

Activations do not depend on the number of replicas, nor states on the micro-batch, so each is counted once
for all the options that share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rolemesh.placement.costs import Recompute
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import (
    RankParams,
    Software,
    generation_memory,
    inference_memory,
    layers_of,
    rank_params,
    software,
    state_memory,
    training_memory,
    transfer_memory,
)
from rolemesh.placement.memory.activations import DTYPE_BYTES
from rolemesh.placement.memory.inference import PAGE_TOKENS, PREFILL_TOKENS
from rolemesh.placement.memory.lora import adapter_params
from rolemesh.placement.memory.process import communicator_bytes, slack_fraction
from rolemesh.placement.roles.request import PlanRequest, RoleRequest

_MANY = 1 << 30  # replicas: with so many, what they share out is nothing
Cut = tuple[int | tuple[int, ...], ...]  # of a layout all but dp


def cut_of(layout: Layout) -> Cut:
    """What of a layout activations depend on."""
    return (
        *(layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp),
        *(layout.sequence_parallel, layout.pp_layers),
    )


@dataclass(frozen=True)
class Held:
    """What a role holds under a layout, for each of the stages looked at.

    Attributes:
        items: states by item.
        states: their sums.
        step: working bytes of the optimizer's step; the slack is in.
        fixed: what stays on the device whatever runs.
    """

    items: tuple[Mapping[str, float], ...]
    states: tuple[float, ...]
    step: tuple[float, ...]
    fixed: float

    @property
    def resident(self) -> float:
        """Bytes of the heaviest rank throughout the step."""
        return max(self.states) + self.fixed


@dataclass(frozen=True)
class Pass:
    """Working bytes of a pass for each of the stages looked at, slack included; and by item, without it."""

    working: tuple[float, ...]
    items: tuple[Mapping[str, float], ...]


class RoleBytes:
    """Bytes of one role on one type of device."""

    def __init__(self, plan: PlanRequest, role: str, device_type: str) -> None:
        self.plan, self.device_type = plan, device_type
        self.request: RoleRequest = plan.roles[role]
        self.trains = plan.trains(role)
        self.by: Software = software(_software(plan, device_type))
        self.slack = 1 + slack_fraction(self.by)
        self.size = DTYPE_BYTES[self.request.dtype]
        self.longest = round(plan.workload.longest_tokens)
        self._passes: dict[tuple[object, ...], Pass] = {}
        self._held: dict[Layout, Held] = {}
        self._whole_steps: dict[tuple[Cut, int], float] = {}
        self._many: dict[Cut, Layout] = {}
        self._params: dict[tuple[Cut, int], RankParams] = {}
        transfer = transfer_memory(self.request.shape, dtype=self.request.dtype)
        self.transfer = transfer.working_bytes * self.slack  # what handing over weights works with

    def stages(self, layout: Layout) -> tuple[int, ...]:
        """Stages that may be the fullest: first and last; with experts, whose layers differ, all."""
        if self.request.shape.moe is not None:
            return tuple(range(layout.pp))
        return (0,) if layout.pp == 1 else (0, layout.pp - 1)

    def held(self, layout: Layout) -> Held:
        """Weights, and of a trained role gradients and optimizer state."""
        if layout not in self._held:
            items = tuple(self._states(layout, stage) for stage in self.stages(layout))
            sums = tuple(sum(states.values()) for states in items)
            step = tuple(self._step(layout, stage) for stage in self.stages(layout))
            fixed = communicator_bytes(layout, self.device_type)
            self._held[layout] = Held(items, sums, step, fixed)
        return self._held[layout]

    def _states(self, layout: Layout, stage: int) -> Mapping[str, float]:
        key = cut_of(layout), stage
        if key not in self._params:
            self._params[key] = rank_params(self.request.shape, layout, stage)
        params = self._params[key]
        if not self.trains:
            return {"weights": params.total * self.size}
        layers = layers_of(self.request.shape, layout)[stage]
        adapters = adapter_params(self.request.shape, layout, layers, self.request.lora_rank)
        return state_memory(params, layout, self.by, dtype_bytes=self.size, adapters=adapters)

    def _step(self, layout: Layout, stage: int) -> float:
        """An update of hardly any tokens shows what the optimizer works with."""
        if not self.trains or not self.by.step:
            return 0.0
        if self.request.shape.moe is not None:  # experts may be shared out over fewer ranks than dp
            return self._step_of(layout, stage)
        key = cut_of(layout), stage
        if key not in self._whole_steps:
            self._whole_steps[key] = self._step_of(replace(layout, dp=1), stage)
        return self._whole_steps[key] / layout.dp if self.by.shards("optimizer") else self._whole_steps[key]

    def _step_of(self, layout: Layout, stage: int) -> float:
        items = training_memory(
            self.request.shape,
            layout,
            micro_batch=1 / self.longest,
            seq_len=self.longest,
            n_micro_batches=1,
            recompute="full",
            dtype=self.request.dtype,
            by=self.by,
            lora_rank=self.request.lora_rank,
            stage=stage,
        )
        return items.working_bytes * self.slack

    def training(self, layout: Layout, micro_batch: int, n_micro: int, recompute: Recompute) -> Pass:
        """An update; the optimizer's step apart."""
        # A pipeline holds no more at a time: pp, or interleaved at most half as many again.
        held = 1 if layout.pp == 1 else min(n_micro, layout.pp if layout.vpp == 1 else -(-3 * layout.pp // 2))
        key = "train", cut_of(layout), micro_batch, held, recompute
        if key not in self._passes:
            if key[1] not in self._many:
                self._many[key[1]] = replace(layout, dp=_MANY)
            self._passes[key] = self._pass(
                training_memory(
                    self.request.shape,
                    self._many[key[1]],
                    micro_batch=micro_batch,
                    seq_len=self.longest,
                    n_micro_batches=held,
                    recompute=recompute,
                    dtype=self.request.dtype,
                    by=self.by,
                    lora_rank=self.request.lora_rank,
                    stage=stage,
                ).working
                for stage in self.stages(layout)
            )
        return self._passes[key]

    def inference(self, layout: Layout, micro_batch: int) -> Pass:
        """A forward pass."""
        key = "infer", cut_of(layout), micro_batch
        if key not in self._passes:
            items = inference_memory(
                self.request.shape,
                layout,
                micro_batch=micro_batch,
                seq_len=self.longest,
                dtype=self.request.dtype,
            )
            self._passes[key] = self._pass(items.working for _ in self.stages(layout))
        return self._passes[key]

    def generation(self, layout: Layout, at_once: int) -> Pass:
        """Generation, with a KV cache for `at_once` sequences."""
        key = "generate", cut_of(layout), at_once
        if key not in self._passes:
            paged = self.request.engine == "paged"
            prompts = at_once * self.plan.workload.prompt_lengths.maximum
            items = generation_memory(
                self.request.shape,
                layout,
                n_sequences=at_once,
                tokens=max(self._cached, self.longest / at_once) if paged else self.longest,
                dtype=self.request.dtype,
                page_tokens=PAGE_TOKENS if paged else 1,
                prefill_tokens=PREFILL_TOKENS if paged else prompts,
            )
            self._passes[key] = self._pass(items.working for _ in self.stages(layout))
        return self._passes[key]

    def _pass(self, items: Iterable[Mapping[str, float]]) -> Pass:
        kept = tuple(items)
        return Pass(tuple(sum(working.values()) * self.slack for working in kept), kept)

    @cached_property
    def _cached(self) -> float:
        """Tokens in the cache for each of many sequences, when most are held.

        All may have begun together, and those that are longer still run; or they were let in one after the
        other, and long ones are met more often: E[r^2] / 2 E[r] of the response is then there on average.
        """
        prompt, response = self.plan.workload.prompt_lengths.mean, self.plan.workload.response_lengths
        steps = np.linspace(0.0, response.maximum, 65)[:-1]
        together = float((response.active(steps) * (prompt + steps + response.maximum / 64)).max())
        return max(together, prompt + response.mean_square / (2 * response.mean))


def working_bytes(held: Held, running: Pass, *, step: bool = False) -> float:
    """What a pass needs beside what the heaviest rank holds anyway; `step`: the optimizer steps after it."""
    fullest = 0.0
    for states, working, after in zip(held.states, running.working, held.step, strict=True):
        fullest = max(fullest, states + (max(working, after) if step else working))
    return fullest - max(held.states)


def _software(plan: PlanRequest, device_type: str) -> str:
    if device_type == "cpu":
        return "megatron-cpu"
    return "megatron" if plan.runnable else "megatron-lm"
