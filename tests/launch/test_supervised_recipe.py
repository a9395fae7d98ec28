"""Recipes of `sft` and `train-rm`: keys, rules, and what the check says."""

import json
import re
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from rolemesh.launch.fields import RecipeError, declared, section_of
from rolemesh.launch.supervised_check import check_supervised
from rolemesh.launch.supervised_config import load_supervised, parse_supervised, supervised_yaml
from rolemesh.launch.supervised_schema import RmRecipe, SftRecipe

EXAMPLES = Path(__file__).parents[2] / "examples"
SFT = """
run: {device: cpu}
cluster: {per_node: 2}
data: {train_files: train.jsonl, val_files: [val.jsonl], max_tokens: 32}
model: policy
optim: {lr: 1.0e-5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("supervised")
    tiny_checkpoint(root / "policy")
    tiny_checkpoint(root / "scorer", head="score")
    for name in ("train", "val"):
        row = {"prompt": "1>", "response": "2", "chosen": "2", "rejected": "3"}
        (root / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for _ in range(10)))
    (root / "sft.yaml").write_text(SFT)
    return root


@pytest.mark.parametrize(
    ("kind", "override", "said"),
    [
        (SftRecipe, "optim.lrr=1", r"unknown key optim.lrr; did you mean optim.lr\?"),
        (SftRecipe, "actor.path=x", r"unknown key actor.path; did you mean model.path\?"),
        (SftRecipe, "data.chosen_key=x", r"unknown key data.chosen_key"),
        (RmRecipe, "data.train_batch_size=8", r"verl's name; here it is batch.size"),
        (SftRecipe, "batch.size=0", r"batch.size is 0, but must be at least 1"),
        (SftRecipe, "optim.min_lr=1e-6", r"optim.min_lr would have no effect: optim.decay is constant"),
        (SftRecipe, "run.keep_last=1", r"run.keep_last would have no effect: run.save_every is 0"),
        (SftRecipe, "run.best_metric=val/loss", r"run.best_metric would have no effect"),
        (SftRecipe, "model=null", r"model.path is missing: Hugging Face folder"),
    ],
)
def test_a_key_that_cannot_be_used_is_told(kind, override, said):
    with pytest.raises(RecipeError, match=said):
        parse_supervised(kind, SFT, Path("/"), [override])


def test_pair_accuracy_is_no_metric_of_fine_tuning():
    keys = [
        f"run.{key}"
        for key in (
            "save_every=2",
            "validate_every=2",
            "keep_last=1",
            "keep_best=1",
            "best_metric=val/accuracy",
        )
    ]
    with pytest.raises(RecipeError, match="which pairs have"):
        parse_supervised(SftRecipe, SFT, Path("/"), keys)
    assert parse_supervised(RmRecipe, SFT, Path("/"), keys).run.best_metric == "val/accuracy"


@pytest.mark.parametrize("kind", [SftRecipe, RmRecipe])
def test_a_recipe_is_written_and_read_again(kind):
    recipe = parse_supervised(kind, SFT, Path("/data"), ["layout.tp=2"])
    assert recipe.data.train_files == ("/data/train.jsonl",)
    assert parse_supervised(kind, supervised_yaml(recipe), Path("/elsewhere")) == recipe


@pytest.mark.parametrize("kind", [SftRecipe, RmRecipe])
def test_every_key_says_what_it_is(kind):
    keys = [key for key in declared(kind) if not section_of(key.type)]
    assert len({key.path for key in keys}) == len(keys) > 40
    assert all(key.metadata["doc"] for key in keys)


def problems(kind, folder: Path, *overrides: str) -> str:
    return "\n".join(check_supervised(load_supervised(kind, folder / "sft.yaml", overrides)).problems)


def test_the_check_says_how_the_run_will_be(folder):
    report = check_supervised(load_supervised(RmRecipe, folder / "sft.yaml", ["batch.size=4", "layout.tp=2"]))
    assert report.problems == []
    assert "10 examples / 4 per update = 3 updates per epoch; 3 updates in all" in report.text()
    assert "reward: tp=2" in report.text()
    assert "its scalar head starts from zeros" in report.text()


@pytest.mark.parametrize(
    ("kind", "override", "said"),
    [
        (SftRecipe, "data.train_files=none.jsonl", "no file"),
        (SftRecipe, "data.response_key=text", r"no text \(see data.response_key\)"),
        (RmRecipe, "data.rejected_key=worse", r"no worse \(see data.rejected_key\)"),
        (SftRecipe, "model.path=nowhere", "model.path: no folder"),
        (SftRecipe, "model.path=scorer", "holds a classifier with 1 labels"),
        (SftRecipe, "data.max_tokens=600", "the model ends at 512 positions"),
        (SftRecipe, "layout.tp=3", "layout"),
        (SftRecipe, "optim.decay=linear optim.warmup_steps=9", "decay would never begin"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(folder, monkeypatch, kind, override, said):
    monkeypatch.chdir(folder)
    assert re.search(said, problems(kind, folder, *override.split())), problems(
        kind, folder, *override.split()
    )


@pytest.mark.parametrize(
    ("kind", "name"), [(SftRecipe, "quickstart_sft.yaml"), (RmRecipe, "quickstart_rm.yaml")]
)
def test_the_examples_are_recipes(kind, name):
    assert load_supervised(kind, EXAMPLES / name).model.path.endswith(("base", "actor"))
