"""Options of roles: legal, priced as the models price them, none worth having left out."""

import math
from dataclasses import replace

import pytest
from plan_requests import LLAMA_1B, LLAMA_8B, MIXTRAL, SHORT, TAILED, ppo

from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.hardware import hardware
from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Fixed, Measured
from rolemesh.placement.memory import software, training_memory
from rolemesh.placement.memory.process import slack_fraction
from rolemesh.placement.roles import PlannerCosts, RequestError
from rolemesh.placement.roles.choices import layouts
from rolemesh.placement.roles.seconds import Batch
from rolemesh.placement.timing.decode import Engine, decode_seconds
from rolemesh.placement.timing.efficiency import Machine
from rolemesh.placement.timing.layer import How
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import Run, training_seconds
from rolemesh.placement.timing.transfer import Remote
from rolemesh.placement.workload import Workload

pytestmark = pytest.mark.full

H100 = hardware("h100-80")
ONE, NODE, PAIR = DeviceSet("h100-80", (1,)), DeviceSet("h100-80", (8,)), DeviceSet("h100-80", (8, 8))


def option(costs, role, devices, **wanted):
    """The one option with these sizes; pareto may hide others, so everything is kept."""
    for cost in costs.options(role, devices):
        values = {**cost.option.layout.sizes(), **vars(cost.option)}
        if all(values[name] == value for name, value in wanted.items()):
            return cost
    raise AssertionError(f"no option of {role} with {wanted}")


@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B, MIXTRAL], ids=["1b", "8b", "moe"])
@pytest.mark.parametrize(
    "devices", [ONE, NODE, PAIR, DeviceSet("h100-80", (8, 8, 8))], ids=lambda d: str(d.world)
)
def test_every_option_can_be_cut_so_and_uses_all_devices(shape, devices):
    request = ppo("3 x h100x8", shape, runnable=False, workload=TAILED)
    costs = PlannerCosts(request)
    for role in request.roles:
        found = costs.options(role, devices)
        assert found
        for cost in found:
            cost.option.layout.check_cut(shape)
            assert cost.option.layout.world == devices.world
            assert set(cost.seconds) == {
                op.name for op in request.graph.operations if op.role == role and op.kind != "transfer"
            }
            assert all(0 < seconds < math.inf for seconds in cost.seconds.values())


@pytest.mark.parametrize("devices", [ONE, NODE, PAIR], ids=lambda d: str(d.world))
def test_what_is_to_be_run_is_only_what_the_workers_run(devices):
    request = ppo("2 x h100x8", engine="hf")
    costs = PlannerCosts(request)
    for role in request.roles:
        for cost in costs.options(role, devices):
            cost.option.layout.check(LLAMA_1B)
            assert cost.option.recompute in ("none", "full")
            if role == "rollout":
                assert cost.option.layout == Layout(dp=devices.world)
                assert not cost.option.offload


def test_states_of_our_workers_may_wait_on_the_host_and_layers_interleave():
    request = ppo("2 x h100x8", changes={"critic": {"pins": {"pp": 4}}})
    options = [cost.option for cost in PlannerCosts(request, keep=("offload", "vpp")).options("critic", NODE)]
    assert {option.offload for option in options} == {False, True}
    assert {option.layout.vpp for option in options} > {1}


def test_uneven_stages_hold_in_every_option():
    pins = {"pp": 2, "pp_layers": [7, 9]}
    found = PlannerCosts(ppo("1 x h100x8", changes={"actor": {"pins": pins}})).options("actor", NODE)
    assert {cost.option.layout.pp_layers for cost in found} == {(7, 9)}


def test_adapters_need_less_than_the_whole_model():
    pinned = {"pins": {"tp": 1, "pp": 1}, "offload": False}
    small, large = (
        min(
            cost.resident
            for cost in PlannerCosts(ppo("1 x h100x8", changes={"actor": mine})).options("actor", ONE)
        )
        for mine in ({**pinned, "lora_rank": 8}, pinned)
    )
    assert small < large / 4


