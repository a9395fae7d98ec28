"""The routers' load-balancing loss: its value and its gradients, whichever ranks have the tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import adamw_step, gradients, log_probs, norm, policy_loss, random_batch
from parallel_runs import build, cut, exported, response_log_probs, train_policy
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rolemesh.parallel.micro_batches import unpack
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(5)
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)
COEF = 0.3
LAYOUTS = {
    "ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
    "recomputed": Layout(pp=2),
}


def run_all(rank: int, world: int, sources: dict[str, Path]) -> dict[tuple[str, str], Any]:
    """Every row is a micro-batch of its own, so that all layouts balance over the same tokens."""
    found = {}
    for family, source in sources.items():
        for name, layout in LAYOUTS.items():
            recompute = "full" if name == "recomputed" else "none"
            model = build(source, layout, optim=PROBE, router_loss=COEF, recompute=recompute)
            result = train_policy(model, BATCH, size=1)
            found[family, name] = (result.router_loss, result.grad_norm, exported(model))
    return found


def balanced_loss(model: nn.Module, top_k: int) -> Tensor:
    """Mean over layers and tokens, each row on its own."""
    total, n_tokens = torch.zeros(()), int(BATCH.attention_mask.sum())
    for ids, mask in zip(BATCH.input_ids, BATCH.attention_mask.bool(), strict=True):
        layers = model(input_ids=ids[mask][None], use_cache=False, output_router_logits=True).router_logits
        for logits in layers:
            experts = logits.shape[-1]
            # transformers counts all choices, so that an even load gives top_k.
            loss = load_balancing_loss_func((logits,), experts, top_k) / top_k
            total = total + loss * int(mask.sum()) / n_tokens / len(layers)
    return total


@pytest.mark.parametrize(
    "families", [["mixtral"], pytest.param(["qwen3_moe", "deepseek_v2"], marks=pytest.mark.slow)]
)
def test_router_loss_and_its_gradients_are_those_of_one_process(families: list[str], tmp_path: Path):
    sources = {family: tiny_checkpoint(tmp_path / family, family, layers=3) for family in families}
    ranks = run_ranks(run_all, 2, sources)
    for family, source in sources.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        router_loss = balanced_loss(model, model.config.num_experts_per_tok)
        n_layers = len(model(input_ids=BATCH.input_ids[:1], output_router_logits=True).router_logits)
        grads = gradients(model, policy_loss(model, BATCH) + COEF * n_layers * router_loss)
        adamw_step(model, grads, lr=1.0, eps=1.0).save_pretrained(tmp_path / f"{family}-stepped")
        stepped = load_file(tmp_path / f"{family}-stepped" / "model.safetensors")
        without = norm(gradients(model, policy_loss(model, BATCH)))
        assert abs(norm(grads) - without) > 1e-3  # the loss is there to be seen
        for name in LAYOUTS:
            results = [rank[family, name] for rank in ranks]
            found = {tensor: value for _, _, part in results for tensor, value in part.items()}
            for found_loss, grad_norm, _ in results:
                assert found_loss == pytest.approx(float(router_loss), abs=1e-5), (family, name)
                assert grad_norm == pytest.approx(norm(grads), abs=1e-5), (family, name)
            gap = max(float((found[tensor] - stepped[tensor]).abs().max()) for tensor in stepped)
            assert gap <= 1e-5, (family, name, gap)


def test_a_replica_without_rows_serves_those_that_use_its_experts(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source", "mixtral", layers=3)

    def on_rank(rank: int, world: int) -> tuple[float, Tensor | None]:
        model = build(source, LAYOUTS["ep2"], optim=OptimConfig(lr=1e-3, clip_grad=0.5))
        compute = response_log_probs(model, BATCH)
        parts = [] if rank else cut(model, BATCH, list(range(5)), size=2)
        found = model.infer(parts, lambda output, part: {"log_prob": compute(output, part)})
        if rank:
            assert found == []
            return model.train([], lambda output, _: (output.sum(), {})).grad_norm, None
        grad_norm = train_policy(model, BATCH, rows=list(range(5))).grad_norm
        return grad_norm, unpack(parts, found)["log_prob"]

    (grad_norm, found), (other_norm, _) = run_ranks(on_rank, 2)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert (
        grad_norm == other_norm == pytest.approx(norm(gradients(model, policy_loss(model, BATCH))), abs=1e-5)
    )
    with torch.no_grad():
        torch.testing.assert_close(found, log_probs(model, BATCH), rtol=0, atol=1e-5)
