"""Two runs at the same time on one machine, and a third that wants the folder of the first."""

import json
import re

import pytest
from safetensors.torch import load_file
from small_runs import MarkedRun, small_recipe

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
MEASURED = re.compile(r"^(timing_s|perf)/")


def test_two_runs_do_not_disturb_each_other_and_a_third_in_the_folder_of_one_is_refused(tmp_path):
    recipe = small_recipe(tmp_path, run={"steps": 3, "save_every": 1, "temp_dir": "temp"})
    runs = {name: MarkedRun(recipe, f"run.dir={tmp_path / name}") for name in ("a", "b")}
    third = None
    try:
        assert runs["a"].says("train: ", 250), runs["a"].output
        third = MarkedRun(recipe, f"run.dir={tmp_path / 'a'}")
        assert third.process.wait(200) == 2, third.output
        assert f"in use by another run, process {runs['a'].process.pid} on " in third.output
        for run in runs.values():
            assert run.process.wait(400) == 0, run.output
            assert run.left_after(15) == []
    finally:
        for run in (*runs.values(), *([third] if third else [])):
            run.kill()
    learnt, weights = {}, {}
    for name in runs:
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        learnt[name] = [{k: v for k, v in row.items() if not MEASURED.match(k)} for row in rows]
        assert (tmp_path / name / "checkpoints" / "step_3").is_dir()
        weights[name] = load_file(tmp_path / name / "export" / "step_3" / "actor" / "model.safetensors")
    assert learnt["a"] == learnt["b"]
    assert all(tensor.equal(weights["b"][key]) for key, tensor in weights["a"].items())
    assert not list((tmp_path / "temp").iterdir())
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".lock" or path.name.startswith("a.")]
