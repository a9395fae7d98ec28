"""The real trainer, stopped and resumed, with all roles on one rank of this machine and without Ray."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from local_group import LocalGroup, fetch, put
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoTokenizer
from worker_runs import worker

from rolemesh.engine.algorithms import AdaptiveKLController
from rolemesh.engine.checkpoint.manifest import Manifest
from rolemesh.engine.checkpoint.saver import Checkpoints, TrainedRole
from rolemesh.engine.checkpoint.store import CheckpointStore, newest_good
from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.data.prompts import PromptDataset
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.trainer import Trainer, TrainerSpec
from rolemesh.engine.workers.actor import ActorWorker, PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import CriticWorker, ValueLoss
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.reference import RefWorker
from rolemesh.engine.workers.reward import RewardWorker
from rolemesh.engine.workers.rollout import RolloutSpec, RolloutWorker
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout
from rolemesh.placement.steps import step_graph

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
STEPS = 5
MEASURED = re.compile(r"^(timing_s|perf)/")  # of the clock, not of the training


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("assets")
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "scorer", head="score", seed=1)
    (root / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i * 37 % 1000}>"}) for i in range(20))
    )
    return root


def trainer(assets: Path, run: Path, **options) -> Trainer:
    """PPO with an adaptive KL weight and decaying learning rates; an epoch's last batch is a small one."""
    policy, scorer = str(assets / "policy"), str(assets / "scorer")
    optim = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2, total_steps=10)
    sampling = SamplingOptions(max_response_tokens=8, eos_ids=(2,), pad_id=0, seed=1)
    workers = {
        "actor": (ActorWorker, RoleSpec(policy, "lm", optim=optim), PolicyLoss()),
        "critic": (CriticWorker, RoleSpec(scorer, "value", optim=optim), ValueLoss()),
        "ref": (RefWorker, RoleSpec(policy, "lm")),
        "reward": (RewardWorker, RoleSpec(scorer, "value")),
        "rollout": (RolloutWorker, RolloutSpec(policy, "float32", 10**9, sampling)),
    }
    groups = {role: LocalGroup(worker(cls, 0, Layout(), *args)) for role, (cls, *args) in workers.items()}
    trained = {
        "actor": TrainedRole(policy, "lm", "float32"),
        "critic": TrainedRole(scorer, "value", "float32"),
    }
    tokenizer = AutoTokenizer.from_pretrained(policy)
    loader = PromptLoader(
        PromptDataset([str(assets / "train.jsonl")], tokenizer, max_prompt_tokens=8), 8, seed=3
    )
    run.mkdir(exist_ok=True)
    spec = TrainerSpec(
        steps=STEPS,
        samples_per_prompt=1,
        mini_batch_samples=4,
        advantage=AdvantageSpec("gae", kl_kind="k1", lam=0.95),
        save_every=options.pop("save_every", 1),
        best_metric="critic/score/mean",
    )
    return Trainer(
        spec=spec,
        graph=step_graph("ppo", reference=True, reward="model", kl_in="reward"),
        groups=groups,
        prompts=itertools.chain.from_iterable(itertools.repeat(loader)),
        val_prompts=None,
        tokenizer=tokenizer,
        kl=AdaptiveKLController(0.05, target=0.01, horizon=50),
        store=put,
        fetch=fetch,
        log=RunLog(run),
        loader=loader,
        checkpoints=Checkpoints(CheckpointStore(run / "checkpoints"), groups, trained, "pools: {}\n", 60.0),
        **options,
    )


def learnt(run: Path) -> dict[int, dict]:
    """Metrics by step, without those of the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {k: v for k, v in row.items() if not MEASURED.match(k)} for row in rows}


def exported(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / f"step_{STEPS}" / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def unbroken(assets) -> Path:
    run = assets / "unbroken"
    assert run_ranks(lambda rank, world: trainer(assets, run).fit(), 1) == [STEPS]
    return run


def test_resumed_after_step_3_it_learns_what_the_unbroken_run_does_bit_for_bit(assets, unbroken, tmp_path):
    def resumed(rank, world):
        going_on = trainer(assets, tmp_path)
        assert going_on.checkpoints is not None
        going_on.resume(going_on.checkpoints.load(unbroken / "checkpoints" / "step_3"))
        before = going_on.kl.value
        return going_on.fit(), before

    ((done, kl),) = run_ranks(resumed, 1)
    assert done == STEPS
    assert kl != 0.05
    one, other = learnt(unbroken), learnt(tmp_path)
    assert sorted(other) == [4, 5]
    assert other == {step: one[step] for step in (4, 5)}
    first, second = exported(unbroken), exported(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_step_that_is_due_is_saved_with_its_score(unbroken):
    folder = unbroken / "checkpoints"
    assert newest_good(folder).path == folder / f"step_{STEPS}"
    for step, row in learnt(unbroken).items():
        if step:
            assert Manifest.read(folder / f"step_{step}").score == row["critic/score/mean"]


def test_asked_to_stop_it_saves_the_step_it_is_in_and_exports_nothing(assets, unbroken, tmp_path):
    """Also where no checkpoints were asked for; the run that goes on is the unbroken one."""
    asked: list[int] = []

    def on_rank(rank, world):
        stopped = trainer(assets, tmp_path, save_every=0, stopping=lambda: bool(asked))
        stopped.on_step = lambda step, metrics: asked.append(step) if step == 1 else None
        return stopped.fit()

    assert run_ranks(on_rank, 1) == [2]
    assert newest_good(tmp_path / "checkpoints").path == tmp_path / "checkpoints" / "step_2"
    assert not (tmp_path / "export").exists()
    assert learnt(tmp_path)[2] == learnt(unbroken)[2]


def test_a_last_save_that_fails_is_an_error(assets, tmp_path):
    def on_rank(rank, world):
        stopped = trainer(assets, tmp_path, save_every=0, stopping=lambda: True)
        assert stopped.checkpoints is not None
        stopped.checkpoints.plan = None  # type: ignore[assignment]  # cannot be written
        with pytest.raises(CheckpointError, match="the last checkpoint, of step 1, was not saved"):
            stopped.fit()

    run_ranks(on_rank, 1)
