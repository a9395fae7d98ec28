"""Pictures: cells and coordinates, stacks, charts; all from values worked out by hand."""

from xml.etree import ElementTree

import pytest

from rolemesh.launch.pictures.ascii_map import COLUMNS, map_lines, step_lines
from rolemesh.launch.pictures.cells import MOST_ROWS, rows_of
from rolemesh.launch.pictures.device_counts import (
    CountPoint,
    crossovers,
    device_counts_chart,
    misfits_in_words,
)
from rolemesh.launch.pictures.health import health_chart
from rolemesh.launch.pictures.length_histogram import bins_of, length_histogram, running
from rolemesh.launch.pictures.memory_step import layers_of, memory_step
from rolemesh.launch.pictures.placement_map import cell_boxes, device_squares, flows_chart, placement_map
from rolemesh.launch.pictures.step_gantt import step_gantt, waiting_rows
from rolemesh.launch.pictures.strategies import StrategyBar, strategies_chart
from rolemesh.launch.pictures.svg import WIDTH, wrapped
from rolemesh.launch.run_health import Panel
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.memory_over_step import PoolMemory
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.plan_values import Prediction
from rolemesh.placement.pools import PoolSpec
from rolemesh.placement.step_view import step_view
from rolemesh.placement.timeline import Span
from rolemesh.placement.traffic import Flow

ROLES = ("actor", "rollout")


