"""Shapes, dtypes and heads that need care."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from hf_reference import gradients, log_probs, norm, policy_loss, random_batch
from parallel_runs import build, cut, exported, infer_log_probs, train_policy
from tiny import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rolemesh.parallel.micro_batches import MicroBatch
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import CheckpointError
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(4)
OPTIM = OptimConfig(lr=1e-3)


def hf_log_probs(path: Path) -> Tensor:
    with torch.no_grad():
        return log_probs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), BATCH)


def hf_grad_norm(path: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return norm(gradients(model, policy_loss(model, BATCH)))


def last_log_probs(path: Path, layout: Layout, **kwargs: object) -> Tensor:
    """Log-probabilities that a freshly built model gives on its last rank."""

    def infer(rank: int, world: int) -> tuple[list[int], Tensor] | None:
        return infer_log_probs(build(path, layout, **kwargs), BATCH, size=3)

    return run_ranks(infer, layout.world)[-1][1]


def test_shared_matrix_of_a_tied_model_stays_one_over_pp2_dp2(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "qwen2", tied=True)

    def shared_after_each_step(rank: int, world: int) -> list[Tensor]:
        model = build(path, Layout(pp=2, dp=2), optim=OPTIM)
        copies = []
        for _ in range(5):
            train_policy(model, BATCH)
            copies.append(model.module.shared_embedding_or_output_weight().detach().clone())
        return copies

    first, *others = run_ranks(shared_after_each_step, 4)
    assert not torch.equal(first[0], first[4])
    for other in others:
        assert all((a - b).abs().max() == 0 for a, b in zip(first, other, strict=True))


def test_7_layers_over_pp2_are_4_and_3_with_their_own_numbers(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama", layers=7)

    def stage(rank: int, world: int) -> tuple[list[int], dict[str, Tensor]]:
        model = build(path, Layout(pp=2))
        return [layer.layer_number for layer in model.module.decoder.layers], exported(model)

    (first, names_0), (second, names_1) = run_ranks(stage, 2)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7])
    numbers = [
        {int(n) for name in names for n in re.findall(r"layers\.(\d+)\.", name)}
        for names in (names_0, names_1)
    ]
    assert numbers == [{0, 1, 2, 3}, {4, 5, 6}]
    torch.testing.assert_close(last_log_probs(path, Layout(pp=2)), hf_log_probs(path), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_kv_head_serves_tp2(tmp_path: Path, family: str):
    path = tiny_checkpoint(tmp_path, family, kv_heads=1)

    def grad_norm(rank: int, world: int) -> float:
        return train_policy(build(path, Layout(tp=2), optim=OPTIM), BATCH).grad_norm

    torch.testing.assert_close(last_log_probs(path, Layout(tp=2)), hf_log_probs(path), rtol=0, atol=1e-4)
    assert run_ranks(grad_norm, 2) == pytest.approx([hf_grad_norm(path)] * 2, rel=1e-5)


def test_llama3_rope_scaling_is_the_checkpoints(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    unscaled = hf_log_probs(path)
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    }
    (path / "config.json").write_text(json.dumps(config))
    scaled = hf_log_probs(path)
    assert (scaled - unscaled).abs().max() > 1e-3
    torch.testing.assert_close(last_log_probs(path, Layout()), scaled, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float16, Layout(tp=2)), (torch.bfloat16, Layout(pp=2))])
def test_half_precision_inference_is_close_to_fp32(tmp_path: Path, dtype: torch.dtype, layout: Layout):
    path = tiny_checkpoint(tmp_path, "llama")
    gap = (last_log_probs(path, layout, dtype=dtype) - hf_log_probs(path)).abs().max()
    assert gap < (0.01 if dtype == torch.float16 else 0.1)


def test_a_role_that_only_infers_has_no_gradients(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def build_only(rank: int, world: int) -> None:
        model = build(path, Layout())
        assert not any(parameter.requires_grad for _, parameter in model.named_parameters())
        assert not any(hasattr(parameter, "main_grad") for _, parameter in model.named_parameters())
        with pytest.raises(RuntimeError, match="without an optimizer"):
            train_policy(model, BATCH)
        with pytest.raises(ValueError, match="fp16 is for roles that only infer"):
            build(path, Layout(), dtype=torch.float16, optim=OPTIM)

    run_ranks(build_only, 1)


def test_bf16_training_keeps_fp32_state_and_its_loss_is_close(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def losses(rank: int, world: int, dtype: torch.dtype) -> list[float]:
        model = build(path, Layout(tp=2), dtype=dtype, optim=OptimConfig(lr=1e-3))
        results = [train_policy(model, BATCH) for _ in range(4)]
        return [float(sum(stats["loss"] for stats in result.stats)) for result in results]

    half, full = run_ranks(losses, 2, torch.bfloat16)[0], run_ranks(losses, 2, torch.float32)[0]
    assert full[0] - full[3] > 0.05
    assert half == pytest.approx(full, abs=0.05)


def test_recomputing_activations_changes_no_gradient(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def grad_norms(rank: int, world: int) -> list[float]:
        models = [
            build(path, layout, optim=OPTIM, recompute=recompute)
            for layout in (Layout(pp=2), Layout(cp=2))
            for recompute in ("none", "selective", "full")
        ]
        return [train_policy(model, BATCH).grad_norm for model in models]

    plain, *recomputed = run_ranks(grad_norms, 2)[0]
    assert recomputed == pytest.approx([plain] * 5, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str
)
def test_value_head_equals_transformers_and_learns_alike(tmp_path: Path, layout: Layout):
    path = tiny_checkpoint(tmp_path, "llama", head="score")

    def values_and_norm(rank: int, world: int) -> tuple[list[Tensor], float]:
        model = build(path, layout, head="value", optim=OPTIM)
        parts = cut(model, BATCH, [0, 1, 2, 3], size=4)
        values = model.infer(parts, lambda output, part: {"values": of_tokens(output, part)})
        result = model.train(parts, lambda output, part: (of_tokens(output, part).square().sum(), {}))
        return values, result.grad_norm

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    hidden = [
        model.model(input_ids=BATCH.input_ids[row][BATCH.attention_mask[row].bool()][None])[0]
        for row in range(4)
    ]
    expected = [model.score(states)[0, :, 0] for states in hidden]
    loss = torch.cat(expected).square().sum()
    ranks = run_ranks(values_and_norm, layout.world)
    found = ranks[-1][0][0]["values"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat(expected).detach(), rtol=0, atol=1e-4)
    assert [rank[1] for rank in ranks] == pytest.approx(
        [norm(gradients(model, loss))] * layout.world, rel=1e-5
    )


def test_a_critic_starts_from_a_language_model_only_when_asked_and_values_everything_0(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "qwen2", tied=True)

    def values(rank: int, world: int) -> tuple[Tensor, Tensor]:
        with pytest.raises(CheckpointError, match="no value head"):
            build(path, Layout(), head="value")
        model = build(path, Layout(), head="value", new_head=True, optim=OPTIM)
        parts = cut(model, BATCH, [0, 1], size=2)
        at_first = model.infer(parts, lambda output, _: {"values": output})[0]["values"]
        model.train(parts, lambda output, _: (output.sum(), {}))
        later = model.infer(parts, lambda output, _: {"values": output})[0]["values"]
        return at_first, later

    at_first, later = run_ranks(values, 1)[0]
    assert (at_first == 0).all()
    assert (later < 0).all()


def of_tokens(output: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The output [1, T] without that of padding."""
    rows = zip(micro_batch.bounds, micro_batch.lengths.tolist(), strict=False)
    return torch.cat([output[0, start : start + length] for start, length in rows])


