"""A simulated benchmark from its spec to the table, the JSON, the plans and the report."""

import json
import multiprocessing
import re
from pathlib import Path
from xml.etree import ElementTree

import browser
import pytest
import yaml

from rolemesh.launch import bench_simulate
from rolemesh.launch.bench import bench
from rolemesh.launch.bench_html import bench_page
from rolemesh.launch.bench_result import BenchResult, CellResult, Measured, fastest, number
from rolemesh.launch.bench_spec import Limits, load_spec
from rolemesh.placement.plan import PlacementPlan

pytestmark = pytest.mark.full

MODEL = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
HUGE = {**MODEL, "hidden_size": 8192, "num_hidden_layers": 100, "num_attention_heads": 64}
SPEC = {
    "title": "Small & huge",
    "recipe": {
        "algorithm": {"name": "ppo", "kl": {"in": "reward"}},
        "rollout": "vllm",
        "data": {"max_prompt_tokens": 256},
        "batch": {"prompts": 64, "mini_batch_samples": 32},
        "lengths": {"max_response_tokens": 512, "expect": {"mean": 128, "p95": 400}},
    },
    "strategies": ["colocate", "split", "auto"],
    "models": {"small": MODEL, "huge": HUGE},
    "clusters": ["1 x h100x2", "1 x h100x4"],
    "limits": {"cell_s": 20},
}
NUMBER = (int, float)
ROW = {  # key: types of a cell with a plan, types of one without
    "model": (str, str), "cluster": (str, str), "workload": (str, str), "strategy": (str, str),
    "devices": (int, int), "state": (str, str), "reason": (str, str),
    "step_s": (NUMBER, type(None)), "predicted_s": (NUMBER, type(None)),
    "samples": (int, int), "tokens": (NUMBER, NUMBER),
    "samples_per_s": (NUMBER, type(None)), "tokens_per_s_per_device": (NUMBER, type(None)),
    "peak_gib": (NUMBER, type(None)), "gap": (NUMBER, type(None)),
    "utilisation": (dict, dict), "operations_s": (dict, dict), "memory_gib": (dict, dict),
    "pools": (dict, dict), "order": (dict, dict), "bars": (list, list),
    "measured": (type(None), type(None)), "planning_s": (NUMBER, NUMBER),
    "plan": (str, str),
}  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    bench(folder / "spec.yaml", out=folder)
    return folder


@pytest.fixture(scope="module")
def result(out) -> dict:
    return json.loads((out / "results.json").read_text())


def test_results_follow_their_schema(result):
    assert set(result) == {"schema", "title", "kind", "strategies", "cells"}
    assert (result["schema"], result["kind"]) == (1, "simulated")
    assert len(result["cells"]) == 2 * 2 * 3
    for cell in result["cells"]:
        assert set(cell) == set(ROW)
        for key, kinds in ROW.items():
            assert isinstance(cell[key], kinds[0 if cell["state"] == "ok" else 1]), (key, cell)


def test_rates_follow_from_the_step(result):
    for cell in (cell for cell in result["cells"] if cell["state"] == "ok"):
        assert cell["samples_per_s"] == pytest.approx(64 / cell["step_s"])
        tokens = 64 * (256 + 128) / cell["step_s"] / cell["devices"]
        assert cell["tokens_per_s_per_device"] == pytest.approx(tokens, rel=0.01)
        assert all(0 < share <= 1 for share in cell["utilisation"].values())
        assert 0 < cell["peak_gib"] < 80


def test_no_named_strategy_beats_auto_by_more_than_the_gap(result):
    by_case = {(c["model"], c["cluster"], c["strategy"]): c["step_s"] for c in result["cells"]}
    for (model, cluster, strategy), step_s in by_case.items():
        if step_s is not None:
            assert by_case[model, cluster, "auto"] <= step_s * 1.021, (cluster, strategy)


def test_what_does_not_fit_says_who_is_over_by_how_much(result):
    huge = [cell for cell in result["cells"] if cell["model"] == "huge"]
    assert {cell["state"] for cell in huge} == {"does not fit"}
    for cell in huge:
        assert re.search(r"actor.* on \d x h100-80: device memory over by \d+\.\d\d GiB", cell["reason"])


