"""`rolemesh plan`, `plan diff` and `plan --from`, on models that are a config.json each."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rolemesh.launch.check import check_recipe
from rolemesh.launch.cli import _instead, main
from rolemesh.launch.config import load_recipe
from rolemesh.launch.plan import as_planned, not_runnable, plan_on, read_plan_file
from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.plan_values import Prediction
from rolemesh.placement.pools import PlacementError
from tests.tiny import tiny_checkpoint

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
RECIPE = """
cluster: {nodes: 5, device: h100-80, per_node: 8}
data: {train_files: [train.parquet], max_prompt_tokens: 1024}
algorithm: {kl: {in: reward}}
actor: {path: policy, layout: {tp: 8}}
rollout: {engine: vllm, layout: {tp: 2}}
critic: {path: scorer, layout: {tp: 8}}
reward: scorer
placement: standalone
"""
SMALL = """
run: {device: cpu, steps: 1}
data: {train_files: [train.jsonl], max_prompt_tokens: 16}
algorithm: {kl: {in: reward}}
batch: {prompts: 4, mini_batch_samples: 2}
lengths: {max_response_tokens: 16}
actor: policy
critic: scorer
reward: scorer
placement: colocate
"""


def rolemesh(*arguments: object) -> tuple[int, str]:
    """Exit code, and what was printed on stdout and stderr."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A recipe for models of which only config.json is there."""
    for name in ("policy", "scorer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "r.yaml"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that could be trained here."""
    root = tmp_path_factory.mktemp("small")
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "scorer", head="score")
    (root / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+1="}) for i in range(8)))
    (root / "r.yaml").write_text(SMALL)
    return root / "r.yaml"


def test_plan_prints_pools_layouts_totals_and_defaults(large: Path):
    code, said = rolemesh("plan", large)
    assert code == 0, said
    lines = said.splitlines()
    assert lines[0] == "standalone: 5 pools, 40 devices"
    assert "pool rollout: 8 devices of type h100-80 (node-1: 8)" in lines
    assert any(line.startswith("  rollout: tp=2 dp=4; micro-batch") for line in lines)
    assert any(line.startswith("step: ") for line in lines)
    assert "proof" not in said  # of a placement that nobody searched for
    totals = "each role on its own: 40, actor+ref, critic+reward: 24, split: 16, colocate: 8"
    assert f"devices for roles of these sizes: {totals}" in lines
    told = [line for line in lines if line.startswith("default: ")]
    assert told[0].startswith("default: batch: prompts = 256")
    assert re.fullmatch(r"default: \d+ other keys; --defaults lists them", told[-1])
    assert all(line.startswith(("default: batch: ", "default: lengths: ")) for line in told[:-1])
    code, said = rolemesh("plan", large, "--defaults")
    assert any(line.startswith("default: actor.optim: ") for line in said.splitlines())
    assert "other keys" not in said


def test_a_plan_for_another_cluster_from_a_preset_or_a_file(large: Path, tmp_path: Path):
    code, said = rolemesh("plan", large, "placement=colocate", "--cluster", "2 x h200x8")
    assert (code, said.splitlines()[1]) == (0, "pool all: 16 devices of type h200-141 (node-0: 8, node-1: 8)")
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: big, device: h200, devices: 8}]")
    code, said = rolemesh("plan", large, "placement=colocate", "--cluster", tmp_path / "cluster.yaml")
    assert (code, said.splitlines()[1]) == (0, "pool all: 8 devices of type h200-141 (big: 8)")
    code, said = rolemesh("plan", large, "placement=colocate", "--cluster", "1 x a100-40x8")
    assert code == 3
    assert "nothing fits" in said
    assert "GiB" in said
    code, said = rolemesh("plan", large, "--cluster", "nonsense")
    assert code == 2
    assert "--cluster nonsense: neither a file nor a preset" in said


def test_a_model_that_is_not_there_is_a_note_and_a_cut_that_it_cannot_take_an_error(large: Path):
    code, said = rolemesh("plan", large, "ref.path=/nowhere")
    assert code == 0
    assert "note: ref: no /nowhere/config.json, so its layout is not checked against a model" in said
    code, said = rolemesh("plan", large, "cluster.per_node=12", "actor.layout.tp=12", "critic.layout.tp=4")
    assert code == 2
    assert "placement: role 'actor' on pool 'actor': tp=12 does not divide the 32 attention heads" in said


