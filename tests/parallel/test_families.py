"""Every family under every way to cut it, against one process with transformers, in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import adamw_step, gradients, log_probs, norm, policy_loss, random_batch
from parallel_runs import build, exported, infer_log_probs, train_policy
from safetensors.torch import load_file
from tiny import OWN_SETTINGS, tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import save_hf
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(5)
# The first AdamW step with these moves a parameter by g / (|g| + 1): the gradient, visible in the weights.
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=0.5)
MIXTURES = [family for family in OWN_SETTINGS if family != "mistral"]


def layouts(family: str, size: str) -> dict[str, Layout]:
    """The ways to cut a family: a few over 2 ranks, further ones, and ones over 4."""
    moe = family in MIXTURES
    tp2 = {"tp2": Layout(tp=2, sequence_parallel=moe)}
    pp2 = {"pp2": Layout(pp=2), "vpp2": Layout(pp=2, vpp=2)}
    if size == "few":
        if not moe:
            return tp2
        return {"pp2": Layout(pp=2), "tp2ep2": Layout(tp=2, ep=2, sequence_parallel=True)}
    if size == "two":
        experts = {
            "ep2": Layout(dp=2, ep=2),
            "cp2ep2": Layout(cp=2, ep=2),
            "tp2etp2": Layout(tp=2, etp=2, sequence_parallel=True),
            "dp2": Layout(dp=2),
        }
        return {**tp2, **pp2, "cp2": Layout(cp=2), **(experts if moe else {})}
    experts = {
        "pp2ep2": Layout(pp=2, dp=2, ep=2),
        "vpp2ep2": Layout(pp=2, vpp=2, dp=2, ep=2),
        "tp2dp2ep2": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
        "tp2dp2ep4": Layout(tp=2, dp=2, ep=4, sequence_parallel=True),
        "ep2etp2": Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
    }
    return {"tp2pp2": Layout(tp=2, pp=2, sequence_parallel=moe), **(experts if moe else {})}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def on_disk(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """A transformers model's weights under the names that it saves them by."""
    model.save_pretrained(folder)
    return weights_of(folder)


def run_all(
    rank: int, world: int, sources: dict[str, Path], size: str, out: Path
) -> dict[tuple[str, str], Any]:
    """Every case in turn: log-probabilities, gradient norm, weights as saved, and as a step leaves them."""
    found = {}
    for family, source in sources.items():
        for name, layout in layouts(family, size).items():
            model = build(source, layout, optim=PROBE)
            log_prob = infer_log_probs(model, BATCH, size=2)
            at = (dict(model.named_parameters()), model.shape, layout, model.groups)
            save_hf(*at, source, out / f"{family}-{name}", max_shard_bytes=60_000)
            grad_norm = train_policy(model, BATCH).grad_norm
            found[family, name] = (log_prob, grad_norm, exported(model))
    return found


def largest_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor; the names must be the same ones."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        family: tiny_checkpoint(folder / family, family, layers=4, vocab=130, tied=family == "mistral")
        for family in OWN_SETTINGS
    }


CASES = [pytest.param("few", 2, list(OWN_SETTINGS), id="few")]
CASES += [
    pytest.param(size, world, [family], id=f"{size}-{family}", marks=pytest.mark.slow)
    for size, world in (("two", 2), ("four", 4))
    for family in OWN_SETTINGS
]


@pytest.mark.parametrize(("size", "world", "families"), CASES)
def test_families_compute_what_transformers_does_and_are_saved_to_the_bit(
    size: str, world: int, families: list[str], sources: dict[str, Path], tmp_path: Path
):
    sources = {family: sources[family] for family in families}
    ranks = run_ranks(run_all, world, sources, size, tmp_path, timeout=250)
    gaps: dict[tuple[str, str], dict[str, float]] = {}
    for family, source in sources.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        grads = gradients(model, policy_loss(model, BATCH))
        stepped = on_disk(adamw_step(model, grads, lr=1.0, eps=1.0, clip=0.5), tmp_path / f"{family}-stepped")
        with torch.no_grad():
            expected = log_probs(model, BATCH)
        for name in layouts(family, size):
            results = [rank[family, name] for rank in ranks]
            scored = [rows_and_values for rows_and_values, _, _ in results if rows_and_values is not None]
            gaps[family, name] = {
                "log_prob": max(float((values - expected[rows]).abs().max()) for rows, values in scored),
                "grad_norm": max(abs(grad_norm - norm(grads)) for _, grad_norm, _ in results),
                "stepped": largest_gap(
                    {tensor: value for _, _, part in results for tensor, value in part.items()}, stepped
                ),
            }
            assert {row for rows, _ in scored for row in rows} == set(range(5))
            saved, source_weights = weights_of(tmp_path / f"{family}-{name}"), weights_of(source)
            assert saved.keys() == source_weights.keys()
            assert all(saved[tensor].equal(value) for tensor, value in source_weights.items())
    for case, gap in gaps.items():
        print(*case, gap)  # what is reached: pytest -s
    assert all(max(gap.values()) <= 1e-4 for gap in gaps.values()), gaps
