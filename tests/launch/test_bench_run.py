"""A benchmark that is really run: both strategies train their predicted plan on two worker slots."""

import json
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from rolemesh.launch.bench import bench

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(580)]
SPEC = Path(__file__).parents[2] / "examples" / "bench" / "local_cpu.yaml"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    tiny_checkpoint(folder / "policy")
    tiny_checkpoint(folder / "scorer", head="score")
    rows = [json.dumps({"prompt": f"{i}>"}) for i in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    models = {"actor": "policy", "critic": "scorer", "reward": "scorer"}
    changes = [f"models.quickstart.{role}={folder / name}" for role, name in models.items()]
    changes += [f"recipe.data.train_files=[{folder / 'train.jsonl'}]", "limits.steps=3"]
    changes += ["recipe.batch={prompts: 16, mini_batch_samples: 8}"]
    bench(SPEC, changes, out=folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def cells(out) -> dict:
    result = json.loads((out / "results.json").read_text())
    assert result["kind"] == "measured"
    return {cell["strategy"]: cell for cell in result["cells"]}


@pytest.mark.slow
def test_measured_seconds_stand_beside_the_predicted_ones(out, cells):
    assert list(cells) == ["colocate", "split"]
    for cell in cells.values():
        assert cell["state"] == "ok", cell["reason"]
        measured = cell["measured"]
        assert measured["n"] == 2  # of three steps, without the first
        assert 0 < measured["low_s"] <= cell["step_s"] == measured["step_s"] <= measured["high_s"]
        assert cell["predicted_s"] > 0
        assert all(peak > 50 * 2**20 for peak in measured["peak"].values())
    page = (out / "report.html").read_text()
    assert "measured, the step of median length" in page
    assert "really run on the devices at hand" in page


@pytest.mark.slow
def test_the_timeline_has_the_predicted_structure(cells):
    """Who runs beside whom, and in which order; not for how long."""
    for name, cell in cells.items():
        for pool, order in cell["order"].items():
            ran = [bar for bar in cell["bars"] if bar["pool"] == pool]
            assert [bar["operation"] for bar in ran] == order, (name, pool)
        together = _together(cell["bars"])
        assert ({"update_actor", "update_critic"} in together) == (name == "split")
        assert not any("generate" in pair for pair in together), name


def _together(bars: list[dict]) -> list[set[str]]:
    """Operations of different pools that run at the same time."""
    return [
        {one["operation"], other["operation"]}
        for one in bars
        for other in bars
        if one["pool"] < other["pool"]
        and max(one["start_s"], other["start_s"]) < min(one["end_s"], other["end_s"])
    ]
