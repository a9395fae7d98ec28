"""`rolemesh train --smoke`: two steps at full size with random weights, and what memory they took.

The run has the recipe's models, layouts and batches, the longest prompts of its data, and responses that are
all as long as allowed: what runs out of memory in some later step does so here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolemesh.launch.report import MEMORY_FILE
from rolemesh.launch.schema import Recipe
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan

STEPS = 2  # the first one makes the optimizer's state
SUFFIX = "-smoke"  # of the run folder, so that the real run's is left alone
_SET = (
    "run.dir", "run.steps", "run.save_every", "run.loggers", "run.recoveries", "data.val_files",
    "data.shuffle", "batch.critic_warmup", "algorithm.overlong", "algorithm.dynamic_sampling",
    "actor.optim.warmup_steps", "critic.optim.warmup_steps", "rollout.partial", "ref.expect_initial_kl",
)  # fmt: skip


def smoke_recipe(recipe: Recipe) -> Recipe:
    """The recipe for two such steps; placement and batch are as they were.

    Off are what keeps steps from being whole or alike: checkpoints, validation, warm-ups, the refilling of
    batches, partial rollouts, recoveries, and loggers that send.
    """
    run, data, algorithm = recipe.run, recipe.data, recipe.algorithm
    critic_optim = replace(recipe.critic.optim, warmup_steps=0)
    return replace(
        recipe,
        smoke=True,
        run=replace(
            run,
            dir=run.dir + SUFFIX,
            steps=STEPS,
            save_every=0,
            validate_every=0,
            keep_last=None,
            keep_best=0,
            resume=None,
            recoveries=0,
            elastic=False,
            loggers=("console", "jsonl"),
        ),
        data=replace(data, val_files=(), val_prompts=None, shuffle=False, weights={}),
        batch=replace(recipe.batch, critic_warmup=0),
        algorithm=replace(
            algorithm,
            overlong=replace(algorithm.overlong, leave_out=False),
            dynamic_sampling=replace(algorithm.dynamic_sampling, on=False),
        ),
        actor=replace(recipe.actor, optim=replace(recipe.actor.optim, warmup_steps=0)),
        critic=replace(recipe.critic, optim=critic_optim),
        rollout=replace(recipe.rollout, partial=False),
        ref=replace(recipe.ref, expect_initial_kl=None),
        given=recipe.given | set(_SET),
    )


@dataclass(frozen=True)
class PoolMemory:
    """Bytes on the devices of one pool: planned for its fullest rank, allowed, and measured on each rank.

    `base` of the measured ones were there before the first model: on a CPU the libraries, which plans leave
    out. What is not known is None.
    """

    pool: str
    planned: float | None
    limit: float | None
    measured: tuple[float, ...]
    base: tuple[float, ...] = ()
    what: str = ""

    @property
    def own(self) -> tuple[float, ...]:
        """Measured on each rank, without what was there before."""
        base = self.base or (0.0,) * len(self.measured)
        return tuple(measured - before for measured, before in zip(self.measured, base, strict=True))

    @property
    def over(self) -> tuple[int, ...]:
        """Ranks that have held more than their device has."""
        return () if self.limit is None else tuple(r for r, m in enumerate(self.measured) if m > self.limit)

    @property
    def worst(self) -> float | None:
        """The models' measured over planned bytes, of the fullest rank."""
        return max(self.own) / self.planned if self.planned and self.measured else None

    def lines(self) -> list[str]:
        """A row for each rank, and what they come to."""
        rows = [f"  {'rank':<6}{'planned':>12}{'measured':>12}{'ratio':>8}{'in all':>12}{'limit':>12}"]
        for rank, (own, whole) in enumerate(zip(self.own, self.measured, strict=True)):
            ratio = f"{own / self.planned:.2f}" if self.planned else "-"
            row = f"  {rank:<6}{_gib(self.planned):>12}{_gib(own):>12}{ratio:>8}"
            row += f"{_gib(whole):>12}{_gib(self.limit):>12}"
            rows.append(row + "  OVER ITS DEVICE'S LIMIT" * (rank in self.over))
        worst = "planned memory is not known" if self.worst is None else f"worst ratio {self.worst:.2f}"
        return [f"pool {self.pool}: {worst}{f' ({self.what})' if self.what else ''}", *rows]


def smoke_memory(folder: Path) -> list[PoolMemory]:
    """Planned and measured memory of the pools of the run in `folder`, which has ended."""
    plan = PlacementPlan.from_yaml((folder / "plan.yaml").read_text(encoding="utf-8"))
    measured: dict[str, Any] = json.loads((folder / MEMORY_FILE).read_text(encoding="utf-8"))
    told, found = plan.prediction, []
    for pool in plan.pools:
        mine = measured.get(pool.name, {})
        limits = [told.limit.get(pool.name), mine.get("device_bytes")]
        found.append(
            PoolMemory(
                pool.name,
                told.peak.get(pool.name),
                min((limit for limit in limits if limit), default=None),
                tuple(mine.get("peak_bytes", ())),
                tuple(mine.get("base_bytes", ())),
                mine.get("what", ""),
            )
        )
    return found


def smoke_lines(pools: list[PoolMemory]) -> list[str]:
    """The table, and what it comes to."""
    lines = [
        "peak memory of each rank over two steps; planned is that of a pool's fullest rank",
        *(line for pool in pools for line in pool.lines()),
    ]
    over = [f"{pool.pool} rank {rank}" for pool in pools for rank in pool.over]
    if over:
        lines.append(f"too much for their devices: {', '.join(over)}")
        lines.append(
            "give their roles more devices, tp or pp, recompute, offload, or fewer batch.micro_batch_tokens"
        )
    known = [pool.worst for pool in pools if pool.worst is not None]
    if known and not over:
        lines.append(f"every rank is within its device; worst ratio of all pools {max(known):.2f}")
    return lines


def _gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / GIB:.3g} GiB"
