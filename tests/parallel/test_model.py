"""Every layout against one process with transformers, in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import adamw_step, gradients, log_probs, norm, policy_loss, random_batch, row_logits
from parallel_runs import build, cut, exported, infer_log_probs, logits, replica_rows, train_policy
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True),
}
BATCH = random_batch(5)
STEP = OptimConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
# The first AdamW step with these moves a parameter by g / (|g| + 1): the gradient, visible in the weights.
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each kind of checkpoint once: 3 layers, and a vocabulary that needs padding."""
    made: dict[tuple[str, bool], Path] = {}

    def make(family: str, tied: bool) -> Path:
        if (family, tied) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[family, tied] = tiny_checkpoint(folder, family, tied=tied, layers=3, vocab=130)
        return made[family, tied]

    return make


def run_all(rank: int, world: int, path: Path, layout: Layout) -> dict[str, Any]:
    model = build(path, layout, optim=STEP)
    rows = replica_rows(model, BATCH)
    parts = cut(model, BATCH, rows, size=2)
    outputs = model.infer(parts, lambda output, micro_batch: {"logits": logits(model, output)})
    log_prob = infer_log_probs(model, BATCH, budget_tokens=20)
    result = train_policy(model, BATCH)
    probe = build(path, layout, optim=PROBE)
    train_policy(probe, BATCH)
    return {
        "tp": model.coords.tp,
        "rows": rows,
        "logits": [
            (rows[int(row)], out["logits"][0, start : start + length])
            for part, out in zip(parts, outputs or [], strict=outputs is not None)
            for row, start, length in zip(part.rows, part.bounds, part.lengths, strict=False)
        ],
        "log_prob": log_prob,
        "grad_norm": result.grad_norm,
        "stepped": exported(model),
        "probed": exported(probe),
    }


def largest_gap(found: dict[str, torch.Tensor], expected: torch.nn.Module) -> float:
    """Largest difference of any parameter; the names must be the same ones."""
    wanted = expected.state_dict()
    if expected.config.tie_word_embeddings:
        del wanted["lm_head.weight"]  # the same matrix under its second name
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_log_probs_gradients_and_a_step_equal_hugging_face(
    family: str, tied: bool, layout: Layout, checkpoint: Any
):
    path = checkpoint(family, tied)
    ranks = run_ranks(run_all, layout.world, path, layout)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    grads = gradients(model, policy_loss(model, BATCH))
    with torch.no_grad():
        whole, expected_log_prob = row_logits(model, BATCH), log_probs(model, BATCH)
    gaps = {"grad_norm": max(abs(rank["grad_norm"] - norm(grads)) for rank in ranks)}
    gaps["logits"] = gaps["log_prob"] = 0.0
    for rank in ranks:
        for row, found in rank["logits"]:
            width = found.shape[1]
            shard = whole[row][:, rank["tp"] * width : (rank["tp"] + 1) * width]
            gaps["logits"] = max(gaps["logits"], float((found[:, : shard.shape[1]] - shard).abs().max()))
        if rank["log_prob"] is not None:
            rows, log_prob = rank["log_prob"]
            gaps["log_prob"] = max(gaps["log_prob"], float((log_prob - expected_log_prob[rows]).abs().max()))
    for kind, reference in (
        ("stepped", adamw_step(model, grads, lr=1e-3, clip=0.5, weight_decay=0.1)),
        ("probed", adamw_step(model, grads, lr=1.0, eps=1.0)),
    ):
        found = {name: tensor for rank in ranks for name, tensor in rank[kind].items()}
        gaps[kind] = largest_gap(found, reference)

    print(gaps)  # what is reached: pytest -s
    assert {row for rank in ranks for row, _ in rank["logits"]} == set(range(5))
    assert max(gaps.values()) <= 1e-4, gaps
