"""A role's options on one set of devices: those that fit and that no other one is better than."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from rolemesh.placement.costs import Recompute, RoleCost, RoleOption
from rolemesh.placement.graph import Operation
from rolemesh.placement.layout import Layout
from rolemesh.placement.roles import choices
from rolemesh.placement.roles.bytes import Held, Pass, RoleBytes, working_bytes
from rolemesh.placement.roles.request import PlanRequest
from rolemesh.placement.roles.seconds import Batch, Later, RoleSeconds
from rolemesh.placement.timing.transfer import offload_seconds

WAITING = ("weights", "optimizer")  # states that wait on the host; gradients are made anew
_LEANEST = 8  # options that are shown where none fits


@dataclass(frozen=True, eq=False, slots=True)
class _Candidate:
    """An option with its bytes; seconds are reckoned only where it fits."""

    option: RoleOption
    held: Held
    passes: Mapping[str, Pass]
    resident: float
    working: tuple[float, ...]  # of the role's operations
    host: float
    price: Callable[[str], float]
    moving: float  # bytes of weights that are brought in to be handed over
    fits: bool

    @property
    def bytes(self) -> float:
        return self.resident + max(self.working, default=0.0)


class Frontier:
    """Collects the options of `role`, layout by layout."""

    def __init__(
        self,
        plan: PlanRequest,
        role: str,
        operations: tuple[Operation, ...],
        moves: tuple[str, ...],
        memory: RoleBytes,
        prices: RoleSeconds,
        *,
        limits: tuple[float, float],
        keep: Collection[str],
    ) -> None:
        self.plan, self.role, self.operations, self.moves = plan, role, operations, moves
        self.memory, self.prices, self.limits, self.keep = memory, prices, limits, keep
        self.request = plan.roles[role]
        self.fitting: list[_Candidate] = []
        self.others: list[_Candidate] = []

    def add(self, layout: Layout) -> None:
        """All options with this layout."""
        batch = Batch.of(self.plan, layout.dp)
        held = self.memory.held(layout)
        if self.plan.generates(self.role):
            self._generating(layout, held, batch)
        else:
            self._passing(layout, held, batch)

    def _generating(self, layout: Layout, held: Held, batch: Batch) -> None:
        for n in choices.at_once(self.plan, self.request, batch.rows):
            running = self.memory.generation(layout, n)
            passes = {op.name: running for op in self.operations}

            def price(name: str, n: int = n) -> float:
                operation = self.plan.graph[name]
                rows = self.plan.rows(operation, batch.rows)
                seconds = self.prices.generate(layout, min(n, rows), Batch(rows, batch.updates))
                return self.plan.times(operation) * seconds

            for offload in choices.offloads(self.plan, self.role):
                self._take(RoleOption(layout, n, offload=offload), held, passes, price)

    def _passing(self, layout: Layout, held: Held, batch: Batch) -> None:
        """Options of a role that scores, trains, or both."""
        kinds = {op.name: op.kind if op.state_reads else "" for op in self.operations}
        trains = "train" in kinds.values()
        rows = max(rows for _, rows in batch.updates) if trains else batch.rows
        for micro_batch in choices.micro_batches(self.plan, self.request, rows):
            n_micro = math.ceil(self.prices.n_micro(rows, micro_batch))
            before = len(self.fitting)
            at_once = choices.scored(self.plan, self.request, micro_batch)
            scoring = self.memory.inference(layout, min(at_once, batch.rows))
            scored: dict[str, float] = {}
            for recompute in choices.recomputes(self.plan, self.role):
                passes = {name: scoring for name, kind in kinds.items() if kind == "infer"}
                if trains:
                    update = self.memory.training(layout, min(micro_batch, rows), n_micro, recompute)
                    passes |= {name: update for name, kind in kinds.items() if kind == "train"}

                price = self._prices(layout, micro_batch, recompute, batch, scored)
                for offload in choices.offloads(self.plan, self.role):
                    self._take(RoleOption(layout, micro_batch, recompute, offload), held, passes, price)
            if len(self.fitting) == before:
                return  # larger ones need more

    def _prices(
        self, layout: Layout, micro_batch: int, recompute: Recompute, batch: Batch, scored: dict[str, float]
    ) -> Callable[[str], float]:
        """Seconds by operation, each reckoned once; `scored` are those that recomputing does not change."""
        kinds = {op.name: op.kind if op.state_reads else "" for op in self.operations}
        trained: dict[str, float] = {}

        def price(name: str) -> float:
            known = trained if kinds[name] == "train" else scored
            if name not in known:
                if kinds[name] == "train":
                    known[name] = self.prices.train(layout, micro_batch, recompute, batch)
                elif kinds[name] == "infer":
                    at_once = choices.scored(self.plan, self.request, micro_batch)
                    operation = self.plan.graph[name]
                    rows = self.plan.rows(operation, batch.rows)
                    seconds = self.prices.infer(layout, at_once, Batch(rows, batch.updates))
                    known[name] = self.plan.times(operation) * seconds
                else:
                    known[name] = self.prices.bookkeeping(layout)
            return known[name]

        return price

    def _take(
        self, option: RoleOption, held: Held, passes: Mapping[str, Pass], price: Callable[[str], float]
    ) -> None:
        working = tuple(
            working_bytes(held, passes[op.name], step=op.kind == "train") if op.name in passes else 0.0
            for op in self.operations
        )
        resident, host, moving = held.resident, 0.0, 0.0
        if option.offload:
            resident, working, host, moving = self._waiting(held, passes, working)
            price = self._with_reload(held, price)
        fits = resident + max(working, default=0.0) <= self.limits[0] and host <= self.limits[1]
        candidate = _Candidate(option, held, passes, resident, working, host, price, moving, fits)
        (self.fitting if fits else self.others).append(candidate)

    def _waiting(
        self, held: Held, passes: Mapping[str, Pass], working: tuple[float, ...]
    ) -> tuple[float, tuple[float, ...], float, float]:
        """Resident, working and host bytes, and weights, of an option whose states wait on the host."""
        weights = max(items["weights"] for items in held.items)
        brought = tuple(
            (max(held.states) if op.kind == "train" else weights) if op.name in passes else 0.0
            for op in self.operations
        )
        host = max(sum(items.get(name, 0.0) for name in WAITING) for items in held.items)
        return held.fixed, tuple(a + b for a, b in zip(working, brought, strict=True)), host, weights

    def _with_reload(self, held: Held, price: Callable[[str], float]) -> Callable[[str], float]:
        kinds = {op.name: op.kind if op.state_reads else "" for op in self.operations}
        states = max(sum(items.get(name, 0.0) for name in WAITING) for items in held.items)
        weights = max(items["weights"] for items in held.items)

        def with_reload(name: str) -> float:
            if not kinds[name]:
                return price(name)
            # What an update changed goes back to the host too.
            moved = 2 * states if kinds[name] == "train" else weights
            return price(name) + offload_seconds(moved, self.prices.links)

        return with_reload

    def best(self) -> list[RoleCost]:
        """The options worth looking at."""
        if not self.fitting:
            return [self._cost(one) for one in sorted(self.others, key=lambda one: one.bytes)[:_LEANEST]]
        rows = np.array([self._row(one) for one in self.fitting])
        keys = [self._key(one.option) for one in self.fitting]
        return [self._cost(self.fitting[i]) for i in frontier(rows, keys)]

    def _row(self, one: _Candidate) -> list[float]:
        names = [op.name for op in self.operations]
        return [*(one.price(name) for name in names), one.resident, max(one.working, default=0.0), one.host]

    def _key(self, option: RoleOption) -> Hashable:
        """Options with other keys do not replace each other: a transfer or a pin tells them apart."""
        moved = (option.layout, option.offload) if self.moves else None
        kept = tuple(
            getattr(option if hasattr(option, name) else option.layout, name) for name in sorted(self.keep)
        )
        return moved, kept

    def _cost(self, one: _Candidate) -> RoleCost:
        names = [op.name for op in self.operations]
        working = dict(zip(names, one.working, strict=True))
        working |= dict.fromkeys(self.moves, self.memory.transfer + one.moving)
        seconds = {name: one.price(name) for name in names}
        return RoleCost(one.option, seconds, one.resident, working, one.host, Later(lambda: self._items(one)))

    def _items(self, one: _Candidate) -> dict[str, float]:
        """Bytes of the fullest moment, item by item."""
        slack, kinds = self.memory.slack, {op.name: op.kind for op in self.operations}
        fullest, stage, working = -1.0, 0, dict[str, float]()
        for name, running in one.passes.items():
            for i, states in enumerate(one.held.states):
                step = one.held.step[i] / slack if kinds[name] == "train" else 0.0
                stepping = step * slack > running.working[i]
                size = states + (step * slack if stepping else running.working[i])
                if size > fullest:
                    fullest, stage = size, i
                    working = {"optimizer step": step} if stepping else dict(running.items[i])
        items = {**one.held.items[stage], **working, "communicators": one.held.fixed}
        items["allocator slack"] = (slack - 1) * sum(working.values())
        return {name: size for name, size in items.items() if size}


def frontier(rows: np.ndarray, keys: list[Hashable]) -> list[int]:
    """Rows that no other one with an equal key is at least as good as in every column; ascending."""
    groups: dict[Hashable, list[int]] = {}
    for i in np.argsort(rows.sum(axis=1), kind="stable").tolist():
        groups.setdefault(keys[i], []).append(i)
    kept = []
    for group in groups.values():
        left = np.array(group)
        while len(left):
            kept.append(int(left[0]))
            left = left[1:][~(rows[left[0]] <= rows[left[1:]]).all(axis=1)]
    return sorted(kept)