@pytest.mark.parametrize("runnable", [True, False])
def test_experts_of_a_mixture_may_be_spread(runnable):
    found = PlannerCosts(ppo("1 x h100x8", MIXTRAL, runnable=runnable)).options("actor", NODE)
    assert {cost.option.layout.ep for cost in found} > {1}


def test_no_role_is_on_a_device_without_its_dtype():
    costs = PlannerCosts(ppo("1 x v100x8", dtypes={"ref": "float16"}))
    there = DeviceSet("v100-32", (8,))
    assert not costs.options("actor", there)
    assert costs.options("ref", there)


def test_pins_hold_in_every_option():
    costs = PlannerCosts(
        ppo("2 x h100x8", changes={"actor": {"pins": {"tp": 4, "pp": 2, "sequence_parallel": False}}})
    )
    found = costs.options("actor", PAIR)
    assert {(c.option.layout.tp, c.option.layout.pp, c.option.layout.dp) for c in found} == {(4, 2, 2)}
    assert not any(cost.option.layout.sequence_parallel for cost in found)


def test_an_update_takes_what_the_time_model_says_for_each_mini_batch():
    """64 samples of 256 tokens in mini-batches of 32 over dp=4: 2 updates, 8 sequences each, 2 at a time."""
    request = ppo("1 x h100x8", changes={"actor": {"pins": {"tp": 2, "pp": 1}, "micro_batch_tokens": 512}})
    cost = option(PlannerCosts(request), "actor", NODE, recompute="full")
    one = training_seconds(
        LLAMA_1B,
        Layout(tp=2, dp=4, sequence_parallel=True),
        micro_batch=2,
        n_micro_batches=4,
        seq_len=256,
        machine=Machine.of(H100),
        links=Links.of_profile(H100, 8),
        run=Run(How("bfloat16", fused=False), "full", chunked_head=True),
    )
    assert cost.option.micro_batch == 2
    assert cost.seconds["update_actor"] == pytest.approx(2 * one.total)


def test_an_incomplete_last_mini_batch_is_an_update_too():
    load = replace(SHORT, mini_batch_samples=48, epochs=2)  # 48 and 16, twice
    pins = {"actor": {"pins": {"tp": 8}, "micro_batch_tokens": 4 * 256, "recompute": "none"}}
    cost = option(PlannerCosts(ppo("1 x h100x8", workload=load, changes=pins)), "actor", NODE)
    links, machine = Links.of_profile(H100, 8), Machine.of(H100)

    def update(n):
        layout, run = (
            Layout(tp=8, sequence_parallel=True),
            Run(How("bfloat16", fused=False), chunked_head=True),
        )
        keys = {"machine": machine, "links": links, "run": run}
        return training_seconds(LLAMA_1B, layout, micro_batch=4, n_micro_batches=n, seq_len=256, **keys).total

    assert cost.seconds["update_actor"] == pytest.approx(2 * (update(12) + update(4)))


def test_training_bytes_are_those_of_the_memory_model():
    pins = {"actor": {"pins": {"tp": 2, "pp": 2}, "micro_batch_tokens": 1024, "recompute": "none"}}
    cost = option(PlannerCosts(ppo("1 x h100x8", LLAMA_8B, LLAMA_1B, changes=pins)), "actor", NODE)
    by = software("megatron")
    slack = 1 + slack_fraction(by)
    stages = [
        training_memory(
            LLAMA_8B,
            Layout(tp=2, pp=2, dp=2, sequence_parallel=True),
            micro_batch=4,
            seq_len=256,
            n_micro_batches=4,
            by=by,
            stage=stage,
        )
        for stage in (0, 1)
    ]
    fullest = max(items.resident_bytes + slack * items.working_bytes for items in stages)
    fixed = cost.items["communicators"]
    assert cost.resident + cost.working["update_actor"] == pytest.approx(fullest + fixed)
    assert sum(cost.items.values()) == pytest.approx(fullest + fixed)


