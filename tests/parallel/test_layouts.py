"""Interleaved and uneven pipelines and context parallelism against one process with transformers, in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hf_reference import Batch, adamw_step, gradients, log_probs, norm, policy_loss, random_batch
from parallel_runs import build, exported, infer_log_probs, total_loss, train_policy
from tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout, LayoutError

pytestmark = pytest.mark.full

BATCH = random_batch(7)
# One step with these moves a parameter by g / (|g| + 1): the gradient, visible in the weights.
PROBE = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)
LAYOUTS = {
    "uneven": Layout(pp=2, pp_layers=(1, 3)),
    "vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "cp2pp2": Layout(cp=2, pp=2),
}
MORE = {
    "unevenvpp2": Layout(pp=2, vpp=2, pp_layers=(1, 1, 3, 2)),
    "tp2spvpp2": Layout(tp=2, pp=2, vpp=2, sequence_parallel=True),
    "vpp2dp2": Layout(pp=2, vpp=2, dp=2),
    "vpp3": Layout(pp=2, vpp=3),
    "pp3uneven": Layout(pp=3, pp_layers=(3, 1, 3)),
    "cp4": Layout(cp=4),
    "cp2dp2": Layout(cp=2, dp=2),
    "tp2spcp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "tp2cp2": Layout(tp=2, cp=2),
    "cp2vpp2": Layout(cp=2, pp=2, vpp=2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each kind of checkpoint once."""
    made: dict[tuple[str, bool, int], Path] = {}

    def make(family: str, tied: bool, layers: int) -> Path:
        key = family, tied, layers
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[key] = tiny_checkpoint(folder, family, tied=tied, layers=layers, vocab=130)
        return made[key]

    return make


def run_all(rank: int, world: int, path: Path, layout: Layout, batch: Batch) -> dict[str, Any]:
    """Log-probs by micro-batches of several sizes, one micro-batch among them, and the gradient of each."""
    model = build(path, layout)
    log_prob = [infer_log_probs(model, batch, **limit) for limit in ({"size": 2}, {"budget_tokens": 100})]
    found = {"log_prob": [part for part in log_prob if part is not None], "probed": []}
    for limit in ({"size": 2}, {"budget_tokens": 100}):
        probe = build(path, layout, optim=PROBE)
        result = train_policy(probe, batch, **limit)
        first = (probe.coords.tp, probe.coords.cp) == (0, 0)
        found["probed"].append((exported(probe), result.grad_norm, first and total_loss(result)))
    return found


def check(path: Path, layout: Layout, batch: Batch) -> None:
    ranks = run_ranks(run_all, layout.world, path, layout, batch, timeout=40)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loss = policy_loss(model, batch)
    grads = gradients(model, loss)
    with torch.no_grad():
        expected = log_probs(model, batch)
    wanted = adamw_step(model, grads, lr=1.0, eps=1.0).state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]  # the same matrix under its second name
    assert sum(len(rank["log_prob"]) for rank in ranks) == 2 * layout.world // layout.pp
    for rows, log_prob in (part for rank in ranks for part in rank["log_prob"]):
        torch.testing.assert_close(log_prob, expected[rows], rtol=0, atol=1e-5)
    for kind in range(2):
        weights = {name: x for rank in ranks for name, x in rank["probed"][kind][0].items()}
        assert weights.keys() == wanted.keys()
        torch.testing.assert_close(weights, wanted, rtol=0, atol=2e-5)
        assert [rank["probed"][kind][1] for rank in ranks] == pytest.approx(
            [norm(grads)] * layout.world, rel=1e-5
        )
        assert sum(rank["probed"][kind][2] or 0.0 for rank in ranks) == pytest.approx(
            float(loss.detach()), rel=1e-5
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_loss_and_gradients_equal_hugging_face(name: str, checkpoint: Any):
    check(checkpoint("llama", name in ("vpp2", "cp2"), 4), LAYOUTS[name], BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", [*LAYOUTS, *MORE])
def test_every_family_equals_hugging_face_under(name: str, family: str, tied: bool, checkpoint: Any):
    layout = {**LAYOUTS, **MORE}[name]
    layers = sum(layout.pp_layers) or 4 + 2 * (layout.vpp == 3)
    check(checkpoint(family, tied, layers), layout, BATCH)


def test_stages_of_an_uneven_interleaved_pipeline_have_their_own_layers(checkpoint: Any):
    path = checkpoint("llama", False, 7)

    def numbers(rank: int, world: int) -> list[list[int]]:
        model = build(path, MORE["unevenvpp2"])
        names = {int(name.split(".")[2]) for name, _ in model.named_parameters() if ".layers." in name}
        assert names == set(range(sum(len(part.decoder.layers) for part in model.parts)))
        return [[layer.layer_number for layer in part.decoder.layers] for part in model.parts]

    assert run_ranks(numbers, 2) == [[[1], [3, 4, 5]], [[2], [6, 7]]]


def test_a_cut_of_another_number_of_layers_is_refused(checkpoint: Any):
    path = checkpoint("llama", False, 4)

    def refused(rank: int, world: int) -> None:
        with pytest.raises(LayoutError, match=r"pp_layers \[2, 3\] are 5 layers, the model has 4"):
            build(path, Layout(pp=2, pp_layers=(2, 3)))

    run_ranks(refused, 2)