def test_every_plan_is_a_file_that_can_be_read(out, result):
    planned = [cell for cell in result["cells"] if cell["plan"]]
    assert len(planned) == 6
    for cell in planned:
        plan = PlacementPlan.from_yaml((out / cell["plan"]).read_text())
        assert plan.prediction.step_s == pytest.approx(cell["step_s"], rel=1e-4)
        assert plan.n_devices + sum(plan.idle.values()) == cell["devices"]


def test_the_report_loads_nothing_and_every_chart_is_well_formed(out):
    page = (out / "report.html").read_text()
    assert not re.search(r"(https?:)?//|<script|<link|<img|@import|url\((?!#)", page)
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 1 + 2 * 3 * 3  # throughput; a step, a map and memory for each plan
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "Small &amp; huge" in page
    assert "device memory over by" in page


def test_the_report_in_a_browser(out):
    seen = browser.look(out / "report.html")
    assert seen["charts"] == 19
    assert seen["details"] == 4
    assert (seen["closed"], seen["empty"], seen["outside"], seen["loaded"]) == (0, 0, [], [])
    assert seen["wider"] <= 0
    narrow = browser.look(out / "report.html", width=500)
    assert narrow["wider"] <= 0


def cell(strategy: str, step_s: float | None, **changes) -> CellResult:
    state = "does not fit" if step_s is None else "ok"
    given = {"samples": 8, "tokens": 800.0, "step_s": step_s, "state": state} | changes
    return CellResult("m", "c", "w", strategy, 4, **given)


def test_the_table_marks_the_fastest_and_says_why_a_plan_is_missing():
    cells = (
        cell("colocate", 2.0, utilisation={"all": 1.0}),
        cell("split", None, reason="nothing fits: actor over by 3 GiB\nwould fit: with 1 more node"),
        cell("auto", 2.0),
        cell("standalone", 4.0, predicted_s=3.0, measured=Measured(4.0, 3.5, 5.0, 5)),
    )
    lines = BenchResult("t", False, ("colocate", "split", "auto", "standalone"), cells).text().splitlines()
    header = ["model", "cluster", "strategy", "step", "samples/s", "tokens/s/device", "busy", "memory"]
    assert lines[0].split() == header
    assert lines[1].split() == ["m", "c", "colocate", "2", "s", "4", "100", "all", "100%", "-", "*"]
    assert lines[2].endswith("does not fit: actor over by 3 GiB")
    assert lines[3].endswith("*")
    assert lines[4].endswith("3.5 to 5 s; predicted 3 s")
    assert [one.strategy for one in fastest(cells)] == ["colocate", "auto"]


def test_a_page_without_any_plan_is_a_page():
    page = bench_page(BenchResult("t", False, ("split",), (cell("split", None, reason="<too> large"),)))
    assert "No case has a plan that fits." in page
    assert "&lt;too&gt; large" in page


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (0.01234, "0.0123 s"), (99.95, "100 s"), (12345.6, "12346 s"), (2.0, "2 s")],
)
def test_numbers_are_short(value, said):
    assert number(value, "s") == said


def test_a_planner_that_hangs_or_dies_costs_one_cell(out, monkeypatch):
    """What waits behind it is asked of a new process."""
    monkeypatch.setattr(bench_simulate, "_STARTING_S", 0.05)
    monkeypatch.setattr(bench_simulate, "_EXPLAINING_S", 0.05)
    case = load_spec(out / "spec.yaml").cases[0]
    limits, waiting = Limits(cell_s=0.1), ["colocate", "split", "auto"]
    ours, theirs = multiprocessing.Pipe()
    theirs.send(cell("colocate", 1.0))
    answered = list(bench_simulate._received(case, waiting, limits, ours))
    assert [(one.strategy, one.state) for one in answered] == [("colocate", "ok"), ("split", "no plan found")]
    assert waiting == ["auto"]
    theirs.close()
    (died,) = bench_simulate._received(case, waiting, limits, ours)
    assert (died.strategy, died.state, waiting) == ("auto", "failed", [])


def test_a_search_that_runs_out_of_time_is_no_proof(out):
    case = next(case for case in load_spec(out / "spec.yaml").cases if case.model == "small")
    found = list(bench_simulate.simulate_case(case, Limits(cell_s=0.1)))
    assert [one.strategy for one in found] == ["colocate", "split", "auto"]
    assert {one.state for one in found} <= {"ok", "no plan found"}
