"""Emitted flags, imported again: the same layouts, pools and batch arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.emit_command import emitted
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.plan import plan_on
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.importers import import_config
from rolemesh.placement.plan import PlacementPlan

BASE = """
run: {save_every: 20}
cluster: {nodes: 4, device: h100-80, per_node: 8}
data: {train_files: [train.parquet], max_prompt_tokens: 1024}
algorithm: {name: NAME, kl: {in: reward, coef: 0.002}}
batch: {prompts: 512, samples_per_prompt: 4, mini_batch_samples: 256, epochs: 2, micro_batch_tokens: 8192}
lengths: {max_response_tokens: 2048}
actor: {path: /m/sft, optim: {lr: 2.0e-6, warmup_steps: 5}, layout: {tp: 4}}
rollout: {engine: vllm, layout: {tp: 2}, temperature: 0.7}
ref: {layout: {tp: 4}}
reward: {kind: model, path: /m/rm, layout: {tp: 4}}
"""
CRITIC = "critic: {path: /m/rm, layout: {tp: 4}}\n"
OPENRLHF_POOLS = [
    "placement.pools.a={roles: [actor, ref], nodes: 1, per_node: 8}",
    "placement.pools.c={roles: [critic, reward], nodes: 2, per_node: 8}",
    "placement.pools.r={roles: [rollout], nodes: 1, per_node: 8}",
]
VERL_POOLS = [
    "placement.pools.all={roles: [actor, rollout, critic, ref], nodes: 3, per_node: 8}",
    "placement.pools.rm={roles: [reward], nodes: 1, per_node: 8}",
    "actor.layout.tp=8",
    "actor.layout.pp=3",
]


def planned(name: str, *overrides: str) -> tuple[Recipe, PlacementPlan]:
    text = BASE.replace("NAME", name) + (CRITIC if name == "ppo" else "")
    recipe = parse_recipe(text, Path("/"), overrides)
    cluster = ClusterSpec.uniform(4, 8, device_type="h100-80")
    return recipe, plan_on(recipe, cluster, {}, runnable=False)


@pytest.mark.parametrize(
    ("system", "name", "overrides"),
    [
        ("verl", "ppo", ()),
        ("verl", "ppo", ("actor.layout.pp=2", "actor.layout.sequence_parallel=true", "critic.layout.tp=8")),
        ("verl", "ppo", VERL_POOLS),
        ("verl", "grpo", ("algorithm.kl.in=loss",)),
        ("verl", "dapo", ("algorithm.kl.in=none", "algorithm.kl.coef=null", "actor.recompute=full")),
        ("verl", "gspo", ()),
        ("verl", "rloo", ()),
        ("verl", "remax", ()),
        ("openrlhf", "ppo", ()),
        ("openrlhf", "ppo", OPENRLHF_POOLS),
        ("openrlhf", "grpo", ("actor.recompute=full",)),
        ("openrlhf", "reinforce_plus_plus", ()),
        ("openrlhf", "rloo", ()),
    ],
)
def test_flags_that_are_imported_again_give_the_same_plan(system, name, overrides):
    if name == "dapo":
        overrides = [o for o in overrides if "coef" not in o]
    recipe, plan = planned(name, *overrides) if name != "dapo" else planned_without_kl(*overrides)
    found = import_config(system, emitted(system, recipe, plan))
    again = parse_recipe(found.to_yaml(), Path("/"))
    assert again.algorithm.name == name
    assert again.roles == recipe.roles
    assert [i for i in found.ignored if not i.harmless] == []
    cluster = ClusterSpec.uniform(4, 8, device_type="h100-80")
    copy = plan_on(again, cluster, {}, runnable=False)
    assert dict(copy.layouts) == {role: plan.layout_of(role) for role in copy.roles}
    assert {frozenset(p.roles): p.process_on_nodes for p in copy.pools} == {
        frozenset(p.roles): p.process_on_nodes for p in plan.pools
    }
    assert replace(again.batch, micro_batch_tokens=1) == replace(recipe.batch, micro_batch_tokens=1)
    assert again.actor.micro_batch_tokens == recipe.batch.micro_batch_tokens
    assert again.actor.recompute == recipe.actor.recompute
    assert again.algorithm.kl == recipe.algorithm.kl
    assert again.lengths == recipe.lengths


def test_what_waits_in_host_memory_is_emitted_or_said():
    waiting = ("actor.offload=true", "ref.offload=true")
    script = emitted("verl", *planned("ppo", *waiting))
    for name in (
        "actor.megatron.optimizer_offload",
        "actor.megatron.param_offload",
        "ref.megatron.param_offload",
    ):
        assert f"actor_rollout_ref.{name}=True" in script
    assert "critic.megatron.param_offload" not in script
    assert "# left out: offload of actor, ref: " in emitted("openrlhf", *planned("ppo", *waiting))
    assert "offload" not in emitted("verl", *planned("ppo")) + emitted("openrlhf", *planned("ppo"))


def planned_without_kl(*overrides: str) -> tuple[Recipe, PlacementPlan]:
    text = BASE.replace("NAME", "dapo").replace(", kl: {in: reward, coef: 0.002}", "")
    lines = [line for line in text.splitlines() if not line.startswith("ref:")]
    recipe = parse_recipe("\n".join(lines), Path("/"), [o for o in overrides if "kl" not in o])
    return recipe, plan_on(recipe, ClusterSpec.uniform(4, 8, device_type="h100-80"), {}, runnable=False)


@pytest.mark.parametrize(
    ("system", "overrides", "problem"),
    [
        ("verl", ["placement=split"], "holds critic, reward apart from the actor"),
        ("verl", ["batch.mini_batch_samples=255"], "255, no multiple of 4 samples per"),
        ("openrlhf", ["actor.layout.pp=2"], "actor is .*pp=2.*: OpenRLHF has no pipeline"),
        ("openrlhf", ["actor.layout.tp=8"], "cuts all models alike.*actor tp=8 cp=1, critic tp=4"),
        ("openrlhf", ["placement=split"], "puts all roles together, or actor with ref"),
        ("trl", [], "no emitter for 'trl'"),
    ],
)
def test_what_another_system_cannot_do_is_said(system, overrides, problem):
    with pytest.raises(RecipeError, match=problem):
        emitted(system, *planned("ppo", *overrides))
