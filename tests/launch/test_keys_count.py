"""No key is an option that does nothing: changing it changes what is checked, placed or started."""

import contextlib
import functools
import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny import tiny_checkpoint
from transformers import AutoTokenizer
from vllm_server import chat_checkpoint

from rolemesh.engine import loggers
from rolemesh.launch import attempts, check, engine_check, recovery, staged, train
from rolemesh.launch.config import parse_recipe, value_at
from rolemesh.launch.fields import Key, RecipeError, declared, section_of, without_none
from rolemesh.launch.schema import Recipe
from rolemesh.placement.cluster import ClusterSpec, NodeSpec

PPO = """
run: {dir: run, steps: 6, device: cpu}
cluster: {per_node: 4}
data: {train_files: [train.jsonl], val_files: [val.jsonl], max_prompt_tokens: 16}
algorithm: {kl: {in: reward, target: 0.1, horizon: 100}}
batch: {prompts: 32, samples_per_prompt: 2, mini_batch_samples: 32, micro_batch_tokens: 128}
lengths: {max_response_tokens: 100, expect: {mean: 20, p95: 40}}
actor: {path: policy, optim: {decay: linear}}
critic: {path: scorer, optim: {decay: linear}}
reward: scorer
"""
GRPO = """
run: {device: cpu}
data: {train_files: train.jsonl, max_prompt_tokens: 16}
algorithm: grpo
batch: {prompts: 4, samples_per_prompt: 2}
lengths: {max_response_tokens: 100}
actor: policy
reward: reward.py:compute_score
"""
SERVICES = """
run: {device: cpu}
data: {train_files: train.jsonl, max_prompt_tokens: 16}
algorithm: {name: grpo, kl: {in: loss}}
batch: {prompts: 4, samples_per_prompt: 2}
lengths: {max_response_tokens: 100}
actor: policy
ref: {kind: remote, endpoints: "http://ref:1"}
reward: {kind: remote, endpoints: "http://rm:1", on_failure: {do: value, value: 0}}
"""
RUBRIC = GRPO.replace(
    "reward: reward.py:compute_score",
    """
reward:
  kind: judge
  model: qwen
  endpoints: http://judge:1
  judge: {form: rubric, criteria: {NAME: clear}}
  on_failure: raise
""",
)
JUDGE = RUBRIC.replace("  model: qwen\n  endpoints: http://judge:1\n", "  path: judge\n  dtype: float32\n")
PAIRWISE = RUBRIC.replace("{form: rubric, criteria: {NAME: clear}}", "{form: pairwise}")
COMPOSITE = GRPO.replace(
    "reward: reward.py:compute_score", "reward: {kind: composite, parts: {NAME: reward.py:compute_score}}"
)
POOLS = """
placement:
  pools:
    NAME: {roles: [actor, rollout, ref], devices: 2}
    other: {roles: [critic, reward], share: 1/2}
"""
ON_RAY = PPO.replace("device: cpu", "address: 10.0.0.1:6379") + POOLS
VLLM = GRPO.replace("actor: policy", "actor: wide") + "rollout: vllm\n"
BASES = (PPO, GRPO, ON_RAY, SERVICES, RUBRIC, JUDGE, PAIRWISE, VLLM)
NAMED = {"placement.pools": ON_RAY, "reward.judge.criteria": RUBRIC, "reward.parts": COMPOSITE}
CHANGES = {
    "run.dir": "elsewhere",
    "run.device": "cuda",
    "run.address": "10.0.0.1:6379",
    "run.temp_dir": "elsewhere",
    "run.best_metric": "val/score",
    "run.stage": "fast_disk",
    "run.env": "{NCCL_DEBUG: INFO}",
    "run.stop_before_walltime": "600",
    "run.walltime": "3600",
    "run.resume": "elsewhere",
    "run.loggers": "[jsonl]",
    "run.name": "mine",
    "run.project": "ours",
    "cluster.device": "h100-80",
    "data.train_files": "val.jsonl",
    "data.val_files": "train.jsonl",
    "data.prompt_key": "text",
    "data.weights": "{train: 2}",
    "algorithm.name": "rloo",
    "algorithm.file": "algo.py",
    "algorithm.estimator": "rloo",
    "algorithm.loss": "cispo",
    "algorithm.rollout_correction.mask": "[0.5, 5.0]",
    "algorithm.rollout_correction.reject": "[0.5, 5.0]",
    "actor.path": "other",
    "actor.optim.min_lr": "1e-7",
    "critic.optim.min_lr": "1e-7",
    "critic.path": "other_scorer",
    "ref.path": "other",
    "reward.path": "other_scorer",
    "reward.endpoints": "http://other:1",
    "reward.token_env": "NO_SUCH_VARIABLE",
    "reward.token_file": "no_such_file",
    "reward.score_key": "score",
    "reward.model": "other",
    "reward.text.tokenizer": "other_scorer",
    "reward.judge.criteria.NAME.text": "other",
    "reward.judge.criteria.NAME.weight": "3",
    "reward.judge.opponents": "4",
    "reward.judge.scale": "[0, 5]",
    "reward.judge.template": "reward.py",
    "reward.judge.system": "other",
    "reward.judge.cache_dir": "cache",
    "reward.parts.NAME.kind": "remote",
    "reward.parts.NAME.weight": "3",
    "ref.endpoints": "http://other:1",
    "ref.token_env": "NO_SUCH_VARIABLE",
    "ref.token_file": "no_such_file",
    "rollout.memory_share": "0.4",
    "rollout.agent": "own.py:Agent",
    **{f"{role}.worker": "own.py:Worker" for role in ("actor", "critic", "ref", "reward", "rollout")},
    "placement.plan": "none.yaml",
    **{f"placement.pin.{strength}": "[actor sideways]" for strength in ("must", "prefer", "avoid")},
    "placement.pools.NAME.roles": "[actor, rollout]",
    "placement.pools.NAME.share": "1/4",
    "placement.pools.NAME.devices": "3",
    "placement.pools.NAME.nodes": "2",
    "placement.pools.NAME.per_node": "2",
    "placement.pools.NAME.where.device": "h100-80",
    "placement.pools.NAME.where.labels": "{kind: big}",
    "placement.pools.NAME.where.resources_per_worker": "{v100: 1}",
    "placement.pools.NAME.where.node_ip": "10.0.0.1",
}
SAVED = ["run.save_every=2", "run.validate_every=2", "run.keep_last=2"]
# Keys that go with another, or take the place of one.
WITH = {
    "reward.parts.NAME.kind": ["reward.parts.NAME.path=null"],
    "reward.text.tokenizer": ["reward.text.template=chat", "reward.text.tokenizer=scorer"],
    "ref.stream": [
        "placement.pools={a: {roles: [actor, rollout, critic, reward], devices: 1}, "
        "b: {roles: [ref], devices: 1}}"
    ],
    "rollout.partial_share": ["rollout.partial=true"],
    **{f"rollout.{name}": ["rollout.agent=own.py:Agent"] for name in ("agent_turns", "agent_timeout_s")},
    "run.keep_last": ["run.save_every=2"],
    "run.env": [
        "run.device=auto",
        "run.address=10.0.0.1:6379",
    ],  # a joined cluster
    "run.walltime": ["run.stop_before_walltime=600"],
    "run.stop_before_walltime": ["run.walltime=7200"],
    "run.requeue": ["run.stop_before_walltime=600", "run.walltime=7200", "run.resume=auto"],
    "run.keep_best": SAVED,
    "run.best_metric": [*SAVED, "run.keep_best=1"],
    **{f"run.{name}": ["run.loggers=[jsonl, wandb]"] for name in ("project", "name", "log_offline")},
    **{f"placement.pin.{strength}": ["placement.strategy=auto"] for strength in ("must", "prefer", "avoid")},
    "algorithm.norm_tokens": ["algorithm.loss_agg=seq-mean-token-sum-norm"],
    "algorithm.overlong.penalty": ["algorithm.overlong.buffer_tokens=10"],
    **{f"{role}.lora.alpha": [f"{role}.lora.rank=8"] for role in ("actor", "critic")},
    **{
        f"algorithm.dynamic_sampling.{name}": ["algorithm.name=grpo", "algorithm.dynamic_sampling.on=true"]
        for name in ("tries", "at_limit", "expect_tries")
    },
    "algorithm.rollout_correction.max_weight": ["algorithm.rollout_correction.weights=token"],
    "algorithm.rollout_correction.reject_by": ["algorithm.rollout_correction.reject=[0.5, 5.0]"],
    "placement.pools.NAME.share": ["placement.pools.NAME.devices=null"],
    "placement.pools.NAME.nodes": ["placement.pools.NAME.devices=null", "placement.pools.NAME.per_node=1"],
    "placement.pools.NAME.per_node": ["placement.pools.NAME.devices=null", "placement.pools.NAME.nodes=1"],
}
LIVE = ClusterSpec((NodeSpec("a", 8, 8, "h100-80", {"kind": "big"}, {"v100": 8.0}, "10.0.0.1"),))
STARTED = (
    "local_cluster", "joined_cluster", "ResourcePool", "ProcessPool", "create_pools", "RayClassWithInitArgs",
    "RayWorkerGroup", "as_completed", "Loggers", "RunLog", "Trainer", "CheckpointStore",
    "Pulse",
)  # fmt: skip


