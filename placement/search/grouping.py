"""Which roles share a pool: all ways there are, and those that a strategy or a pin admits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rolemesh.placement.search.pins import Pin

Grouping = tuple[tuple[str, ...], ...]  # roles of each pool
STRATEGIES = ("colocate", "split", "standalone")


def groupings(roles: Sequence[str]) -> Iterator[Grouping]:
    """All set partitions; roles keep their order."""
    if not roles:
        yield ()
        return
    *rest, last = roles
    for smaller in groupings(rest):
        for k, pool in enumerate(smaller):
            yield (*smaller[:k], (*pool, last), *smaller[k + 1 :])
        yield (*smaller, (last,))


def strategy_grouping(strategy: str, roles: Sequence[str]) -> Grouping:
    """Who shares a pool under a strategy; `split` with all roles on one side is one pool."""
    if strategy == "colocate":
        return (tuple(roles),)
    if strategy == "standalone":
        return tuple((role,) for role in roles)
    if strategy == "split":
        second = ("critic", "reward") if "critic" in roles else ("ref", "reward")
        sides = [tuple(r for r in roles if r not in second), tuple(r for r in roles if r in second)]
        return tuple(side for side in sides if side)
    raise ValueError(f"no strategy {strategy!r} to search (auto, {', '.join(STRATEGIES)})")


def allowed_groupings(roles: Sequence[str], pins: Sequence[Pin], strategy: str = "auto") -> list[Grouping]:
    """Groupings that the strategy has (`auto`: all) and the must-pins let be."""
    named = groupings(roles) if strategy == "auto" else [strategy_grouping(strategy, roles)]
    musts = [pin for pin in pins if pin.about_pools and pin.strength == "must"]
    return [pools for pools in named if pools and all(pin.holds_for_pools(pools) for pin in musts)]
