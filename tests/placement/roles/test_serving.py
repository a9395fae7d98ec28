"""How the engines that generate may be cut: what ours run, and what others do."""

from dataclasses import replace

import pytest
from plan_requests import LLAMA_1B, LLAMA_8B, MIXTRAL, SHORT, ppo

from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Fixed
from rolemesh.placement.roles import PlannerCosts, PlanRequest, Questions, RoleRequest
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


def judged(questions: Questions, **keys) -> PlanRequest:
    """A step that a placed judge of 8B scores."""
    request = ppo("1 x h100x8", reward="judge", **keys)
    judge = RoleRequest(LLAMA_8B, questions=questions, pins={"tp": 2}, micro_batch_tokens=65_536)
    return replace(request, roles={**request.roles, "reward": judge})


def of_judge(questions: Questions) -> tuple[float, float]:
    """Seconds and bytes of its only option on a node."""
    (cost,) = PlannerCosts(judged(questions)).options("reward", NODE)
    return cost.seconds["reward"], cost.resident + cost.working["reward"]


def test_a_judge_costs_what_a_rollout_of_its_questions_and_answers_does():
    load = replace(SHORT, prompt_lengths=Fixed(128 + 128 + 200), response_lengths=Fixed(64))
    rollout = {"rollout": {"shape": LLAMA_8B, "pins": {"tp": 2}, "micro_batch_tokens": 65_536}}
    request = ppo("1 x h100x8", workload=load, changes=rollout)
    (alike,) = PlannerCosts(request).options("rollout", NODE)
    seconds, size = of_judge(Questions(answer_tokens=64, frame_tokens=200))
    assert seconds == pytest.approx(alike.seconds["generate"])
    assert size == pytest.approx(alike.resident + alike.working["generate"])


def test_more_questions_and_two_samples_in_each_take_longer():
    once, _ = of_judge(Questions(64, 200))
    pairs, _ = of_judge(Questions(64, 200, per_sample=7, samples=2))
    assert pairs > 2 * once


def test_a_judge_is_planned_on_the_devices_that_suit_it():
    from rolemesh.placement.auto import plan_auto

    plan = plan_auto(judged(Questions(64, 200), actor=LLAMA_1B), time_limit_s=60)
    assert plan.layout_of("reward").tp == 2
    assert plan.prediction.operations_s["reward"] > 0