def test_a_gradient_that_is_not_finite_leaves_weights_and_schedule_alone(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def poisoned(rank: int, world: int) -> None:
        model = build(path, Layout(dp=2), optim=OptimConfig(lr=1e-3, warmup_steps=10))
        before = exported(model)
        parts = cut(model, BATCH, [rank], size=1)
        factor = float("nan") if rank == 1 else 1.0
        result = model.train(parts, lambda output, _: (output.sum() * factor, {}))
        assert result.skipped
        torch.testing.assert_close(exported(model), before, rtol=0, atol=0)
        after = train_policy(model, BATCH)
        assert not after.skipped
        assert after.lr == result.lr == pytest.approx(1e-4)

    run_ranks(poisoned, 2)


def test_loading_again_also_replaces_the_optimizers_fp32_weights(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)

    def reload(rank: int, world: int) -> None:
        model = build(
            path,
            Layout(dp=2),
            dtype=torch.bfloat16,
            optim=OptimConfig(lr=0.1, total_steps=1, schedule="linear"),
        )
        loaded = exported(model)
        train_policy(model, BATCH)
        assert rank == 1 or not torch.equal(loaded["lm_head.weight"], exported(model)["lm_head.weight"])
        model.load(path)
        train_policy(model, BATCH)  # the schedule is over: a learning rate of 0 writes the fp32 weights back
        torch.testing.assert_close(exported(model), loaded, rtol=0, atol=0)

    run_ranks(reload, 2)


def test_log_probs_of_the_same_batch_are_the_same_bits_before_any_update(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def twice(rank: int, world: int) -> float:
        model = build(path, Layout(), optim=OptimConfig(lr=0.0, weight_decay=0.0))
        old = infer_log_probs(model, BATCH, size=2)[1]
        for _ in range(3):
            train_policy(model, BATCH)
        return float((infer_log_probs(model, BATCH, size=4)[1] - old).abs().max())

    assert run_ranks(twice, 1)[0] <= 1e-5


def test_building_a_model_leaves_the_random_state_alone(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def drawn(rank: int, world: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        build(path, Layout(), optim=OPTIM)
        return torch.rand(4), torch.random.manual_seed(3) and torch.rand(4)

    after_building, alone = run_ranks(drawn, 1)[0]
    assert torch.equal(after_building, alone)


def test_a_length_that_sequence_parallel_cannot_cut_is_refused(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama")

    def odd_length(rank: int, world: int) -> None:
        model = build(path, Layout(tp=2, sequence_parallel=True))
        parts = cut(model, BATCH, [0], size=1)
        odd = replace(parts[0], tokens=parts[0].tokens[:, :5], bounds=(0, 5))
        with pytest.raises(ValueError, match=r"of 5 tokens cannot be cut over tp=2 .*whole=2"):
            model.infer([odd], lambda *_: {})

    run_ranks(odd_length, 2)
