"""Options of `rolemesh plan`, and that it runs without anything of the extra `train`."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rolemesh.launch import plan_command
from rolemesh.launch.cli import main
from rolemesh.launch.config import load_recipe
from rolemesh.launch.extras import extra_of
from rolemesh.launch.plan_notes import with_pins
from rolemesh.placement.known_models import known_model, known_names

RECIPE = Path(__file__).parents[2] / "examples" / "plan_70b.yaml"
BLOCKED = """
import importlib.abc, sys
from rolemesh.launch.extras import extra_of

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if extra_of(name) == "train":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from rolemesh.launch.cli import main
main()
"""


def rolemesh(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def light(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.full
def test_a_70b_run_is_planned_without_torch_ray_and_transformers():
    done = light("plan", RECIPE, "--cluster", "16xh100-80x8", "--pin", "actor.layout.tp=8", "--limit-s", 5)
    assert done.returncode == 0, done.stderr
    assert "auto: " in done.stdout
    assert any(line.startswith("  actor: tp=8") for line in done.stdout.splitlines())
    assert "the built-in shape llama-70b (config.json that is published with Llama 3.1 70B)" in done.stdout
    assert "note: device h100-80: published, not calibrated here" in done.stdout
    assert "note: assumed prompts: 1024 tokens each; responses: log-normal, mean 1200" in done.stdout


@pytest.mark.full
def test_a_command_that_lacks_its_extra_names_it():
    done = light("doctor")
    assert done.returncode == 1
    assert "is not installed: pip install 'rolemesh[train]'" in done.stderr
    assert extra_of("torch.nn") == "train"
    assert extra_of("wandb") == "loggers"
    assert extra_of("numpy") == ""


def test_exit_codes_tell_a_bad_recipe_from_one_that_does_not_fit():
    fixed = ("placement.strategy=colocate", "rollout.layout.tp=8")
    code, said = rolemesh("plan", RECIPE, "--cluster", "1xh100-80x8", *fixed)
    assert (code, "nothing fits" in said) == (3, True), said
    code, said = rolemesh("plan", RECIPE, *fixed, "--pin", "actor.layout.tp=12")
    assert code == 2, said
    code, said = rolemesh("plan", RECIPE, *fixed, "--pin", "actor sideways")
    assert code == 2, said
    code, said = rolemesh("plan", RECIPE, "--cluster", "0xh100-80x8")
    assert (code, "has no devices" in said) == (2, True), said
    code, said = rolemesh("plan", RECIPE, "actor.path=models/llama-71b")
    assert (code, "actor.path is " in said, "did you mean llama-70b?" in said) == (2, True, True), said


def test_pins_of_the_command_line_come_beside_the_recipes():
    own = ["placement.pin.must=[ref tp=4]"]
    recipe = with_pins(
        lambda pinned: load_recipe(RECIPE, [*own, *pinned]), ["actor+ref together", "actor.layout.tp=8"]
    )
    assert recipe.placement.pin.must == ("ref tp=4", "actor+ref together")
    assert recipe.actor.layout.tp == 8


def test_lengths_of_a_run_take_the_place_of_the_recipes(tmp_path: Path):
    steps = [{"step": i, "response_length/mean": 500 + 100 * i, "response_length/max": 2000} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(step) for step in steps))
    fixed = ("placement.strategy=colocate", "actor.path=/none")
    code, said = rolemesh("plan", RECIPE, *fixed, "--lengths-from", tmp_path)
    assert code == 0, said
    assert "responses: log-normal, mean 650 tokens, 95% below 2000" in said
    code, said = rolemesh("plan", RECIPE, *fixed, "--lengths-from", tmp_path / "none")
    assert (code, "no metrics.jsonl there" in said) == (2, True)


@pytest.mark.parametrize(("seconds", "pools", "ties"), [(10.2, 1, 1), (9.8, 1, 1), (8.0, 1, 0), (10.2, 2, 0)])
def test_a_strategy_that_is_simpler_and_as_fast_is_a_tie(seconds: float, pools: int, ties: int):
    plan = SimpleNamespace(prediction=SimpleNamespace(step_s=10.0), pools=("a", "b"))
    other = SimpleNamespace(makespan_s=seconds, pools=("a", "b")[:pools])
    said = list(plan_command._simpler(plan, SimpleNamespace(plans={"colocate": other})))
    assert len(said) == ties
    assert all("tie with colocate" in line and "within 3%" in line for line in said)


@pytest.mark.parametrize("name", known_names())
def test_built_in_shapes_have_a_source(name: str):
    found = known_model(name)
    assert found is not None
    shape, source = found
    assert source
    billions = next(
        (float(part[:-1]) for part in name.split("-") if part.endswith("b") and part[:-1].isdigit()), 0
    )
    assert billions == pytest.approx(shape.n_params / 1e9, rel=0.12)


@pytest.mark.full
def test_the_best_few_are_compared_and_a_tie_goes_to_the_simpler_one(monkeypatch: pytest.MonkeyPatch):
    few = ("cluster.nodes=2", "actor.path=llama-8b", "critic.path=llama-8b", "reward.path=llama-8b")
    code, said = rolemesh("plan", RECIPE, *few, "--top", 3, "--limit-s", 20)
    assert code == 0, said
    ways = [line for line in said.splitlines() if line.startswith(("  1. ", "  2. ", "  3. "))]
    assert len(ways) == 3
    assert sum(line.endswith("<- taken") for line in ways) == 1
    monkeypatch.setattr("rolemesh.launch.plan_choice.TIE", 100.0)
    code, said = rolemesh("plan", RECIPE, *few, "--top", 3, "--limit-s", 20)
    assert code == 0, said
    assert said.startswith("auto: 1 pools")
    assert "simpler one chosen" in said
    code, said = rolemesh("plan", RECIPE, *few, "placement.strategy=colocate", "--top", 3)
    assert (code, "--top compares what strategy auto finds" in said) == (2, True)
