"""Reports of runs whose figures were worked out by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import look, screenshot
from run_folders import split_run

from rolemesh.engine.recovery import Recoveries, WorkersLost
from rolemesh.launch.report import ReportError, read_report
from rolemesh.launch.report_html import report_page
from rolemesh.launch.running import running_requests
from rolemesh.placement.hardware import HardwareError, load_profile
from rolemesh.placement.profile_file import fed, profile_text, read_profile_data
from rolemesh.placement.timeline import Span, Timeline


@pytest.fixture
def report(tmp_path):
    return read_report(split_run(tmp_path / "run"))


def test_operations_are_compared_by_their_median_without_the_first_step(report):
    generate = next(op for op in report.operations if op.name == "generate")
    assert (generate.kind, generate.pools, generate.predicted_s) == ("generate", ("actor_side",), 4.0)
    measured = generate.measured_s
    assert (measured.median, measured.low, measured.high) == pytest.approx((5.0, 4.95, 5.05), rel=1e-4)
    assert measured.n == 3
    assert generate.error == pytest.approx(-0.2, abs=1e-4)
    assert "the first step is left out" in report.notes[0]


def test_each_recovery_is_a_line_of_the_text_and_of_the_page(report):
    assert "recovery: " not in report.text()
    recoveries = Recoveries(report.folder, 2, tell=lambda line: None)
    for done, back in ((3, 2), (7, 6)):
        recoveries.lost(WorkersLost(RuntimeError(f"actor rank {done} died"), done=done))
        recoveries.restored(back)
    again = read_report(report.folder)
    lines = [line for line in again.text().splitlines() if line.startswith("recovery: ")]
    assert [re.sub(r"^recovery: [\d: -]+ in", "in", line) for line in lines] == [
        "in step 4: actor rank 3 died; went on after step 2, 0 s later",
        "in step 8: actor rank 7 died; went on after step 6, 0 s later",
    ]
    assert "Recoveries" in report_page(again)
    assert "actor rank 7 died" in report_page(again)


def test_the_predicted_step_is_played_from_the_plan(report):
    # generate 4, then values + reward 2.5 beside the log-probs' 2, advantage 0.1, updates 3 side by side
    assert report.predicted_step_s == pytest.approx(4 + 2.5 + 0.1 + 3)
    assert report.step_s.median == pytest.approx(10.0, rel=1e-4)
    assert report.step_error == pytest.approx(-0.04, abs=1e-3)
    starts = {span.name: span.start_s for span in report.predicted}
    assert starts["update_actor"] == starts["update_critic"] == pytest.approx(6.6)


def test_pools_are_busy_while_a_rank_computes_and_idle_the_rest_of_the_step(report):
    actor, critic = report.pools
    assert actor.busy.median == pytest.approx(0.94, abs=1e-3)  # generate to 6.5 s, then 7.1 to 10
    assert critic.idle_s.median == pytest.approx(10 - 2.1 - 2.0, abs=0.01)
    assert critic.predicted_busy == pytest.approx(5.6 / 9.6, abs=1e-3)
    assert actor.predicted_idle_s == pytest.approx(0.6)
    assert (actor.ranks, critic.ranks) == (2, 1)


def test_memory_of_the_fullest_rank_stands_beside_the_prediction(report):
    actor, critic = report.memory
    assert [amount / 2**30 for amount in (actor.predicted, actor.limit, actor.measured)] == [1.5, 2.0, 1.4]
    assert critic.what == "resident memory"


def test_the_text_has_a_line_for_everything(report):
    text = report.text()
    for wanted in (
        r"generate +generate +actor_side +4 s +5 s +4\.95 s +5\.05 s +-20%",
        r"step +9\.6 s +10 s",
        r"critic_side +critic, reward +1 +41% +58%",
        r"actor_side +1\.50 GiB +2\.00 GiB +1\.40 GiB",
    ):
        assert re.search(wanted, text), f"{wanted}\n{text}"


def test_validation_before_the_first_step_and_after_a_later_one_is_left_out(tmp_path, report):
    folder = split_run(tmp_path / "validated")
    timeline = Timeline.load(folder / "timeline.json")
    for step, at in ((0, 900.0), (2, 1041.0)):
        timeline.add(Span("generate", "rollout", "actor_side", 0, at, at + 3.0, {"step": step}))
    timeline.save(folder / "timeline.json")
    validated = read_report(folder)
    assert validated.steps == 4
    assert validated.step_s.median == pytest.approx(report.step_s.median, rel=1e-4)
    assert validated.operations[0].measured_s.high == pytest.approx(5.05, rel=1e-4)


def test_a_run_without_predictions_is_only_measured(tmp_path):
    report = read_report(split_run(tmp_path / "run", predicted=False))
    assert report.predicted == ()
    assert report.predicted_step_s is None
    assert all(op.predicted_s is None and op.measured_s for op in report.operations)
    assert any("predicts no seconds" in note for note in report.notes)
    page = report_page(report)
    assert "measured, the step of median length" in page
    assert "planned" not in page


def test_a_run_without_plan_recipe_or_memory_is_reported_too(tmp_path):
    folder = split_run(tmp_path / "run", steps=1)
    for name in ("plan.yaml", "recipe.yaml", "memory.json"):
        (folder / name).unlink()
    report = read_report(folder)
    assert {pool.name for pool in report.pools} == {"actor_side", "critic_side"}
    assert report.memory == ()
    assert "no plan.yaml" in report.text()


def test_a_broken_plan_is_a_note_and_no_run_is_an_error(tmp_path):
    folder = split_run(tmp_path / "run")
    (folder / "plan.yaml").write_text("strategy: [")
    assert any("plan.yaml cannot be read" in note for note in read_report(folder).notes)
    with pytest.raises(ReportError, match="holds no run"):
        read_report(tmp_path)


def test_the_page_draws_both_steps_and_asks_for_nothing(report):
    page = report_page(report)
    for wanted in ("actor_side, planned", "actor_side, measured", "Placement", "actor_side rank 1"):
        assert wanted in page
    assert page.count('aria-label="Gantt chart of a step"') == 1  # both steps on one axis
    assert page.count('aria-label="Gantt chart"') == 1  # every rank
    assert not re.search(r"https?:|<script|<link|<img|src=|url\((?!#)|@import", page)


def test_running_requests_are_those_that_the_replicas_noted(tmp_path):
    folder = split_run(tmp_path / "run")
    assert running_requests(read_report(folder).measured) == ()
    spans = Timeline.load(folder / "timeline.json").spans
    noted = {0: [[0.0, 3], [1.0, 2], [4.0, 0]], 1: [[0.0, 2], [1.0, 1], [2.0, 0]]}
    Timeline(
        [replace(x, args={**x.args, "running": noted[x.rank]}) if x.name == "generate" else x for x in spans]
    ).save(folder / "timeline.json")
    report = read_report(folder)
    found = running_requests(report.measured)
    assert [n for _, n in found] == [5, 3, 2, 0]
    assert [seconds for seconds, _ in found] == pytest.approx([0.0, 1.0, 2.0, 4.0], abs=1e-4)
    (folder / "samples").mkdir()
    (folder / "samples" / "step_4.jsonl").write_text('{"response_tokens": 7}\n')
    assert "5 responses over 4 s" in report_page(report)


def test_seconds_by_kind_are_those_of_operations_on_the_device_type(report):
    predicted, measured = report.seconds_by_kind("cpu")
    assert predicted["train"] == pytest.approx(6.0)
    assert measured["train"] == pytest.approx(4.9, rel=1e-3)
    assert report.seconds_by_kind("h100-80") == ({}, {})


PROFILE = {
    "device": "cpu",
    "figures": {"latency": [3.0, "measured"]},
    "curves": [["gemm", "float32", 1, 2, 3, 1e-6]],
}


def test_half_of_the_error_is_fed_and_a_run_only_once(tmp_path):
    data = fed(PROFILE, {"train": 4.0, "infer": 1.0}, {"train": 9.0}, "run 1")
    assert data["factors"] == {"train": {"factor": 1.5, "runs": 1}}
    path = tmp_path / "cpu.yaml"
    path.write_text(profile_text(data))
    assert read_profile_data(path) == data
    assert load_profile(path).factor("train") == 1.5
    with pytest.raises(HardwareError, match="before"):
        fed(data, {"train": 4.0}, {"train": 9.0}, "run 1")


def test_predictions_get_better_with_every_run():
    data, errors = PROFILE, []
    for run in range(8):
        predicted = 2.0 * data.get("factors", {}).get("train", {"factor": 1.0})["factor"]
        errors.append(abs(predicted / 5.0 - 1))
        data = fed(data, {"train": predicted}, {"train": 5.0}, f"run {run}")
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


def test_an_odd_run_moves_a_factor_by_no_more_than_two():
    data = fed(PROFILE, {"train": 1.0, "infer": 1.0}, {"train": 1e6, "infer": 1e-6}, "odd")
    assert (data["factors"]["train"]["factor"], data["factors"]["infer"]["factor"]) == (2.0, 0.5)


def test_a_browser_shows_the_report_with_all_labels_inside_and_loads_nothing(report, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(report_page(report))
    assert "Content-Security-Policy" in file.read_text()  # the browser itself keeps requests in
    seen = look(file)
    assert seen["charts"] == 5  # both steps, every rank, operations, memory, placement
    assert (seen["empty"], seen["outside"], seen["loaded"]) == (0, [], [])
    assert seen["wider"] <= 0
    screenshot(file, tmp_path / "shot.png")
    assert _distinct_colours(tmp_path / "shot.png") > 8  # bars in several colours, not a blank page


def _distinct_colours(picture: Path) -> int:
    Image = pytest.importorskip("PIL.Image")
    small = Image.open(picture).convert("RGB").quantize(64)
    return len(small.getcolors() or [])
