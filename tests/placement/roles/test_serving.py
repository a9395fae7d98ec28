"""How the engines that generate may be cut: what ours run, and what others do."""

from plan_requests import LLAMA_8B, MIXTRAL, ppo

from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.layout import Layout
from rolemesh.placement.roles.choices import layouts

NODE, UNEVEN = DeviceSet("h100-80", (8,)), DeviceSet("h100-80", (6, 2))


def cuts(devices: DeviceSet, **keys) -> set[tuple[int, int, int, int]]:
    found: list[Layout] = layouts(ppo("2 x h100x8", **keys), "rollout", devices)
    return {(layout.tp, layout.dp, layout.pp, layout.ep) for layout in found}


def test_our_engines_are_cut_over_tp_alone():
    assert cuts(NODE, actor=LLAMA_8B) == {(tp, 8 // tp, 1, 1) for tp in (1, 2, 4, 8)}
    assert cuts(NODE, actor=MIXTRAL) == {(tp, 8 // tp, 1, 1) for tp in (1, 2, 4, 8)}
    assert (8, 1, 1, 1) in cuts(NODE, actor=LLAMA_8B, runnable=False)
    assert cuts(NODE, actor=LLAMA_8B, runnable=False, changes={"rollout": {"pins": {"pp": 2}}})
    assert not cuts(NODE, actor=LLAMA_8B, changes={"rollout": {"pins": {"pp": 2}}})


def test_our_engines_stay_on_one_node():
    assert {tp for tp, *_ in cuts(UNEVEN, actor=LLAMA_8B)} == {1, 2}
    assert {tp for tp, *_ in cuts(UNEVEN, actor=LLAMA_8B, runnable=False)} >= {1, 2, 4, 8}
