"""The real trainer, all roles on one rank of this machine, without Ray: `from local_trainer import ...`."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch
from local_group import LocalGroup, fetch, put
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from transformers import AutoTokenizer
from worker_runs import worker

from rolemesh.engine.algorithms import AdaptiveKLController
from rolemesh.engine.checkpoint.saver import Checkpoints, TrainedRole
from rolemesh.engine.checkpoint.store import CheckpointStore
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
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout
from rolemesh.placement.steps import step_graph

STEPS = 5
MEASURED = re.compile(r"^(timing_s|perf)/")  # of the clock, not of the training


def make_assets(root: Path) -> Path:
    """Models and prompts in `root`."""
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "scorer", head="score", seed=1)
    (root / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i * 37 % 1000}>"}) for i in range(20))
    )
    return root


def trainer(assets: Path, run: Path, *, spec: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """PPO with an adaptive KL weight and decaying learning rates; an epoch's last batch is a small one.

    `spec` changes the trainer's.
    """
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
    wanted = {"save_every": 1, "advantage": AdvantageSpec("gae", kl_kind="k1", lam=0.95)} | (spec or {})
    return Trainer(
        spec=TrainerSpec(
            steps=STEPS,
            samples_per_prompt=1,
            mini_batch_samples=4,
            best_metric="critic/score/mean",
            **wanted,
        ),
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