def test_what_workers_do_not_run_yet_is_planned_when_asked_for(large: Path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    config = {**LLAMA_8B, **experts, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 4096}
    (large.parent / "policy" / "config.json").write_text(json.dumps(config))
    code, said = rolemesh("plan", large)
    assert code == 2
    assert "qwen2_moe models can be planned for but not run yet" in said
    assert "(--any-software also plans what is not run yet)" in said
    code, said = rolemesh("plan", large, "--any-software")
    assert code == 0, said


def test_layers_interleave_and_stages_are_uneven_where_the_recipe_says_so(large: Path):
    pins = ["cluster.per_node=16", "actor.layout.pp=2", "actor.layout.vpp=2"]
    code, said = rolemesh("plan", large, *pins, "actor.layout.pp_layers=[7,8,8,9]")
    assert code == 0, said
    assert any(line.startswith("  actor: tp=8 pp=2 vpp=2 pp_layers=7+8+8+9") for line in said.splitlines())
    code, said = rolemesh("plan", large, *pins, "actor.layout.pp_layers=[7,8,8,8]")
    assert code == 2
    assert "pp_layers [7, 8, 8, 8] are 31 layers, the model has 32" in said


def test_a_request_that_does_not_fit_says_what_there_is(large: Path):
    code, said = rolemesh("plan", large, "cluster.nodes=1", "cluster.per_node=4")
    assert code == 3
    assert "standalone gives each of the 5 roles" in said


def test_a_written_plan_is_read_again_and_compared(large: Path, tmp_path: Path):
    one, two = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert rolemesh("plan", large, "--out", one)[0] == 0
    assert rolemesh("plan", large, "actor.layout.tp=4", "--out", two)[0] == 0
    assert PlacementPlan.from_yaml(one.read_text()).layout_of("actor").tp == 8
    assert rolemesh("plan", "diff", one, one) == (0, "no difference\n")
    code, said = rolemesh("plan", "diff", one, two)
    assert code == 1
    assert ["layout", "actor", "tp=8", "tp=4", "dp=2"] in [line.split() for line in said.splitlines()]
    assert any(line.startswith("update_actor, s") and line.endswith("%") for line in said.splitlines())
    code, said = rolemesh("plan", large, f"placement.plan={one}", "placement.strategy=null")
    assert (code, said.splitlines()[0]) == (0, "standalone: 5 pools, 40 devices")
    one.write_text(one.read_text().replace("layouts:", "layots:"))
    code, said = rolemesh("plan", "diff", one, two)
    assert code == 2
    assert "a.yaml: plan has no key 'layots'" in said


def test_auto_plans_with_a_proof_and_keeps_to_pins(large: Path):
    shorter = ["placement=auto", "cluster.nodes=1", "critic.layout.tp=null", "actor.layout.tp=null"]
    code, said = rolemesh("plan", large, *shorter)
    assert code == 0, said
    assert "proof: there is no better plan" in said
    assert "step: " in said
    pins = "placement.pin.must=[actor+critic apart, critic tp=4]"
    code, said = rolemesh("plan", large, *shorter, pins, "--limit-s", 5)
    assert code == 0, said
    assert any(line.startswith("  critic: tp=4") for line in said.splitlines())
    pools = [line for line in said.splitlines() if line.startswith("pool ")]
    assert len(pools) >= 2
    code, said = rolemesh("plan", large, *shorter, "placement.pin.must=actor sideways")
    assert (code, "nothing to pin is called 'sideways'" in said) == (2, True)
    code, said = rolemesh("plan", large, *shorter, "placement.pin.must=[sideways]")
    assert (code, "'sideways' is no pin: write" in said) == (2, True)


def test_help_names_the_three_uses():
    code, said = rolemesh("plan", "--help")
    assert code == 0
    assert "recipe" in said
    assert "diff" in said


def test_another_systems_configuration_becomes_a_recipe_that_plans(tmp_path: Path):
    (tmp_path / "run.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 --ref_num_gpus_per_node 8 "
        "--critic_num_gpus_per_node 8 --reward_num_gpus_per_node 8 --vllm_num_engines 4 "
        "--vllm_tensor_parallel_size 2 --pretrain sft --reward_pretrain rm --zero_stage 3 --bf16"
    )
    out = tmp_path / "recipe.yaml"
    code, said = rolemesh("plan", "--from", "openrlhf", tmp_path / "run.sh", "--out", out)
    assert code == 0, said
    assert "# openrlhf takes 40" in said
    assert (
        "# devices for roles of these sizes: each role on its own: 40, actor+ref, critic+reward: 24," in said
    )
    assert "# ignored: zero_stage = 3: weights are cut by tp and pp here, not over all devices" in said
    assert yaml.safe_load(said)["cluster"] == {"nodes": 5, "per_node": 8}
    recipe = load_recipe(out)
    assert (recipe.rollout.engine, recipe.rollout.layout.tp) == ("vllm", 2)
    code, said = rolemesh("plan", out, "cluster.device=a100-80")
    assert (code, said.splitlines()[0]) == (0, "explicit: 5 pools, 40 devices")


def test_an_importer_that_is_not_there_and_a_configuration_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("trainer: {nnodes: many}")
    code, said = rolemesh("plan", "--from", "trl", tmp_path / "c.yaml")
    assert (code, "there are importers for verl, openrlhf" in said) == (2, True)
    code, said = rolemesh("plan", "--from", "verl", tmp_path / "c.yaml")
    assert (code, "trainer.nnodes must be a whole number, got 'many'" in said) == (2, True)
    assert rolemesh("plan", "--from", "verl", tmp_path / "none.yaml")[0] == 2


def plan_file(small: Path, tmp_path: Path, *edits: tuple[str, str]) -> Path:
    """A plan of the recipe, with edits by hand."""
    path = tmp_path / "plan.yaml"
    code, said = rolemesh("plan", small, "placement=split", "actor.layout.tp=2", "--out", path)
    assert code == 0, said
    plan = read_plan_file(path)
    assert plan.prediction.step_s > 0
    text = replace(plan, settings={}, order={}, prediction=Prediction()).to_yaml()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def recipe_with(small: Path, plan: Path, *overrides: str):
    """The recipe as `train --plan` loads it."""
    return load_recipe(small, [*overrides, *_instead(plan)])


def test_train_takes_a_plan_in_the_place_of_the_recipes_placement(small: Path, tmp_path: Path):
    order = "    order: [values, reward, advantage, update_critic]\n"
    settings = "settings:\n  actor: {micro_batch: 3, recompute: full}\n  rollout: {micro_batch: 2}\n"
    path = plan_file(small, tmp_path, ("layouts:", f"{order}{settings}layouts:"))
    recipe = recipe_with(small, path)
    report = check_recipe(recipe)
    assert report.problems == []
    assert report.plan is not None
    assert report.plan.layout_of("actor").tp == 2
    assert report.plan.order["critic_side"] == ("values", "reward", "advantage", "update_critic")
    planned = as_planned(recipe, report.plan)
    assert (planned.actor.micro_batch_tokens, planned.actor.recompute) == (3 * 32, "full")
    assert planned.rollout.max_batch_tokens == 2 * 32
    assert planned.critic == recipe.critic


OFFLOADED = ("layouts:", "settings:\n  rollout: {offload: true}\nlayouts:")
ORDERED = ("layouts:", "    order: [values]\nlayouts:")
NO_REWARD = (("roles: [critic, reward]", "roles: [critic]"), ("  reward: {tp: 1, dp: 2, pp: 1}\n", ""))


@pytest.mark.parametrize(
    ("edits", "overrides", "problem"),
    [
        ((), ["actor.layout.tp=1"], "actor.layout.tp is 1, the plan .* says 2: leave it out"),
        (NO_REWARD, [], "places actor, rollout, .*critic; the recipe's roles are .*, reward"),
        ((ORDERED,), [], "order and the step 'ppo' differ in"),
        (
            (("actor: {tp: 2,", "actor: {tp: 2, vpp: 9,"),),
            [],
            "'actor' of the plan .*vpp=9 leaves stages",
        ),
        ((OFFLOADED,), [], "the plan offloads rollout, but an engine's memory is the engine's"),
    ],
)
def test_a_plan_that_does_not_go_with_the_recipe_is_refused(small, tmp_path, edits, overrides, problem):
    path = plan_file(small, tmp_path, *edits)
    problems = check_recipe(recipe_with(small, path, *overrides)).problems
    assert any(re.search(problem, said) for said in problems), problems


def test_a_plan_and_a_live_cluster_that_differ_are_both_named(small: Path, tmp_path: Path):
    recipe = recipe_with(small, plan_file(small, tmp_path))
    live = ClusterSpec((NodeSpec("a", 2, 4), NodeSpec("b", 1, 4)), "cpu")
    planned = r"Planned for: actor_side: \[2\] x cpu, critic_side: \[2\] x cpu"
    with pytest.raises(PlacementError, match=rf"(?s){planned}.*3 present.*b: 1 devices"):
        plan_on(recipe, live, {})
    assert plan_on(recipe, ClusterSpec.uniform(1, 6, device_kind="cpu"), {}).idle == {"node-0": 2}


def test_what_the_workers_cannot_do_is_said(small: Path, tmp_path: Path):
    path = plan_file(small, tmp_path)
    settings = "settings:\n  rollout: {offload: true}\n  critic: {recompute: selective, offload: true}\n"
    path.write_text(path.read_text() + settings)
    plan = read_plan_file(path)
    assert list(not_runnable(plan)) == [
        "the plan offloads rollout, but an engine's memory is the engine's: leave it out"
    ]
    planned = as_planned(recipe_with(small, path), plan)
    assert (planned.critic.recompute, planned.critic.offload) == ("selective", True)
