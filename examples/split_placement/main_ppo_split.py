"""PPO written out by hand: actor side and critic side on halves of the devices, their updates in parallel.

`rolemesh train` does the same from `placement: split`, and validates and exports on the way. Here the
placement, the workers and the step are yours to change: pools and mapping in `pools`, the two updates in
`SplitActor` and `SplitCritic`, the algorithm in `step`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.future import DataProtoFuture
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePoolManager
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.roles import Role
from rolemesh.engine.workers.actor import ActorWorker
from rolemesh.engine.workers.critic import CriticWorker
from rolemesh.engine.workers.mini_batches import plan_mini_batches
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.reward import RewardWorker
from rolemesh.engine.workers.rollout import RolloutWorker
from rolemesh.launch.assemble import (
    advantage_spec,
    kl_controller,
    policy_loss,
    role_spec,
    rollout_spec,
    value_loss,
)
from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import load_recipe
from rolemesh.launch.run_folder import open_run_folder
from rolemesh.launch.schema import Recipe
from rolemesh.launch.train import load_prompts
from rolemesh.placement.layout import Layout

Sizes = Sequence[Sequence[int]]  # [dp rank][mini-batch]: rows


class SplitActor(ActorWorker):
    """The actor, whose update returns at once."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_actor(self, data: DataProto, sizes: Sizes | None = None) -> dict[str, float]:
        return super().update_actor(data, sizes)


