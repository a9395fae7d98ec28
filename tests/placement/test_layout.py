"""Rank arithmetic against brute force over coordinates, and messages that hold the legal values."""

import dataclasses
import itertools

import pytest

from rolemesh.placement.layout import Coords, Layout, LayoutError
from rolemesh.placement.model import Experts, ModelShape

LAYOUTS = [Layout(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp, pp in itertools.product((1, 2, 3), repeat=4)]
SHAPE_40_8 = ModelShape("qwen2", 4, 5120, 13_824, 40, 8, 128, 1000, 2048)


def _coords_by_hand(layout: Layout, rank: int) -> Coords:
    """tp fastest, then cp, dp, pp slowest, by division."""
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coords(pp, dp, cp, tp)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coords_and_grid_agree_with_division_by_hand(layout):
    for rank in range(layout.world):
        coords = layout.coords(rank)
        assert coords == _coords_by_hand(layout, rank)
        assert layout.grid[coords] == rank


@pytest.mark.parametrize(
    "axes", [(), ("tp",), ("dp",), ("pp",), ("tp", "pp"), ("cp", "dp"), ("dp", "tp", "pp", "cp")]
)
def test_a_group_is_every_rank_that_differs_only_along_its_axes(axes):
    for layout in LAYOUTS:
        groups = layout.groups(*axes)
        for group in groups:
            first = _coords_by_hand(layout, group[0])
            alike = [
                rank
                for rank in range(layout.world)
                if all(
                    getattr(_coords_by_hand(layout, rank), axis) == getattr(first, axis)
                    for axis in Coords._fields
                    if axis not in axes
                )
            ]
            assert group == alike
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert groups == sorted(groups)


def test_a_replica_is_cut_over_tp_and_pp_and_its_results_are_at_the_last_stage():
    layout = Layout(tp=2, dp=2, pp=2)
    assert layout.replica(0) == [0, 1, 4, 5]
    assert layout.replica(1) == [2, 3, 6, 7]
    assert [layout.collect_rank(dp_rank) for dp_rank in range(2)] == [4, 6]


def test_indices_outside_the_layout_are_refused():
    layout = Layout(tp=2, dp=2)
    for call in (lambda: layout.coords(4), lambda: layout.coords(-1), lambda: layout.replica(-1)):
        with pytest.raises(LayoutError, match="outside this layout"):
            call()
    with pytest.raises(LayoutError, match=r"no 'tpp' \(known: pp, dp, cp, tp\); did you mean tp\?"):
        layout.groups("tpp")


def test_dp_fills_what_the_pins_leave():
    assert Layout.fill({"tp": 8, "pp": 4}, 64) == Layout(tp=8, pp=4, dp=2)
    assert Layout.fill({}, 3) == Layout(dp=3)
    assert Layout.fill({"tp": 2, "dp": 2, "sequence_parallel": True}, 4).dp == 2


def test_fill_names_the_sizes_that_do_not_divide_and_those_that_would():
    with pytest.raises(
        LayoutError, match=r"= 6 ranks per replica do not divide the pool's 8 .* legal tp: 1, 2, 4, 8"
    ):
        Layout.fill({"tp": 6}, 8)
    with pytest.raises(LayoutError, match=r"legal pp: 1, 2, 4"):
        Layout.fill({"tp": 2, "pp": 3}, 8)
    with pytest.raises(LayoutError, match=r"= 4 ranks, the pool has 8; dp=4 would use them all"):
        Layout.fill({"tp": 2, "dp": 2}, 8)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tpp": 2}, "did you mean tp"),
        ({"tp": 0}, "tp must be a whole number of at least 1, got 0"),
        ({"tp": "2"}, "got '2'"),
        ({"tp": True}, "got True"),
        ({"sequence_parallel": 1}, "must be true or false"),
        ({"sequence_parallel": True}, "needs tp > 1"),
    ],
)
def test_a_wrong_pin_is_refused_with_its_value(pins, message):
    with pytest.raises(LayoutError, match=message):
        Layout.fill(pins, 4)


def test_tp_that_does_not_divide_the_heads_lists_the_legal_sizes():
    message = (
        r"tp=6 does not divide the 40 attention heads; legal tp for 6 devices: 1, 2 \(4 leaving 2 idle\)$"
    )
    with pytest.raises(LayoutError, match=message):
        Layout(tp=6).check(SHAPE_40_8)
    with pytest.raises(LayoutError, match="neither divides the 8 KV heads nor is a multiple"):
        Layout(tp=5).check(SHAPE_40_8)
    with pytest.raises(LayoutError, match=r"tp=3 .*legal tp for 3 devices of a pipeline stage: 1"):
        Layout(tp=3, pp=2).check(SHAPE_40_8)


