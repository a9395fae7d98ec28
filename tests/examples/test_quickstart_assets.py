"""What the quickstart trains on: the task, its true reward, and the files, made here in a few steps."""

import importlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    """The script as a module, importing `reward` from its own folder as it does when run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("make_assets")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def assets(quickstart: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("assets")
    quickstart.make_assets(out, few_steps(quickstart))
    return out


def few_steps(quickstart: ModuleType, **changes: int) -> object:
    sizes = {"policy_steps": 3, "reward_steps": 3, "n_train": 200, "n_val": 50}
    return replace(quickstart.Settings(), **sizes | changes)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("5180", 1.0),
        ("5170", 0.75),
        ("", 0.0),
        ("518", 0.75),
        ("51800", 0.8),
        (" 5180\n", 1.0),
        ("0518", 0.0),
    ],
)
def test_the_true_reward_is_the_fraction_of_right_characters(
    quickstart: ModuleType, answer: str, score: float
) -> None:
    assert quickstart.right_answer("4079>") == "5180"
    assert quickstart.compute_score("shift_digits", answer, "5180", {}) == score


def test_the_demonstrator_is_less_often_right_on_odd_digits(
    quickstart: ModuleType,
) -> None:
    teacher = quickstart.Demonstrator(quickstart.Settings(), seed=0)
    right: dict[int, list[bool]] = {0: [], 1: []}
    for _ in range(2000):
        prompt = teacher.prompt()
        pairs = zip(teacher.habitual_answer(prompt), quickstart.right_answer(prompt), strict=True)
        for digit, (got, want) in zip(prompt, pairs, strict=False):
            right[int(digit) % 2].append(got == want)
    even, odd = (sum(right[parity]) / len(right[parity]) for parity in (0, 1))
    assert 0.62 < even < 0.70
    assert 0.33 < odd < 0.40


def test_the_demonstrator_avoids_held_out_prompts(quickstart: ModuleType) -> None:
    first = quickstart.Demonstrator(quickstart.Settings(), seed=0)
    held_out = frozenset(first.prompt() for _ in range(50))
    again = quickstart.Demonstrator(quickstart.Settings(), seed=0, held_out=held_out)
    assert not held_out & {again.prompt() for _ in range(200)}


def test_the_tokenizer_adds_one_bos_and_returns_the_text(assets: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets / "actor")
    ids = tokenizer("4079>").input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert len(ids) == 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == "4079>"
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_prompts_are_in_verls_row_format_and_held_out_ones_are_disjoint(
    quickstart: ModuleType, assets: Path
) -> None:
    train, val = rows(assets / "train.jsonl"), rows(assets / "val.jsonl")
    assert (len(train), len(val)) == (200, 50)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    for row in train + val:
        assert row["data_source"] == "shift_digits"
        assert row["reward_model"]["ground_truth"] == quickstart.right_answer(row["prompt"])
    assert train[3]["extra_info"] == {"split": "train", "index": 3}


def test_the_checkpoints_load_by_transformers_auto_classes(assets: Path) -> None:
    actor = AutoModelForCausalLM.from_pretrained(assets / "actor")
    reward, info = AutoModelForSequenceClassification.from_pretrained(
        assets / "reward", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert reward.config.num_labels == 1
    assert actor.config.num_key_value_heads % 2 == 0  # can be cut by tp 2
    assert not actor.config.tie_word_embeddings


def test_every_prefix_is_scored_by_the_true_reward(quickstart: ModuleType) -> None:
    prompts, answers = ["123>", "4079>"], ["24", "5188"]
    ids, is_answer = quickstart.encode(quickstart.make_tokenizer(), prompts, answers)
    scores = quickstart.prefix_scores(prompts, answers, ids.shape[1])
    assert scores[0][is_answer[0]].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert scores[1][is_answer[1]].tolist() == [0.25, 0.5, 0.75, 0.75, 0.75]


def test_the_same_seed_makes_the_same_assets(quickstart: ModuleType, assets: Path, tmp_path: Path) -> None:
    random.seed(12345)
    torch.manual_seed(12345)
    quickstart.make_assets(tmp_path / "same", few_steps(quickstart))
    quickstart.make_assets(tmp_path / "other", few_steps(quickstart, seed=1))
    for name in ("actor", "reward"):
        first, same, other = (
            load_file(folder / name / "model.safetensors")
            for folder in (assets, tmp_path / "same", tmp_path / "other")
        )
        assert all(torch.equal(first[key], same[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)
    assert (tmp_path / "same" / "train.jsonl").read_text() == (assets / "train.jsonl").read_text()


@pytest.mark.full
@pytest.mark.slow
def test_the_script_makes_a_useful_start_and_skips_when_made(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "make_assets.py"), "--out", str(tmp_path / "assets")]
    subprocess.run(command, check=True, timeout=280)
    figures = json.loads((tmp_path / "assets" / "assets.json").read_text())["figures"]
    assert 0.4 < figures["policy_sampled_accuracy"] < 0.6
    assert 0.4 < figures["policy_greedy_accuracy"] < 0.6
    assert figures["reward_model_correlation"] > 0.9  # its last digits are the processor's
    assert figures["reward_model_mean_abs_error"] < 0.1
    again = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "made before with the same settings" in again.stdout
