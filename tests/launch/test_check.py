"""What `check` finds before anything starts, on real (tiny) checkpoints."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rolemesh.launch import check as check_module
from rolemesh.launch import engine_check
from rolemesh.launch.check import check_recipe
from rolemesh.launch.check_report import CheckReport
from rolemesh.launch.config import parse_recipe
from rolemesh.placement.cluster import ClusterSpec
from tests.tiny import char_tokenizer, tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = """
run: {device: cpu}
data: {train_files: [train.jsonl], max_prompt_tokens: 16}
algorithm: {name: ppo, kl: {in: reward}}
batch: {prompts: 8, samples_per_prompt: 2, mini_batch_samples: 6, micro_batch_tokens: 128}
lengths: {max_response_tokens: 16, expect: {mean: 8, p95: 16}}
actor: {path: actor, layout: {tp: 2}}
critic: {path: scorer, layout: {dp: 2}}
reward: scorer
placement: split
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("check")
    tiny_checkpoint(root / "actor")
    tiny_checkpoint(root / "wide", heads=2, kv_heads=2)  # heads of 32, that vLLM takes on a CPU
    tiny_checkpoint(root / "scorer", head="score")
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(20)]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n\n")
    (root / "reward.py").write_text("raise SystemExit\ndef compute_score(*args):\n    return 0.0\n")
    return root


def check(folder: Path, *overrides: str, text: str = RECIPE) -> CheckReport:
    return check_recipe(parse_recipe(text, folder, overrides))


def problem_of(folder: Path, *overrides: str, text: str = RECIPE) -> str:
    report = check(folder, *overrides, text=text)
    assert len(report.problems) == 1, report.text()
    return report.problems[0]


def test_a_recipe_that_can_run_has_no_problems_and_shows_its_plan_and_arithmetic(folder):
    report = check(folder)
    assert report.problems == []
    assert report.text().splitlines()[-1] == "ok"
    for line in (
        "data: 20 prompts / 8 per step = 3 steps per epoch (the last has 4 prompts); 3 steps in all",
        "pool actor_side: 2 devices (node-0: 2)",
        "  actor: tp=2",
        "  rollout: dp=2",
        "  critic: dp=2",
        "batch: 8 prompts x 2 = 16 samples per step",
        "mini-batches: 2 of 6 and 1 of 4 samples; x 1 epochs = 3 updates per step",
    ):
        assert line in report.lines


def test_staleness_that_overlaps_nothing_gets_a_note(folder):
    together = check(folder, "schedule.staleness=1")
    assert together.problems == []
    (note,) = [note for note in together.notes if "staleness" in note]
    assert "schedule.staleness is 1, but rollout and actor take turns on pool actor_side" in note
    assert not [
        n for n in check(folder, "schedule.staleness=1", "placement=standalone").notes if "stale" in n
    ]
    assert not [n for n in check(folder).notes if "staleness" in n]
    lines = check(folder, "schedule.staleness=1", "batch.mini_batch_samples=null").lines
    assert any("algorithm.rollout_correction (weights: token) is for" in line for line in lines)


def test_micro_batches_per_rank_are_counted_at_full_and_at_expected_lengths(folder):
    actor = next(line for line in check(folder).lines if line.startswith("actor: dp 1"))
    # 6 samples of 16 + 16 tokens: 4 fit into 128 tokens. Expected: 6 * (16 + 8) / 128.
    assert "6 samples per rank and mini-batch, at most 2 micro-batches of 128 tokens (2 at" in actor
    longer = check(folder, "lengths.max_response_tokens=100", "lengths.expect.p95=20").lines
    # One sample of 116 tokens fits; 6 * (16 + 8) / 128 = 1.1, 6 * (16 + 20) / 128 = 1.7, both rounded up.
    assert "at most 6 micro-batches of 128 tokens (2 at the expected mean, 2 if all" in "\n".join(longer)
    critic = next(line for line in check(folder).lines if line.startswith("critic: dp 2"))
    assert "3 samples per rank and mini-batch, at most 1 micro-batches" in critic


def test_one_update_per_batch_is_said_to_be_on_policy(folder):
    lines = check(folder, "batch.mini_batch_samples=16").lines
    assert any("on-policy, the ratio is 1 by design" in line for line in lines)
    for several in (["batch.mini_batch_samples=8"], ["batch.mini_batch_samples=16", "batch.epochs=2"]):
        assert not any("on-policy" in line for line in check(folder, *several).lines)


