"""Adapters against plain torch on transformers' model: what they learn, the model without them, saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import log_probs, policy_loss, random_batch
from parallel_runs import build, cut, infer_log_probs, save, train_policy
from safetensors.torch import load_file
from tiny import tiny_checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rolemesh.parallel.checkpoint import load_shards
from rolemesh.parallel.lora import LoraConfig
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import convert, export_hf
from rolemesh.placement.layout import Layout

pytestmark = pytest.mark.full

BATCH = random_batch(5)
LORA = LoraConfig(rank=4, alpha=8.0)
# With these a parameter moves by about its gradient: the gradient, visible in the weights.
PROBE = OptimConfig(lr=0.5, eps=1.0, weight_decay=0.0, clip_grad=None)
UPDATES = 2
LAYOUTS = {
    "one": (Layout(), "none"),
    "tp2": (Layout(tp=2), "none"),
    "tp2sp": (Layout(tp=2, sequence_parallel=True), "full"),
    "pp2": (Layout(pp=2), "full"),
    "dp2": (Layout(dp=2), "none"),
    "cp2": (Layout(cp=2), "selective"),
}
SHARED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def merged(model: Any) -> dict[str, Tensor]:
    """Whole weights with the adapters in them, by Hugging Face name."""
    return dict(export_hf(model.weights(), model.shape, model.layout, model.groups, head=model.head))


def first_rows(path: Path) -> dict[str, Tensor]:
    """Every A as a new model has it, by layer and the first of the projections that share it."""

    def read(rank: int, world: int) -> dict[str, Tensor]:
        model = build(path, Layout(), optim=PROBE, lora=LORA)
        return {name: x.detach().clone() for name, x in model.trained_parameters() if name.endswith(".a")}

    names = dict(zip(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), SHARED, strict=True))
    parts = {tuple(name.split(".")): x for name, x in run_ranks(read, 1)[0].items()}
    return {f"{name[2]}.{names[name[-3]][0]}": x for name, x in parts.items()}


def truth(path: Path) -> dict[str, Tensor]:
    """Weights after some updates of A and B by torch's AdamW, in one process."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = {name: x.detach() for name, x in model.named_parameters()}
    a = {name: x.requires_grad_() for name, x in first_rows(path).items()}
    owner = {name: group[0] for group in SHARED for name in group}
    b = {
        name: torch.zeros(x.shape[0], LORA.rank, requires_grad=True)
        for name, x in base.items()
        if name.endswith("weight") and name.split(".")[-2] in owner
    }

    def weights() -> dict[str, Tensor]:
        def low(name: str) -> Tensor:
            layer, kind = name.split(".")[2], owner[name.split(".")[-2]]
            return LORA.alpha / LORA.rank * b[name] @ a[f"{layer}.{kind}"]

        return {name: x + low(name) if name in b else x for name, x in base.items()}

    class Merged(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return functional_call(model, weights(), kwargs=inputs)

    optimizer = torch.optim.AdamW([*a.values(), *b.values()], lr=0.5, eps=1.0, weight_decay=0.0)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        policy_loss(Merged(), BATCH).backward()
        optimizer.step()
    return {name: x.detach() for name, x in weights().items()}


def learned(rank: int, world: int, path: Path, layout: Layout, recompute: str, folder: Path) -> Any:
    model = build(path, layout, optim=PROBE, lora=LORA, recompute=recompute)
    first = infer_log_probs(model, BATCH, size=2)
    for _ in range(UPDATES):
        train_policy(model, BATCH, size=2)
    with model.adapters_off():
        off = infer_log_probs(model, BATCH, size=2)
    save(model, folder)
    return {"first": first, "off": off, "merged": merged(model), "now": infer_log_probs(model, BATCH, size=2)}


@pytest.mark.parametrize("tied", [False, True], ids=["llama", "tied qwen2"])
def test_adapters_learn_what_plain_torch_learns_and_are_away_when_off(tmp_path: Path, tied: bool):
    path = tiny_checkpoint(tmp_path / "m", "qwen2" if tied else "llama", tied=tied, layers=2)
    wanted = truth(path)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        base = log_probs(source, BATCH)
        source.load_state_dict(wanted, strict=not tied)  # a tied head is the embedding
        after = log_probs(source, BATCH)
    assert (after - base).abs().max() > 0.05
    for name in LAYOUTS if not tied else ("pp2",):
        layout, recompute = LAYOUTS[name]
        ranks = run_ranks(learned, layout.world, path, layout, recompute, tmp_path / name)
        found = {name: x for rank in ranks for name, x in rank["merged"].items()}
        torch.testing.assert_close(found, {name: wanted[name] for name in found}, rtol=0, atol=2e-5)
        assert set(found) == {tensor for tensor in wanted if not tied or tensor != "lm_head.weight"}
        for rank in ranks:
            for kind, expected in (("first", base), ("off", base), ("now", after)):
                if rank[kind] is not None:
                    rows, log_prob = rank[kind]
                    torch.testing.assert_close(log_prob, expected[rows], rtol=0, atol=2e-4)


def test_a_save_holds_the_adapters_alone_loads_under_another_layout_and_converts(tmp_path: Path):
    path = tiny_checkpoint(tmp_path / "m", "qwen3", layers=2)

    def before(rank: int, world: int) -> Any:
        model = build(path, Layout(tp=2), optim=PROBE, lora=LORA)
        train_policy(model, BATCH, size=2)
        save(model, tmp_path / "c")
        result = merged(model)
        return result, train_policy(model, BATCH, size=2).grad_norm

    def later(rank: int, world: int) -> float:
        model = build(path, Layout(pp=2), optim=PROBE, lora=LORA)
        load_shards(model, tmp_path / "c")
        return train_policy(model, BATCH, size=2).grad_norm

    weights, norm = run_ranks(before, 2)[0]
    assert run_ranks(later, 2) == pytest.approx([norm] * 2, rel=1e-5)
    convert(tmp_path / "c", path, tmp_path / "out", dtype=torch.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(written, weights, rtol=0, atol=1e-6)
    held = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert held < 0.7 * sum(x.nbytes for x in written.values()) * 3  # weights and two moments of all


def test_a_critics_adapters_and_head_learn_alike_under_tp_and_pp(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama", head="score", layers=2)

    def update(rank: int, world: int, layout: Layout) -> Any:
        model = build(path, layout, head="value", optim=PROBE, lora=LORA)
        parts = cut(model, BATCH, list(range(5)), size=2)
        for _ in range(UPDATES):
            model.train(parts, lambda output, part: (square(model, output, part), {}))
        return merged(model)

    def square(model: Any, output: Tensor, part: Any) -> Tensor:
        rows = zip(part.bounds, part.lengths.tolist(), strict=False)
        place = torch.cat([torch.arange(start, start + length) for start, length in rows])
        return model.at(output, part, place, lambda found, _: (found,))[0].square().sum() / 40

    (one,) = run_ranks(update, 1, Layout())
    source = load_file(path / "model.safetensors")
    assert not torch.equal(one["score.weight"], source["score.weight"])
    assert torch.equal(one["model.norm.weight"], source["model.norm.weight"])
    for layout in (Layout(tp=2, sequence_parallel=True), Layout(pp=2)):
        found = {name: x for rank in run_ranks(update, 2, layout) for name, x in rank.items()}
        torch.testing.assert_close(found, one, rtol=0, atol=2e-5)
