"""For which mean response lengths a plan stays best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rolemesh.placement.auto import plan_of
from rolemesh.placement.compare import Budget, Compared, best_on_pools, price
from rolemesh.placement.lengths import Fixed, Lengths, Like, LogNormal, Measured
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.roles import PlanRequest
from rolemesh.placement.search.plans import Assignment

_SHORTEST = 16.0  # tokens of the shortest mean looked at
_FARTHEST = 16.0  # times longer or shorter, at most
_STEP = 2.0  # factor between means on the way outwards
_HALVINGS = 5  # of the interval in which the plan ceases to be best


@dataclass(frozen=True)
class Allowed(Like):
    """`others`, none longer than `limit` and all of them allowed to be: memory is for the longest."""

    limit: float

    @property
    def maximum(self) -> float:
        return self.limit


def scaled(lengths: Lengths, factor: float) -> Lengths:
    """All lengths times `factor`, stopped where they are now."""
    limit = lengths.maximum
    if isinstance(lengths, LogNormal):
        return replace(lengths, mu=lengths.mu + math.log(factor))
    if isinstance(lengths, Measured):
        return Allowed(Measured(tuple(min(t * factor, limit) for t in lengths.tokens)), limit)
    return Allowed(Fixed(min(lengths.mean * factor, limit)), limit)


@dataclass(frozen=True)
class LengthRange:
    """Means, tokens. The plan is best from `low` to `high`; looked at was from `first` to `last`.

    `below` and `above` say what is faster beyond, or that the plan does not fit; empty where nothing is.
    """

    mean: float
    low: float
    high: float
    first: float
    last: float
    below: str
    above: str
    against: tuple[str, ...]
    now: str = ""  # what is faster at the assumed lengths already

    def __str__(self) -> str:
        if self.now:
            return f"at a mean of {_n(self.mean)} response tokens {self.now}"
        others = ", ".join(self.against)
        ends = [f"below, {self.below}"] * bool(self.below) + [f"above, {self.above}"] * bool(self.above)
        return (
            f"the plan stays best from {_n(self.low)} to {_n(self.high)} response tokens on average "
            f"(checked from {_n(self.first)} to {_n(self.last)}, against {others})"
            + "".join(f"; {end}" for end in ends)
        )


def length_range(
    plan: PlacementPlan,
    request: PlanRequest,
    others: Compared,
    *,
    tie: float,
    own_pools: bool = True,
    limit_s: float = 3.0,
) -> LengthRange | None:
    """Price the plan and the other strategies' plans at other mean lengths, outwards from the assumed one.

    Layouts and settings of all stay as they are; with `own_pools` the plan's own pools are also laid out for
    the shortest and the longest lengths looked at. A plan is best that no other beats by more than `tie`.
    After `limit_s` seconds of computing it says what was looked at till then. None without another plan, or
    where the plan does not fit at the assumed lengths.
    """
    load = request.workload
    search = _Search(plan, request, others, tie, Budget(limit_s))
    lengths = load.response_lengths
    if (start := search.verdict(1.0)) is None:
        return None
    against = tuple(search.others)
    if start:
        mean = lengths.mean
        return LengthRange(mean, mean, mean, mean, mean, "", "", against, now=start)
    least = max(1 / _FARTHEST, min(1 / 4, _SHORTEST / lengths.mean))
    most = min(_FARTHEST, max(1.0, 0.98 * lengths.maximum / lengths.mean))
    if own_pools:
        search.add_own_pools({"shortest": least, "longest": most})
    if not search.others:
        return None
    low, first, below = search.outwards(least)
    high, last, above = search.outwards(most)
    return LengthRange(
        lengths.mean,
        scaled(lengths, low).mean,
        scaled(lengths, high).mean,
        scaled(lengths, first).mean,
        scaled(lengths, last).mean,
        below,
        above,
        tuple(search.others),
    )


class _Search:
    def __init__(
        self, plan: PlacementPlan, request: PlanRequest, others: Compared, tie: float, budget: Budget
    ) -> None:
        self.plan, self.request, self.tie, self.budget = plan, request, tie, budget
        mine = frozenset(frozenset(pool.roles) for pool in plan.pools)
        self.others: dict[str, PlacementPlan] = {
            name: plan_of(request, best, name)
            for name, best in others.plans.items()
            if frozenset(frozenset(pool.roles) for pool in best.pools) != mine
        }

    def verdict(self, factor: float) -> str | None:
        """Why the plan is not best at lengths times `factor`; empty where it is, None for no time left."""
        if self.budget.left_s <= 0:
            return None
        load = self.request.workload
        there = replace(load, response_lengths=scaled(load.response_lengths, factor))
        request = replace(self.request, workload=there)
        mine = price(request, self.plan)
        if mine is None:
            return "it does not fit" if self.budget.left_s > 0 else None
        found: dict[str, Assignment] = {}
        for name, other in self.others.items():
            if (best := price(request, other)) is not None:
                found[name] = best
        name = min(found, key=lambda name: found[name].makespan_s, default="")
        if name and found[name].makespan_s < mine.makespan_s / (1 + self.tie):
            return f"{name} is faster: {found[name].makespan_s:.3g} s instead of {mine.makespan_s:.3g} s"
        return ""

    def add_own_pools(self, factors: Mapping[str, float]) -> None:
        """The plan's own pools with the layouts that are best at these factors, as far as a part of the time
        goes.
        """
        mine = Budget(0.6 * self.budget.left_s)
        for name, factor in factors.items():
            load = self.request.workload
            there = replace(load, response_lengths=scaled(load.response_lengths, factor))
            request = replace(self.request, workload=there)
            found = best_on_pools(request, self.plan, limit_s=mine.left_s)
            if found is not None:
                self.others[f"its own pools laid out for the {name}"] = found

    def outwards(self, end: float) -> tuple[float, float, str]:
        """The last factor on the way from 1 to `end` at which the plan is best, how far was looked, and what
        is better beyond.
        """
        n = max(1, math.ceil(abs(math.log(end, _STEP)) - 1e-9))
        good, far, bad, why = 1.0, 1.0, 0.0, ""
        for factor in (end ** (i / n) for i in range(1, n + 1)):
            if (said := self.verdict(factor)) is None:
                break
            far = factor
            if said:
                bad, why = factor, said
                break
            good = factor
        for _ in range(_HALVINGS if bad else 0):
            middle = math.sqrt(good * bad)
            if (said := self.verdict(middle)) is None:
                break
            good, bad, why = (middle, bad, why) if not said else (good, middle, said)
        return good, far, why


def _n(tokens: float) -> str:
    """A count of tokens to two digits."""
    size = 10 ** max(0, math.floor(math.log10(max(tokens, 1.0))) - 1)
    return f"{round(tokens / size) * size:,.0f}"
