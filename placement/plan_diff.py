"""Two plans side by side, only where they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.plan_values import say_nodes

Row = str | float  # a figure is compared in per cent
ABSENT = "-"


def diff_plans(one: PlacementPlan, other: PlacementPlan, names: tuple[str, str] = ("A", "B")) -> list[str]:
    """A table of what differs in pools, layouts, settings, order and predictions; empty when nothing does.

    How long the searches took does not count.
    """
    first, second = _rows(one), _rows(other)
    labels = [*first, *(label for label in second if label not in first)]
    differ = [
        (label, _say(first.get(label)), _say(second.get(label)), _change(first.get(label), second.get(label)))
        for label in labels
        if first.get(label) != second.get(label)
    ]
    if not differ:
        return []
    table = [("", *names, ""), *differ]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    return [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])).rstrip()
        for row in table
    ]


def _rows(plan: PlacementPlan) -> dict[str, Row]:
    """Everything that tells plans apart, by label."""
    rows: dict[str, Row] = {"strategy": plan.strategy, "devices": float(plan.n_devices)}
    for pool in plan.pools:
        kind = plan.device_types.get(pool.name, pool.device_kind)
        what = f"pool {pool.name}"
        rows[what] = f"{_say_counts(pool.process_on_nodes)} {kind}"
        rows[f"{what}: roles"] = ", ".join(pool.roles)
        rows[f"{what}: cpus_per_process"] = pool.cpus_per_process
        for key, value in vars(pool.where).items():
            if value:
                rows[f"{what}: where {key}"] = str(value)
        if pool.name in plan.nodes:
            rows[f"{what}: nodes"] = say_nodes(plan.nodes[pool.name])
        if pool.name in plan.order:
            rows[f"{what}: order"] = ", ".join(plan.order[pool.name])
    rows |= {f"layout {role}": str(layout) for role, layout in plan.layouts.items()}
    for role, settings in plan.settings.items():
        rows |= {
            f"settings {role}: {name}": str(value)
            for name, value in vars(settings).items()
            if value is not None
        }
    rows |= {f"idle on {node}": float(count) for node, count in plan.idle.items()}
    return rows | _predicted(plan)


def _predicted(plan: PlacementPlan) -> dict[str, Row]:
    told = plan.prediction
    rows: dict[str, Row] = {} if told.step_s is None else {"step, s": told.step_s}
    rows |= {f"{name}, s": seconds for name, seconds in told.operations_s.items()}
    for role, items in told.memory.items():
        rows[f"memory {role}, GiB"] = _gib(sum(items.values()))
        rows |= {f"memory {role}: {item}, GiB": _gib(amount) for item, amount in items.items()}
    rows |= {f"host memory {role}, GiB": _gib(amount) for role, amount in told.host.items()}
    rows |= {f"peak {pool}, GiB": _gib(amount) for pool, amount in told.peak.items()}
    rows |= {f"limit {pool}, GiB": _gib(amount) for pool, amount in told.limit.items()}
    if plan.proof is not None:
        rows |= {"proof: bound, s": plan.proof.bound_s, "proof: gap": plan.proof.gap}
        rows |= {"proof: scope": plan.proof.scope} if plan.proof.scope else {}
    return rows


def _say_counts(counts: Sequence[int]) -> str:
    """`16 x 8`, or `8 + 4` where the nodes differ."""
    runs = [(len(list(run)), count) for count, run in itertools.groupby(counts)]
    return " + ".join(f"{n} x {count}" if n > 1 else str(count) for n, count in runs)


def _gib(amount: float) -> float:
    return float(f"{amount / GIB:.5g}")


def _say(value: Row | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.5g}" if isinstance(value, float) else value


def _change(one: Row | None, other: Row | None) -> str:
    if not isinstance(one, float) or not isinstance(other, float) or not one:
        return ""
    return f"{other / one - 1:+.1%}"