def test_cpu_slots_are_the_fewest_with_which_the_recipe_can_be_placed(folder):
    assert check(folder).plan.n_devices == 4
    assert check(folder, "placement=colocate").plan.n_devices == 2
    (problem,) = check(folder, "placement=colocate", "actor.layout.pp=2").problems
    assert "role 'critic' on pool 'all'" in problem
    assert "2 ranks, the pool has 4; dp=4 would use them all" in problem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_files=[/none/train.jsonl]", "data.train_files: no file /none/train.jsonl"),
        ("data.prompt_key=question", "data.prompt_key is question, but"),
        ("actor.layout.tp=3", "tp=3 does not divide the 4 attention heads"),
        ("lengths.max_response_tokens=500", "but the model ends at 512 positions"),
        ("rollout.max_params=1000", "vLLM"),
        ("cluster.per_node=1", "a single device cannot be split: use colocate"),
        ("actor.layout.vpp=2", "vpp=2 interleaves pipeline stages: it needs pp > 1"),
        ("cluster.device=h100-80", "run.device is cpu, but cluster.device is h100-80"),
    ],
)
def test_what_does_not_fit_is_told_with_its_numbers(folder, override: str, message: str):
    assert any(message in problem for problem in check(folder, override).problems)


def test_a_hub_name_that_is_no_folder_is_answered_with_the_download(folder):
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir" in problem_of(
        folder, "ref.path=Qwen/Qwen2.5-0.5B", text=RECIPE.replace("split", "colocate")
    )


def test_a_language_model_is_no_reward_model_and_a_critic_only_with_leave(folder):
    actor = folder / "actor"
    assert "its scores would be random" in problem_of(folder, f"reward.path={actor}")
    assert "set critic.new_head" in problem_of(folder, f"critic.path={actor}")
    assert check(folder, f"critic.path={actor}", "critic.new_head=true").problems == []
    assert "a classifier with 1 labels" in problem_of(folder, f"ref.path={folder / 'scorer'}")


def test_a_reward_model_with_two_labels_is_refused(folder, tmp_path):
    config = json.loads((folder / "scorer/config.json").read_text())
    for file in (folder / "scorer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config["id2label"] = {"0": "bad", "1": "good"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "reward.path has 2 labels, but a scalar head has 1" in problem_of(
        folder, f"reward.path={tmp_path}"
    )


def test_a_tokenizer_that_is_not_the_actors_is_explained(folder, tmp_path):
    tiny_checkpoint(tmp_path / "other", head="score")
    char_tokenizer(100).save_pretrained(tmp_path / "other")
    message = problem_of(folder, f"reward.path={tmp_path / 'other'}")
    assert message.startswith("reward: its tokenizer isn't the actor's")
    tiny_checkpoint(tmp_path / "small", head="score", vocab=64)
    message = problem_of(folder, f"critic.path={tmp_path / 'small'}")
    assert "has 104 tokens, but the model of critic has 64 embeddings" in message


def test_quantized_weights_are_refused(folder, tmp_path):
    path = tiny_checkpoint(tmp_path / "fp8")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    said = check(folder, f"actor.path={path}", f"ref.path={path}").problems
    assert said[0] == (
        f"actor.path: {path} holds fp8 weights; training and scoring need them in bfloat16 or float32: take "
        "a folder of the model in such a type, or convert it with its publisher's script"
    )
    assert said[1].startswith(f"ref.path: {path} holds fp8 weights")