class SplitCritic(CriticWorker):
    """The critic, whose update returns at once."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_critic(self, data: DataProto, sizes: Sizes | None = None) -> dict[str, float]:
        return super().update_critic(data, sizes)


def pools(devices_per_node: int, nodes: int, device: str) -> ResourcePoolManager:
    """Halves of the nodes where there are several, else halves of the one node."""
    actor_pool, critic_pool = "actor_pool", "critic_pool"
    if nodes == 1:
        half = devices_per_node // 2
        resource_pool_spec = {actor_pool: [half], critic_pool: [devices_per_node - half]}
    else:
        half = nodes // 2
        resource_pool_spec = {
            actor_pool: [devices_per_node] * half,
            critic_pool: [devices_per_node] * (nodes - half),
        }
    mapping = {
        Role.Actor: actor_pool,
        Role.Rollout: actor_pool,
        Role.RefPolicy: actor_pool,
        Role.Critic: critic_pool,
        Role.RewardModel: critic_pool,
    }
    return ResourcePoolManager(resource_pool_spec, mapping, device=device)


def worker_groups(recipe: Recipe, manager: ResourcePoolManager, steps: int) -> dict[Role, RayWorkerGroup]:
    """A worker group for every role, its model loaded."""
    workers = {
        Role.Actor: ("actor", SplitActor, role_spec(recipe, "actor", steps), policy_loss(recipe)),
        Role.Rollout: ("rollout", RolloutWorker, rollout_spec(recipe)),
        Role.RefPolicy: ("ref", RefWorker, role_spec(recipe, "ref", steps)),
        Role.Critic: ("critic", SplitCritic, role_spec(recipe, "critic", steps), value_loss(recipe)),
        Role.RewardModel: ("reward", RewardWorker, role_spec(recipe, "reward", steps)),
    }
    groups = {}
    for role, (name, cls, *args) in workers.items():
        pool = manager.get_resource_pool(role)
        layout = Layout.fill(getattr(recipe, name).layout.pins, pool.world_size)
        worker = RayClassWithInitArgs(cls, *args)
        groups[role] = RayWorkerGroup(pool, worker, layout=layout, role=name, timeout_s=recipe.run.timeout_s)
    for group in groups.values():
        group.init_model()
    return groups


def samples(prompts: DataProto, per_prompt: int, number: int) -> DataProto:
    """A row for each response of step `number`: `uid` is its prompt; `row_ids`, with the seed, its draws."""
    prompts.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(prompts))], dtype=object)
    rows = prompts.repeat(per_prompt)
    rows.batch["row_ids"] = torch.arange(len(rows)) + (number << 32)
    return rows


def mini_batches(recipe: Recipe, batch: DataProtoFuture, group: RayWorkerGroup) -> dict[str, Any]:
    """Which rows each replica takes, and how many of them belong to each optimizer step."""
    plan = plan_mini_batches(batch.ref().tokens, recipe.batch.mini_batch, group.layout.dp)
    return {"rows": plan.rows, "sizes": plan.sizes}


def step(
    recipe: Recipe, wg: Mapping[Role, RayWorkerGroup], rows: DataProto, kl_coef: float
) -> dict[str, float]:
    """One step of PPO. Calls with `blocking=False` give handles, and a handle may be passed on at once."""
    actor, critic = wg[Role.Actor], wg[Role.Critic]
    batch = wg[Role.Rollout].generate_sequences(rows, blocking=False)

    values = critic.compute_values(batch, blocking=False)
    scores = wg[Role.RewardModel].compute_rm_score(batch, blocking=False)
    old_log_probs = actor.compute_log_prob(batch, blocking=False)
    ref_log_prob = wg[Role.RefPolicy].compute_ref_log_prob(batch, blocking=False)
    batch = batch.union(old_log_probs).union(ref_log_prob).union(values).union(scores)

    advantages = critic.compute_advantage(batch, advantage_spec(recipe), kl_coef=kl_coef, blocking=False)
    batch = batch.union(advantages)

    critic_output = critic.update_critic(batch, **mini_batches(recipe, batch, critic))
    actor_output = actor.update_actor(batch, **mini_batches(recipe, batch, actor))
    metrics = {name: float(np.mean(values)) for name, values in advantages.ref().meta_info["metrics"].items()}
    metrics |= critic_output.get()[0]
    metrics |= actor_output.get()[0]

    wg[Role.Rollout].load_weights(actor.export_weights(blocking=False))
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="check recipe and placement, start nothing")
    args = parser.parse_intermixed_args()

    recipe = load_recipe(args.recipe, args.overrides)
    if recipe.batch.critic_warmup:
        parser.error("batch.critic_warmup is not in this example's step: leave it out")
    on_cpu = "cpu" in (recipe.run.device, recipe.cluster.device)
    per_node = recipe.cluster.per_node or 8
    manager = pools(per_node, recipe.cluster.nodes, "cpu" if on_cpu else "cuda")
    report = check_recipe(recipe, offline=args.dry_run)
    print(f"resource_pool_spec: {manager.resource_pool_spec}")
    print("mapping:", {role.name: pool for role, pool in manager.mapping.items()})
    print(report.text())
    if args.dry_run or report.problems:
        raise SystemExit(2 if report.problems else 0)

    open_run_folder(recipe)
    dataset, _ = load_prompts(
        recipe, AutoTokenizer.from_pretrained(recipe.actor.path, trust_remote_code=False)
    )
    loader = PromptLoader(dataset, recipe.batch.prompts, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    steps = len(loader) * recipe.run.epochs if recipe.run.steps is None else recipe.run.steps
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
    kl = kl_controller(recipe)
    with local_cluster(per_node if on_cpu else 0, device_kind="cpu" if on_cpu else "cuda"):
        try:
            manager.create_resource_pool()
            wg = worker_groups(recipe, manager, steps)
            wg[Role.Rollout].load_weights(wg[Role.Actor].export_weights(blocking=False))
            for number, prompts in enumerate(batches, start=1):
                rows = samples(prompts, recipe.batch.samples_per_prompt, number)
                metrics = step(recipe, wg, rows, kl.value)
                kl = kl.update(metrics.get("actor/reward_kl_penalty", 0.0), len(rows))
                shown = {name: round(value, 4) for name, value in sorted(metrics.items())}
                print(f"step {number}/{steps}", shown, flush=True)
            out_dir = str(Path(recipe.run.dir) / "export" / "actor")
            wg[Role.Actor].save_hf(out_dir)
            print(f"actor exported to {out_dir} (a Hugging Face folder)")
        finally:
            manager.shutdown()


if __name__ == "__main__":
    main()
