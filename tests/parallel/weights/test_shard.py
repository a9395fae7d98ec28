"""`rolemesh convert` both ways for each family, and what lies between, loaded by ranks of any layout."""

from pathlib import Path

import pytest
import torch.distributed as dist
from gloo import run_ranks
from hf_reference import random_batch
from parallel_runs import build, exported, train_policy
from safetensors.torch import load_file
from tiny import CONFIGS, OWN_SETTINGS, tiny_checkpoint
from torch import Tensor
from typer.testing import CliRunner

from rolemesh.launch.cli import main
from rolemesh.parallel.checkpoint import ShardSave, load_shards
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
LAYOUTS = {"mixtral": Layout(tp=2, ep=2, sequence_parallel=True), "deepseek_v3": Layout(dp=2, ep=2)}


def converted(source: Path, out: Path) -> str:
    done = CliRunner().invoke(main, ["convert", str(source), str(out)])
    assert done.exit_code == 0, done.output
    return done.output


def test_every_family_goes_to_shards_and_comes_back_to_the_bit(tmp_path: Path):
    for family in (*CONFIGS, *OWN_SETTINGS):
        source = tiny_checkpoint(tmp_path / family, family, layers=3, tied=family == "qwen2")
        shards, back = tmp_path / f"{family}-shards", tmp_path / f"{family}-back"
        assert "before any update" in converted(source, shards)
        converted(shards, back)
        wanted, found = (load_file(folder / "model.safetensors") for folder in (source, back))
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(tensor) for name, tensor in wanted.items()), family
        assert (back / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_a_reward_model_keeps_its_head(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source", head="score")
    assert "a value head" in converted(source, tmp_path / "shards")
    converted(tmp_path / "shards", tmp_path / "back")
    assert "score.weight" in load_file(tmp_path / "back" / "model.safetensors")


def test_ranks_take_up_what_was_sharded(tmp_path: Path):
    """The model has other weights before: those of the shards are what it has then."""
    paths = {}
    for family in LAYOUTS:
        source = tiny_checkpoint(tmp_path / family, family, layers=3)
        converted(source, tmp_path / f"{family}-shards")
        paths[family] = (source, tiny_checkpoint(tmp_path / f"{family}-other", family, layers=3, seed=1))

    def load(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
        found = {}
        for family, (_, other) in paths.items():
            model = build(other, LAYOUTS[family], optim=OptimConfig())
            load_shards(model, tmp_path / f"{family}-shards")
            found[family] = exported(model)
        return found

    ranks = run_ranks(load, 2)
    for family, (source, _) in paths.items():
        wanted = load_file(source / "model.safetensors")
        found = {name: tensor for rank in ranks for name, tensor in rank[family].items()}
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(tensor) for name, tensor in wanted.items()), family


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_saved_under_one_layout_go_on_under_another(tmp_path: Path, family: str):
    """Adam's moments too: the update after loading has the same gradient and leaves the same weights."""
    source, batch = tiny_checkpoint(tmp_path / "source", family, layers=3), random_batch(5)
    layouts = [Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2, ep=2, sequence_parallel=True)]

    def goes_on(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
        model = build(source, layouts[0], optim=OptimConfig(lr=1e-3))
        train_policy(model, batch)
        if rank == 0:
            (tmp_path / "shards").mkdir()
        dist.barrier()
        saving = ShardSave(model, tmp_path / "shards")
        saving._thread.join(60)
        assert saving.progress().done, saving.progress().error
        results: list = [None] * world
        dist.all_gather_object(results, saving.progress().results)
        if rank == 0:
            saving.finish(results)
        dist.barrier()
        found = [(train_policy(model, batch).grad_norm, exported(model))]
        for layout in layouts:
            other = build(source, layout, optim=OptimConfig(lr=1e-3))
            load_shards(other, tmp_path / "shards")
            found.append((train_policy(other, batch).grad_norm, exported(other)))
        return found

    ranks = run_ranks(goes_on, 2)
    cases = [
        (ranks[0][case][0], {name: x for rank in ranks for name, x in rank[case][1].items()})
        for case in range(len(layouts) + 1)
    ]
    (norm, weights), *others = cases
    for other_norm, other_weights in others:
        assert other_norm == pytest.approx(norm, rel=1e-5)
        assert max(float((other_weights[name] - weights[name]).abs().max()) for name in weights) < 1e-5