def test_batches_of_the_hf_engine_wait_for_each_other():
    """64 sequences over 8 processes with room for 3: batches of 3, 3 and 2, all 128 tokens long."""
    changes = {"rollout": {"micro_batch_tokens": 3 * 256}}
    cost = option(PlannerCosts(ppo("1 x h100x8", engine="hf", changes=changes)), "rollout", NODE)

    def batch(n):
        return decode_seconds(
            LLAMA_1B,
            Layout(dp=8),
            prompt_tokens=128,
            response=Fixed(128),
            n_sequences=n,
            capacity_tokens=math.inf,
            machine=Machine.of(H100),
            links=Links.of_profile(H100, 8),
            engine=Engine(eager=True, python=False),
        ).total

    assert cost.option.micro_batch == 3
    assert cost.seconds["generate"] == pytest.approx(2 * batch(3) + batch(2))


def test_offload_costs_the_way_over_pcie_and_moves_bytes_to_the_host():
    changes = {
        role: {"pins": {"tp": 1, "pp": 1, "vpp": 1}, "micro_batch_tokens": 256, "recompute": "none"}
        for role in ("actor", "ref")
    }
    costs = PlannerCosts(ppo("1 x h100x8", runnable=False, changes=changes), keep=("offload",))
    stays, waits = (option(costs, "ref", NODE, offload=flag) for flag in (False, True))
    weights = stays.items["weights"]
    pcie = H100.pcie_bytes_per_s * 0.8
    assert waits.seconds["ref_log_prob"] - stays.seconds["ref_log_prob"] == pytest.approx(weights / pcie)
    assert waits.host == weights
    assert stays.resident - waits.resident == pytest.approx(weights)
    assert waits.working["ref_log_prob"] - stays.working["ref_log_prob"] == pytest.approx(weights)

    stays, waits = (option(costs, "actor", NODE, offload=flag) for flag in (False, True))
    states = stays.items["weights"] + stays.items["optimizer"]
    update = waits.seconds["update_actor"] - stays.seconds["update_actor"]
    assert update == pytest.approx(2 * states / pcie)  # brought in and taken back
    score = waits.seconds["old_log_prob"] - stays.seconds["old_log_prob"]
    assert score == pytest.approx(stays.items["weights"] / pcie)
    assert waits.host == pytest.approx(states)  # gradients are made anew


def test_no_option_is_quicker_than_the_floor():
    for runnable in (True, False):
        request = ppo("2 x h100x8", workload=TAILED, engine="hf" if runnable else "paged", runnable=runnable)
        costs = PlannerCosts(request)
        for devices in (ONE, NODE, PAIR):
            for role in request.roles:
                floor = costs.floor_s(role, devices)
                for cost in costs.options(role, devices):
                    assert all(cost.seconds[name] >= floor[name] for name in cost.seconds)


def test_options_are_the_best_of_all():
    """With everything kept apart the same best numbers are there."""
    request = ppo("1 x h100x8", LLAMA_8B, LLAMA_1B, workload=TAILED, runnable=False)
    everything = PlannerCosts(request, keep=("tp", "pp", "dp", "vpp", "micro_batch", "recompute", "offload"))
    for role in ("critic", "ref"):
        best, all_of_them = PlannerCosts(request).options(role, NODE), everything.options(role, NODE)
        assert len(best) < len(all_of_them)

        def row(cost):
            return (*cost.seconds.values(), cost.resident, max(cost.working.values()), cost.host)

        for cost in all_of_them:
            assert any(all(a <= b for a, b in zip(row(good), row(cost), strict=True)) for good in best)


def test_a_reward_without_devices_takes_its_stated_time():
    request = ppo("1 x h100x8", remote={"reward": Remote(2.0, 32.0)})
    assert request.seconds == {"reward": 2.0 + 64 / 32}
    assert ppo("1 x h100x8").seconds == {"reward": 0.0}
    assert "reward runs on no devices and is counted as taking no time" in ppo("1 x h100x8").notes()


def test_a_dtype_gap_between_actor_and_reference_is_told():
    notes = ppo("1 x h100x8", dtypes={"ref": "float16"}).notes()
    assert any("ref runs in float16, actor in bfloat16" in note for note in notes)