def test_missing_weight_files_are_counted(folder, tmp_path):
    tiny_checkpoint(tmp_path, max_shard_size="50KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    assert "of its" in problem_of(folder, f"actor.path={tmp_path}", f"ref.path={folder / 'actor'}")


def test_a_reward_function_is_found_without_running_its_file(folder):
    text = RECIPE[: RECIPE.index("critic:")].replace("{name: ppo, kl: {in: reward}}", "grpo")
    assert check(folder, text=text + "reward: reward.py:compute_score").problems == []
    assert "has no function score (it has compute_score)" in problem_of(
        folder, text=text + "reward: reward.py:score"
    )
    assert "reward.path: no file" in problem_of(folder, text=text + "reward: rewards.py:score")


def test_parquet_prompts_are_counted_without_reading_them(folder, tmp_path):
    table = pyarrow.table({"prompt": [f"{i}" for i in range(33)]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    line = check(folder, f"data.train_files={tmp_path / 'train.parquet'}").lines[0]
    assert (
        line == "data: 33 prompts / 8 per step = 5 steps per epoch (the last has 1 prompts); 5 steps in all"
    )


def test_all_problems_are_told_at_once(folder):
    report = check(
        folder, "actor.path=/none", "data.val_files=[/none.jsonl]", "lengths.max_response_tokens=5000"
    )
    assert len(report.problems) >= 3


def test_nodes_that_stay_unused_are_named(folder):
    overrides = ["cluster.nodes=3", "cluster.per_node=1", "actor.layout.tp=1", "critic.layout.dp=1"]
    report = check_recipe(parse_recipe(RECIPE, folder, overrides), offline=True)
    assert "node node-2: 1 of its devices stay unused" in report.notes
    assert "a run has this machine alone: give the address of a Ray cluster" in problem_of(folder, *overrides)


def test_asking_for_gpus_that_are_not_there_is_a_problem_unless_offline(folder):
    import torch

    recipe = parse_recipe(RECIPE, folder, ["run.device=cuda", "cluster.per_node=64"])
    assert f"64 GPUs are wanted, torch sees {torch.cuda.device_count()}" in check_recipe(recipe).problems[0]
    recipe = parse_recipe(
        RECIPE, folder, ["run.device=auto", "cluster.device=h100-80", "cluster.per_node=64"]
    )
    assert "64 GPUs are wanted" in check_recipe(recipe).problems[0]
    recipe = parse_recipe(RECIPE, folder, ["run.device=cuda", "cluster.per_node=4"])
    assert check_recipe(recipe, offline=True).problems == []


def test_choosing_among_nodes_needs_a_cluster_to_choose_from(folder):
    text = RECIPE.replace(
        "placement: split",
        "placement: {pools: {a: {roles: [actor, rollout, ref], devices: 2, where: {labels: {kind: big}}}, "
        "b: {roles: [critic, reward], devices: 2}}}",
    )
    assert "set run.address" in problem_of(folder, text=text)
    assert check_recipe(parse_recipe(text, folder), offline=True).problems == []


def test_a_decay_that_would_never_begin_is_a_problem(folder):
    overrides = ["actor.optim.decay=cosine", "run.steps=2"]  # 3 updates each
    assert check(folder, *overrides, "actor.optim.warmup_steps=5").problems == []
    assert "actor.optim.warmup_steps is 6, but the run has 6 updates: the cosine decay would" in problem_of(
        folder, *overrides, "actor.optim.warmup_steps=6"
    )


def test_a_live_cluster_of_another_device_kind_is_refused(folder, monkeypatch):
    monkeypatch.setattr(check_module, "live_cluster", lambda address, tell: ClusterSpec.uniform(2, 4))
    text = RECIPE.replace("device: cpu", "device: cpu, address: 10.0.0.1:6379")
    assert "run.device is cpu, but the cluster at 10.0.0.1:6379 has cuda devices" in problem_of(
        folder, text=text
    )
    report = check(
        folder, "run.device=cuda", "cluster.nodes=3", "cluster.per_node=4", "critic.layout.dp=4", text=text
    )
    assert report.problems == []
    assert "cluster says 12 devices, the live one has 8" in report.notes


ONE_NODE = [
    path
    for path in sorted(EXAMPLES.glob("*.yaml"))
    if "actor:" in (text := path.read_text()) and not re.search(r"nodes: ([2-9]|\d\d)", text)
]


@pytest.mark.parametrize("path", ONE_NODE, ids=lambda path: path.name)
def test_every_example_of_one_node_passes_the_check_with_models_of_its_form(folder, path: Path, monkeypatch):
    files = {"data.train_files": "train.jsonl", "data.val_files": "train.jsonl"}
    models = {"actor.path": "actor", "critic.path": "scorer", "reward.path": "scorer"}
    text = path.read_text()
    wanted = {**files, **models} if "critic:" in text else {**files, "actor.path": "actor"}
    if "protocol:" in text:  # the reward model is a service
        wanted.pop("reward.path")
    if "engine: vllm" in text:
        wanted["actor.path"] = "wide"
        monkeypatch.setattr(engine_check, "find_spec", lambda package: True)
    if "router_loss:" in text:
        wanted["actor.path"] = "experts"
        tiny_checkpoint(folder / "experts", "mixtral")
    overrides = [f"{key}={folder / name}" for key, name in wanted.items()]
    report = check_recipe(parse_recipe(text, path.parent, overrides))
    assert [row for row in report.rows if row.state == "problem" and row.area != "endpoints"] == []
    assert not any("unused" in note for note in report.notes)
