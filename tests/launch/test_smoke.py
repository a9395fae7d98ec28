"""The recipe of a smoke run, and what its memory comes to; the run itself is in `test_smoke_run.py`."""

import json

import pytest

from rolemesh.launch import cli
from rolemesh.launch.config import parse_recipe, to_yaml
from rolemesh.launch.smoke import PoolMemory, smoke_lines, smoke_memory, smoke_recipe

RECIPE = """
run: {dir: run, steps: 500, save_every: 20, validate_every: 20, keep_last: 2,
  loggers: [console, wandb], resume: auto}
data: {train_files: [train.jsonl], val_files: [val.jsonl], weights: {train: 2}}
algorithm: {name: dapo}
batch: {prompts: 32, samples_per_prompt: 4}
lengths: {max_response_tokens: 100}
actor: {path: policy, optim: {decay: cosine, warmup_steps: 50}}
reward: reward.py:compute_score
"""
PLAN = """
strategy: colocate
pools: {all: {roles: [actor, rollout], process_on_nodes: [2], device_kind: cuda}}
layouts: {actor: {dp: 2}, rollout: {dp: 2}}
predicted: {peak_gib: {all: 40.0}, limit_gib: {all: 76.0}}
"""
GIB = 2**30


def test_a_smoke_recipe_takes_two_whole_steps_and_leaves_nothing(tmp_path):
    given = parse_recipe(RECIPE, tmp_path)
    recipe = smoke_recipe(given)
    run = recipe.run
    assert (run.dir, run.steps, run.save_every) == (f"{given.run.dir}-smoke", 2, 0)
    assert (run.resume, run.loggers, recipe.data.val_files) == (None, ("console", "jsonl"), ())
    assert not recipe.algorithm.dynamic_sampling.on
    assert recipe.actor.optim.warmup_steps == 0
    for kept in ("batch", "lengths", "placement", "cluster", "schedule"):
        assert getattr(recipe, kept) == getattr(given, kept)


def test_what_a_smoke_run_writes_down_as_its_recipe_can_be_read_again(tmp_path):
    again = parse_recipe(to_yaml(smoke_recipe(parse_recipe(RECIPE, tmp_path))), tmp_path)
    assert (again.run.steps, again.algorithm.overlong.leave_out) == (2, False)


def folder(tmp_path, peaks, **more):
    (tmp_path / "plan.yaml").write_text(PLAN)
    memory = {"all": {"what": "torch's allocator", "peak_bytes": [gib * GIB for gib in peaks], **more}}
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    return tmp_path


def test_planned_and_measured_memory_stand_side_by_side_with_the_worst_ratio(tmp_path):
    (pool,) = pools = smoke_memory(folder(tmp_path, [30, 44]))
    assert pool.worst == pytest.approx(1.1)
    assert pool.over == ()
    text = "\n".join(smoke_lines(pools))
    assert "pool all: worst ratio 1.10 (torch's allocator)" in text
    assert "40 GiB" in text
    assert "44 GiB" in text
    assert "every rank is within its device" in text


def test_a_rank_over_its_limit_is_named(tmp_path):
    (pool,) = pools = smoke_memory(folder(tmp_path, [30, 77]))
    assert pool.over == (1,)
    assert "too much for their devices: all rank 1" in "\n".join(smoke_lines(pools))


def test_the_devices_own_size_is_a_limit_too_and_libraries_are_no_models(tmp_path):
    (pool,) = smoke_memory(folder(tmp_path, [30, 50], device_bytes=48 * GIB, base_bytes=[10 * GIB, 10 * GIB]))
    assert pool.over == (1,)
    assert pool.worst == pytest.approx(1.0)


def test_without_a_prediction_there_is_no_ratio():
    pool = PoolMemory("all", None, None, (GIB,))
    assert (pool.worst, pool.over) == (None, ())
    assert "planned memory is not known" in pool.lines()[0]


def test_the_command_fails_when_a_rank_is_over_its_limit(tmp_path, capsys):
    assert cli._smoked(str(folder(tmp_path, [30, 44]))) == 0
    assert cli._smoked(str(folder(tmp_path, [30, 77]))) == 1
    assert "OVER ITS DEVICE'S LIMIT" in capsys.readouterr().out
