"""PPO written out by hand: actor side and critic side on halves of the devices, their updates in parallel.

`rolemesh train` does the same from `placement: split`. Here the placement, the workers and the step are
yours to change: pools and mapping in `pools`, the two updates in `SplitActor` and `SplitCritic`, the
algorithm in `step`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np
import torch
from transformers import AutoTokenizer

from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePoolManager
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.roles import Role
from rolemesh.engine.workers.actor import ActorWorker
from rolemesh.engine.workers.critic import CriticWorker
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.reward import RewardWorker
from rolemesh.engine.workers.rollout import RolloutWorker
from rolemesh.launch.assemble import advantage_spec, policy_loss, role_spec, rollout_spec, value_loss
from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import load_recipe
from rolemesh.launch.schema import Recipe
from rolemesh.launch.train import load_prompts
from rolemesh.placement.layout import Layout


class SplitActor(ActorWorker):
    """The actor, whose update returns at once."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        return super().update_actor(data)


class SplitCritic(CriticWorker):
    """The critic, whose update returns at once."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        return super().update_critic(data)


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
        Role.Actor: (
            "actor",
            RayClassWithInitArgs(SplitActor, role_spec(recipe, "actor", steps), policy_loss(recipe)),
        ),
        Role.Rollout: ("rollout", RayClassWithInitArgs(RolloutWorker, rollout_spec(recipe))),
        Role.RefPolicy: ("ref", RayClassWithInitArgs(RefWorker, role_spec(recipe, "ref", steps))),
        Role.Critic: (
            "critic",
            RayClassWithInitArgs(SplitCritic, role_spec(recipe, "critic", steps), value_loss(recipe)),
        ),
        Role.RewardModel: ("reward", RayClassWithInitArgs(RewardWorker, role_spec(recipe, "reward", steps))),
    }
    groups = {}
    for role, (name, worker) in workers.items():
        pool = manager.get_resource_pool(role)
        layout = Layout.fill(getattr(recipe, name).layout.pins, pool.world_size)
        groups[role] = RayWorkerGroup(pool, worker, layout=layout, role=name, timeout_s=recipe.run.timeout_s)
    for group in groups.values():
        group.init_model()
    return groups


def step(recipe: Recipe, wg: Mapping[Role, RayWorkerGroup], prompts: DataProto) -> dict[str, float]:
    """One step of PPO. Calls with `blocking=False` give handles, and a handle may be passed on at once."""
    actor, critic = wg[Role.Actor], wg[Role.Critic]
    batch = wg[Role.Rollout].generate_sequences(prompts, blocking=False)

    values = critic.compute_values(batch, blocking=False)
    scores = wg[Role.RewardModel].compute_rm_score(batch, blocking=False)
    old_log_probs = actor.compute_log_prob(batch, blocking=False)
    ref_log_prob = wg[Role.RefPolicy].compute_ref_log_prob(batch, blocking=False)
    batch = batch.union(old_log_probs).union(ref_log_prob).union(values).union(scores)

    coef = recipe.algorithm.kl.coef
    advantages = critic.compute_advantage(batch, advantage_spec(recipe), kl_coef=coef, blocking=False)
    batch = batch.union(advantages)

    critic_output = critic.update_critic(batch)
    actor_output = actor.update_actor(batch)
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
    on_cpu = "cpu" in (recipe.run.device, recipe.cluster.device)
    per_node = recipe.cluster.per_node or 8
    manager = pools(per_node, recipe.cluster.nodes, "cpu" if on_cpu else "cuda")
    report = check_recipe(recipe, offline=args.dry_run)
    print(f"resource_pool_spec: {manager.resource_pool_spec}")
    print("mapping:", {role.name: pool for role, pool in manager.mapping.items()})
    print(report.text())
    if args.dry_run or report.problems:
        raise SystemExit(2 if report.problems else 0)

    prompts, _ = load_prompts(recipe, AutoTokenizer.from_pretrained(recipe.actor.path))
    loader = PromptLoader(prompts, recipe.batch.prompts, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    steps = recipe.run.steps or len(loader) * recipe.run.epochs
    with local_cluster(per_node if on_cpu else 0):
        try:
            manager.create_resource_pool()
            wg = worker_groups(recipe, manager, steps)
            wg[Role.Rollout].load_weights(wg[Role.Actor].export_weights(blocking=False))
            done = 0
            while done < steps:
                for batch in loader:
                    batch.batch["row_ids"] = torch.arange(len(batch)) + (done << 32)
                    metrics = step(recipe, wg, batch)
                    done += 1
                    print(
                        f"step {done}/{steps}",
                        {k: round(v, 4) for k, v in sorted(metrics.items())},
                        flush=True,
                    )
                    if done == steps:
                        break
        finally:
            manager.shutdown()


if __name__ == "__main__":
    main()