def plan_on(n_nodes: int, pp: int = 2, idle: int = 0) -> PlacementPlan:
    """An actor and a rollout on `n_nodes` nodes of four, tp=2; the last node has `idle` more devices."""
    world = 4 * n_nodes
    names = [f"node-{i}" for i in range(n_nodes)]
    return PlacementPlan(
        "colocate",
        (PoolSpec("all", ROLES, (4,) * n_nodes, "cuda", 1.0),),
        {"actor": Layout(tp=2, dp=world // (2 * pp), pp=pp), "rollout": Layout(tp=4, dp=n_nodes)},
        {"all": tuple((name, 4) for name in names)},
        {names[-1]: idle} if idle else {},
        prediction=Prediction(memory={"actor": {"weights": 3 * GIB}, "rollout": {"KV cache": GIB}}),
    )


def shapes(chart: str, tag: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(chart).iter(tag)]


def groups(chart: str, kind: str) -> int:
    return sum(group.get("class") == kind for group in shapes(chart, "g"))


def test_a_cell_has_the_coordinates_of_its_rank():
    rows = rows_of(plan_on(4, pp=2, idle=0))
    assert [row.name() for row in rows] == ["node-[0-1]", "node-[2-3]"]  # equal but for dp
    last = rows[1].cells[3]
    assert last.rank == 11  # of node-2, the first of its row
    assert {at.role: at.where() for at in last.roles} == {"actor": "t1 p1 d1-3", "rollout": "t3 d2-3"}
    assert [at.gib for at in last.roles] == [3.0, 1.0]


def test_nodes_that_differ_in_more_than_dp_keep_their_rows_until_there_are_too_many():
    assert len(rows_of(plan_on(8, pp=8))) == 8
    (row,) = rows_of(plan_on(2 * MOST_ROWS, pp=2 * MOST_ROWS))
    assert row.name() == f"node-[0-{2 * MOST_ROWS - 1}]"
    assert row.cells[0].roles[0].where() == f"t0 p0-{2 * MOST_ROWS - 1} d0"
    assert len(rows_of(plan_on(8, pp=8), coarse=True)) == 1


@pytest.mark.parametrize(("n_nodes", "idle"), [(1, 0), (4, 4), (32, 20)])
def test_cells_are_inside_the_map_and_do_not_overlap(n_nodes, idle):
    plan = plan_on(n_nodes, idle=idle)
    rows = rows_of(plan, ClusterSpec.preset(f"{n_nodes} x h100x8"))
    for row in rows:
        boxes = cell_boxes(row)
        assert len(boxes) == len(row.cells)
        for i, (x, y, width, height) in enumerate(boxes):
            assert x >= 0
            assert x + width <= WIDTH
            for other_x, other_y, *_ in boxes[i + 1 :]:
                assert other_x >= x + width or other_y >= y + height
    chart = placement_map(rows, plan)
    assert groups(chart, "cell") == sum(len(row.cells) for row in rows)
    assert chart.count("url(#idle)") == idle
    assert "8 devices on one fast link: 450 GB/s" in chart
    assert groups(device_squares(rows, plan), "cell") == groups(chart, "cell")


def test_text_maps_keep_to_eighty_columns_and_name_every_pool():
    plan = plan_on(32, idle=3)
    lines = map_lines(plan, rows_of(plan, coarse=True))
    assert lines[1:3] == ["  node-[0-30] [AAAA]  31 nodes like this", "  node-31     [AAAA...]"]
    assert "  A = actor+rollout, 128 devices" in lines
    spans = [
        Span("generate", "rollout", "all", 0, 0.0, 3.0),
        Span("update_actor", "actor", "all", 0, 5.0, 6.0),
    ]
    step = step_lines(step_view(spans, {}), plan)
    assert step[1].count("a") == 3 * step[1].count("b")
    assert step[1].endswith("33% idle")
    assert all(len(line) <= COLUMNS for line in [*lines, *step])


STEP = step_view(
    [
        Span("generate", "rollout", "gen", 0, 0.0, 6.0),
        Span("update_actor", "actor", "train", 0, 6.0, 10.0),
    ],
    {"update_actor": {"generate"}},
)


def test_the_gantt_shows_waits_and_the_critical_path():
    chart = step_gantt({"planned": STEP, "measured": STEP}, {"generate": "#4e79a7"})
    assert len([line for line in shapes(chart, "line") if line.get("class") == "path"]) == 4
    for wanted in ("gen, planned", "gen, measured", "waits for generate", "idle 40%", "idle 60%"):
        assert wanted in chart
    assert waiting_rows(STEP) == [
        ("gen", "40%", "4 s for update_actor"),
        ("train", "60%", "6 s for generate"),
    ]


def test_a_stack_of_memory_adds_up_to_its_peak():
    memory = PoolMemory({"actor": 2 * GIB, "ref": 1 * GIB}, {"update_actor": 4 * GIB, "x": GIB}, 8 * GIB)
    lane = next(lane for lane in STEP.lanes if lane.name == "train")
    layers = layers_of(memory, lane, 10.0)
    assert max(layer.high for layer in layers) == memory.peak / GIB == 7.0
    assert [(layer.name, layer.low, layer.high) for layer in layers] == [
        ("actor", 0.0, 2.0),
        ("ref", 2.0, 3.0),
        ("update_actor", 3.0, 7.0),
    ]
    assert (layers[2].start_s, layers[2].end_s) == (6.0, 10.0)
    chart = memory_step(memory, lane, 10.0, roles={}, operations={}, measured=6.5 * GIB)
    heights = [float(rect["height"]) for rect in shapes(chart, "rect")]
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.2)
    assert "the device holds 8 GiB" in chart
    assert "measured peak 6.5 GiB" in chart
    far = memory_step(memory, lane, 10.0, roles={}, operations={}, measured=100 * GIB)
    assert "measured peak" not in far  # the stack would be too flat to see


def test_bars_of_strategies_are_as_long_as_their_steps():
    bars = [StrategyBar("a", "wins", {"x": 2.0, "y": 3.0}), StrategyBar("b", "does not fit: too big")]
    chart = strategies_chart(bars, {"x": "#4e79a7", "y": "#f28e2b"})
    widths = [float(rect["width"]) for rect in shapes(chart, "rect") if rect.get("rx") == "2"]
    assert widths[1] == pytest.approx(1.5 * widths[0], abs=0.2)
    assert "5 s" in chart
    assert "no plan" in chart
    assert wrapped("one two three", 7) == ["one two", "three"]


def test_crossovers_and_what_does_not_fit_are_marked():
    points = [
        CountPoint(8, misfit="too big"),
        CountPoint(16, {"colocate": 9.0, "split": 5.0}),
        CountPoint(32, {"colocate": 6.0, "split": 8.0}),
        CountPoint(64, {"this plan": 9.0, "colocate": 4.0, "split": 7.0}),
    ]
    assert crossovers(points) == [(16, 32, "colocate", "split")]
    chart = device_counts_chart(points)
    assert groups(chart, "misfit") == 1
    assert "split overtakes colocate" in chart
    assert groups(chart, "point") == 7
    assert "no number of devices" in device_counts_chart([points[0]])


def test_no_line_crosses_what_does_not_fit_and_who_has_no_plan_is_not_overtaken():
    points = [
        CountPoint(8, misfit="too small"),
        CountPoint(16, {"colocate": 9.0, "split": 5.0}),
        CountPoint(24, misfit="two types"),
        CountPoint(32, {"split": 4.0}),
    ]
    assert crossovers(points) == []
    chart = device_counts_chart(points)
    lines = [line["points"].count(",") for line in shapes(chart, "polyline")]
    assert max(lines) == 1
    assert (
        misfits_in_words(points)
        == "None of these strategies fits on 8 devices: too small; on 24 devices: two types"
    )
    assert misfits_in_words(points[1:2]) == ""


def test_a_row_of_the_map_says_the_type_of_its_devices():
    cluster = ClusterSpec.preset("1 x h100x4 + 1 x a100-80x4")
    rows = rows_of(plan_on(2, pp=1), cluster)
    assert [(row.name(), row.device) for row in rows] == [("node-0", "h100-80"), ("node-1", "a100-80")]
    assert "a100-80" in placement_map(rows, plan_on(2, pp=1))


def test_lengths_are_all_in_the_histogram_and_the_line_falls_to_none():
    lengths = [1, 1, 5, 80, 100]
    found = bins_of(lengths)
    assert sum(count for _, _, count in found) == len(lengths)
    assert found[0] == (1, 3, 2)
    assert [running(lengths, tokens) for tokens in (0, 1, 99, 100)] == [5, 3, 1, 0]
    assert groups(length_histogram(lengths), "bin") == len(found)
    assert "no samples" in length_histogram([])
    assert groups(length_histogram(lengths), "measured") == 0
    measured = length_histogram(lengths, [(0.0, 8), (1.0, 2), (4.0, 0)])
    assert groups(measured, "measured") == 1
    assert "8 responses, the last after 4 s" in measured


def test_health_is_a_panel_each_with_marks_of_recoveries():
    panels = [
        Panel("reward", {"critic/score/mean": [(1, 0.5), (2, 0.7)]}),
        Panel("entropy", {"e": [(1, 2.0)]}),
    ]
    chart = health_chart(panels, [2])
    assert groups(chart, "panel") == 2
    assert len([line for line in shapes(chart, "line") if line.get("class") == "limit"]) == 2
    assert "no metrics" in health_chart([])


def test_flows_between_pools_name_both():
    plan = plan_on(1, pp=1)
    chart = flows_chart([Flow("weights of actor", "all", "all", 3e12, far=True)], plan)
    assert "3,000" in chart
    assert shapes(chart, "rect")[0]["fill"] == "#e15759"