def test_roles_that_the_step_lacks_are_refused():
    request = ppo("1 x h100x8")
    with pytest.raises(RequestError, match="no role teacher"):
        replace(request, roles={**request.roles, "teacher": request.roles["ref"]})
    with pytest.raises(RequestError, match="update_critic needs role 'critic'"):
        replace(request, roles={role: r for role, r in request.roles.items() if role != "critic"})


def test_long_sequences_may_be_cut_over_context_parallel_ranks():
    long = Workload(16, Fixed(1024), Fixed(64_000))
    found = layouts(ppo("1 x h100x8", workload=long), "actor", NODE)
    assert {layout.cp for layout in found} >= {1, 2, 4, 8}


def test_experts_are_spread_as_the_workers_run_them():
    found = layouts(ppo("1 x h100x8", MIXTRAL), "actor", NODE)
    for layout in found:
        layout.check(MIXTRAL)
    assert {(layout.ep, layout.etp) for layout in found} >= {(1, 1), (2, 1), (8, 1), (2, 2)}
    pinned = {"actor": {"pins": {"sequence_parallel": False}}}
    found = layouts(ppo("1 x h100x8", MIXTRAL, changes=pinned), "actor", NODE)
    assert {layout.tp for layout in found} == {1}


def test_options_do_not_depend_on_what_was_asked_before():
    request = ppo("2 x h100x8", workload=TAILED, runnable=False)
    warm = PlannerCosts(request)
    for devices in (ONE, PAIR, NODE):
        warm.options("actor", devices)
    fresh = PlannerCosts(request).options("actor", NODE)
    again = warm.options("actor", NODE)
    assert [(c.option, dict(c.seconds), c.resident) for c in fresh] == [
        (c.option, dict(c.seconds), c.resident) for c in again
    ]


def test_long_sequences_do_not_share_a_micro_batch():
    """Room for 1000 tokens holds one of 600 or 1000; room for 2000 holds 2.5 of their mean."""
    load = replace(SHORT, prompt_lengths=Fixed(100.0), response_lengths=Measured((500.0, 900.0)))
    prices = PlannerCosts(ppo("1 x h100x8", workload=load)).seconds_of("actor", NODE)
    assert prices.n_micro(8, 1) == 8
    assert prices.n_micro(8, 2) == pytest.approx(8 * 800 / 2000)


def test_scoring_may_have_a_micro_batch_of_its_own():
    changes = {"actor": {"pins": {"tp": 2, "pp": 1}, "micro_batch_tokens": 256, "scoring_tokens": 4 * 256}}
    request = ppo("1 x h100x8", changes=changes)
    costs = PlannerCosts(request)
    found = option(costs, "actor", NODE, recompute="none")
    prices, batch = costs.seconds_of("actor", NODE), Batch.of(request, 4)
    assert found.option.micro_batch == 1
    assert found.seconds["old_log_prob"] == prices.infer(found.option.layout, 4, batch)
    assert found.seconds["update_actor"] == prices.train(found.option.layout, 1, "none", batch)


def test_streamed_responses_need_no_longest_one():
    request = ppo("1 x h100x8", runnable=False, workload=TAILED)
    waiting = option(PlannerCosts(replace(request, staleness=1)), "rollout", NODE, tp=1, offload=False)
    streamed = option(
        PlannerCosts(replace(request, staleness=1, streamed=True)), "rollout", NODE, tp=1, offload=False
    )
    assert streamed.seconds["generate"] < waiting.seconds["generate"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"streamed": True, "staleness": 1}, "runnable=False"),
        ({"gathered": True}, "runnable=False"),
        ({"fused_routing": False}, "runnable=False"),
        ({"streamed": True, "runnable": False}, "staleness 1"),
    ],
)
def test_ways_of_other_software_are_only_predicted(changes, said):
    with pytest.raises(RequestError, match=said):
        replace(ppo("1 x h100x8"), **changes)