def _choices(key: Key) -> tuple[Any, ...]:
    hint = without_none(key.type)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


KEYS = {
    key.path: key
    for key in declared(Recipe)
    if not section_of(key.type) and len(_choices(key)) != 1  # a single choice cannot be changed
    # What parts have in common with the reward is declared and read once.
    if not key.path.startswith("reward.parts.NAME.") or key.path in CHANGES
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    for seed, (name, head) in enumerate(
        [("policy", "lm"), ("other", "lm"), ("scorer", "score"), ("other_scorer", "score")]
    ):
        tiny_checkpoint(root / name, head=head, seed=seed)
    (root / "judge").mkdir()
    chat_checkpoint(root / "judge")
    tiny_checkpoint(root / "wide", heads=2)  # heads of 32, that vLLM takes on a CPU
    for name, texts in (("train", "abcdef"), ("val", "ghi")):
        rows = [{"prompt": text * 3, "text": text} for text in texts]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "algo.py").write_text("")
    (root / "own.py").write_text("class Agent: ...\nclass Worker: ...\n")
    (root / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    return root


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Iterator[Callable[..., str]]:
    """What a recipe leads to, as text: why it is refused, or what is told and then started.

    Everything that needs Ray is stood in for and only writes down how it was made.
    """
    real = {name: getattr(train, name) for name in ("PromptDataset", "PromptLoader")}

    def local_cluster(slots: int, **_: Any) -> contextlib.AbstractContextManager[ClusterSpec]:
        return contextlib.nullcontext(ClusterSpec.uniform(1, slots, device_kind="cpu"))

    @functools.cache
    def run(text: str, *overrides: str) -> str:
        started = MagicMock(**{f"{name}.side_effect": made for name, made in real.items()})
        started.local_cluster.side_effect = local_cluster
        started.RayWorkerGroup().init_model().timeout_s = 1.0
        started.CheckpointStore().best.return_value = None
        started.joined_cluster.return_value = contextlib.nullcontext(LIVE)
        started.Recoveries.return_value.under_way = False
        for name in (*STARTED, *real):
            patch.setattr(train, name, getattr(started, name))
        for name in ("Checkpoints", "CheckpointStore"):
            patch.setattr(attempts, name, getattr(started, name))
        patch.setattr(recovery, "Recoveries", started.Recoveries)
        try:
            recipe = parse_recipe(text, folder, overrides)
        except RecipeError as error:
            return f"refused: {error}"
        report = check.check_recipe(recipe)
        if not report.problems:
            assert report.plan is not None
            train.run_training(recipe, report.plan)
        calls = re.sub(r"0x[0-9a-f]+|id='\d+'", "", "\n".join(map(str, started.mock_calls)))
        return f"{report.text()}\n{calls}"

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # overrides are relative to the working directory
        patch.setattr(AutoTokenizer, "from_pretrained", functools.cache(AutoTokenizer.from_pretrained))
        patch.setattr(check, "live_cluster", lambda address, tell: LIVE)
        patch.setattr(
            check, "live_rows", lambda *given: None
        )  # this machine's, and services that are not there
        patch.setattr(loggers, "installed", lambda package: True)
        patch.setattr(engine_check, "find_spec", lambda package: True)
        patch.setenv("WANDB_API_KEY", "a-key-for-this-test")
        patch.setenv("SLURM_JOB_END_TIME", "1900000000")
        patch.setattr(staged, "on_each_node", lambda stage, *given, **_: {"a": stage(*given)})
        patch.setattr(check, "read_checkpoint", functools.cache(check.read_checkpoint))
        yield run


@pytest.mark.parametrize("base", [*BASES, COMPOSITE])
def test_the_recipes_of_this_test_run_and_give_the_same_twice(outcome, base: str):
    assert "Trainer(" in outcome(base)
    assert outcome(base) == outcome.__wrapped__(base)


@pytest.mark.full
@pytest.mark.parametrize("path", KEYS)
def test_a_changed_key_changes_what_is_checked_or_started(outcome, path: str):
    named = [base for prefix, base in NAMED.items() if path.startswith(f"{prefix}.NAME")]
    for base in named or BASES:
        partners = WITH.get(path, [])
        override = f"{path}={CHANGES.get(path) or _another(KEYS[path], base)}"
        changed = outcome(base, *partners, override)
        if "would have no effect" not in changed:
            assert changed != outcome(base, *partners)
            return
    pytest.fail(f"{override} has no effect in any of the recipes: {changed}")


def _another(key: Key, base: str) -> Any:
    """A value other than the one the key has in `base`."""
    now = value_at(parse_recipe(base, Path("/")), key.path)
    hint = without_none(key.type)
    if choices := _choices(key):
        return next(choice for choice in choices if choice != now)
    if hint is bool:
        return not now
    if hint is int:
        return (now or 1) + 1
    return (now or 1.0) / 2