def test_kv_heads_may_be_split_or_copied():
    one_kv_head = ModelShape("llama", 2, 64, 128, 4, 1, 16, 100, 64)
    Layout(tp=4).check(one_kv_head)
    Layout(tp=8).check(SHAPE_40_8)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(LayoutError, match=r"pp=5 .* the model has 4 layers"):
        Layout(pp=5).check(SHAPE_40_8)


EXPERTS = Experts(n=8, top_k=2, ffn=96)
MIXTURE = ModelShape("mixtral", 8, 64, 100, 8, 4, 8, 1000, 512, moe=EXPERTS)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(ep=3, dp=3), "ep=3 does not divide the 8 experts"),
        (Layout(ep=8, dp=4), "ep=8 x etp=1 does not divide the 4 ranks of a pipeline stage"),
        (Layout(ep=4, etp=2, dp=4), "ep=4 x etp=2 does not divide the 4 ranks"),
        (Layout(etp=5, dp=5), "etp=5 does not divide an expert's 96"),
        (Layout(pp=4, vpp=3), "pp=4 x vpp=3 leaves stages without a layer: the model has 8 layers"),
        (Layout(vpp=2), "vpp=2 interleaves pipeline stages: it needs pp > 1"),
        (Layout(tp=16), "tp=16 does not divide the 8 attention heads"),
    ],
    ids=str,
)
def test_planning_asks_only_whether_the_model_can_be_cut(layout, message):
    with pytest.raises(LayoutError, match=message):
        layout.check_cut(MIXTURE)


def test_what_is_planned_for_may_be_more_than_what_runs():
    layout = Layout(tp=8, cp=2, dp=2, pp=2, vpp=4, ep=8, etp=2)  # tp does not divide ffn: no layer is dense
    layout.check_cut(MIXTURE)
    glm = dataclasses.replace(MIXTURE, family="glm4_moe")
    with pytest.raises(LayoutError, match="glm4_moe models can be planned for but not run yet"):
        layout.check(glm)
    dense = dataclasses.replace(MIXTURE, moe=None)
    with pytest.raises(LayoutError, match="ep=8, etp=2 cuts experts, and the model has none"):
        layout.check_cut(dense)


def test_experts_are_whole_or_cut_over_tp_and_tp_needs_sequence_parallel():
    Layout(dp=4, ep=4).check(MIXTURE)
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True).check(MIXTURE)
    with pytest.raises(
        LayoutError, match="etp=2 is not supported: experts are whole, or cut over tp: 1 or tp=4"
    ):
        Layout(tp=4, etp=2, sequence_parallel=True).check(MIXTURE)
    with pytest.raises(LayoutError, match="with tp=2 needs sequence_parallel: true"):
        Layout(tp=2, ep=2).check(MIXTURE)
    shared = dataclasses.replace(MIXTURE, moe=dataclasses.replace(EXPERTS, shared_ffn=49))
    with pytest.raises(LayoutError, match="tp=2 does not divide the 49 columns of the shared experts"):
        Layout(tp=2).check_cut(shared)


def test_experts_spread_over_a_stages_ranks():
    layout = Layout(tp=2, dp=4, pp=2, ep=2, etp=2)
    assert layout.expert_grid[0].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert layout.expert_coords(11) == (1, 0, 1, 1)
    assert layout.expert_groups("edp")[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.expert_groups("ep", "etp")[0] == [0, 1, 2, 3]
    assert [layout.rank(layout.coords(rank)) for rank in range(16)] == list(range(16))
    with pytest.raises(LayoutError, match="rank 16 is outside"):
        layout.expert_coords(16)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"pp": 2, "pp_layers": [3]}, r"pp_layers \[3\] are for 1 parts of a pipeline, pp=2 has 2"),
        ({"pp": 2, "vpp": 2, "pp_layers": [1, 1]}, "pp=2 x vpp=2 has 4"),
        ({"pp": 2, "pp_layers": [4, 0]}, "at least 1"),
        ({"pp": 2, "pp_layers": 4}, "whole numbers"),
    ],
)
def test_uneven_stages_are_checked(pins, message):
    with pytest.raises(LayoutError, match=message):
        Layout(**pins)


def test_stages_have_the_layers_that_are_given_or_even_ones():
    assert Layout(pp=2).stages(7) == [[range(0, 4)], [range(4, 7)]]
    assert Layout(pp=2, pp_layers=(1, 6)).stages(7) == [[range(0, 1)], [range(1, 7)]]
    interleaved = Layout(pp=2, vpp=2, pp_layers=(1, 1, 3, 2))
    assert interleaved.stages(7) == [[range(0, 1), range(2, 5)], [range(1, 2), range(5, 7)]]
    assert str(interleaved) == "pp=2 vpp=2 pp_layers=1+1+3+2"
    with pytest.raises(LayoutError, match="are 7 layers, the model has 4"):
        interleaved.check(SHAPE_40_8)
    Layout(pp=2, vpp=2, cp=2).check(SHAPE_40_8)
