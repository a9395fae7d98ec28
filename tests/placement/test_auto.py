"""Whole plans: they fit, they keep dtypes and pins, and given strategies are priced beside them."""

from dataclasses import replace

import pytest
from plan_requests import LLAMA_1B, LLAMA_8B, SHORT, TAILED, ppo

from rolemesh.placement.auto import plan_auto, plan_strategy, search_plan
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.explain import explain_result
from rolemesh.placement.hardware import hardware
from rolemesh.placement.lengths import Fixed
from rolemesh.placement.memory import (
    Demand,
    MemoryItems,
    check_fit,
    generation_memory,
    inference_memory,
    rank_params,
    software,
    state_memory,
    training_memory,
)
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.pools import PlacementError
from rolemesh.placement.predict import predict
from rolemesh.placement.search import Pin

pytestmark = pytest.mark.full


def demands(plan, request, pool):
    """What a pool's roles need, by the memory model alone, at micro-batches of the longest sequences."""
    longest, found = round(request.workload.longest_tokens), {}
    for role in pool.roles:
        mine, layout, settings = request.roles[role], plan.layout_of(role), plan.settings_of(role)
        keys = {"micro_batch": settings.micro_batch, "seq_len": longest}
        if request.generates(role):
            paged = mine.engine == "paged"
            prompts = settings.micro_batch * request.workload.prompt_lengths.maximum
            tokens = longest if not paged else request.workload.prompt_lengths.mean
            operations = {
                "generate": generation_memory(
                    mine.shape,
                    layout,
                    n_sequences=settings.micro_batch,
                    tokens=tokens,
                    **({} if paged else {"page_tokens": 1, "prefill_tokens": prompts}),
                )
            }
        elif request.trains(role):
            by = software("megatron")
            rows = -(-request.workload.mini_batch // layout.dp)
            n_micro = -(-rows // settings.micro_batch)
            update = training_memory(
                mine.shape, layout, **keys, n_micro_batches=n_micro, recompute=settings.recompute, by=by
            )
            states = state_memory(rank_params(mine.shape, layout, update.stage), layout, by)
            scoring = MemoryItems(states, inference_memory(mine.shape, layout, **keys).working)
            operations = {"update": update, "score": scoring}
        else:
            operations = {"score": inference_memory(mine.shape, layout, **keys)}
        found[role] = Demand(operations, layout)
    return found


@pytest.mark.parametrize("cluster", ["1 x h100x8", "1 x a100-40x8", "2 x a100-40x4 + 1 x h100x4"])
def test_a_plan_fits_by_the_memory_model(cluster):
    request = ppo(cluster, workload=TAILED, engine="hf", reward="model")
    plan = plan_auto(request)
    assert set(plan.roles) == set(request.roles)
    for pool in plan.pools:
        fit = check_fit(demands(plan, request, pool), hardware(plan.device_types[pool.name]))
        assert fit.fits, str(fit)
        assert plan.prediction.peak[pool.name] <= plan.prediction.limit[pool.name]
    assert plan.proof.optimal


def test_bf16_roles_stay_off_the_v100s_of_a_mixed_cluster():
    request = ppo("1 x a100-40x4 + 2 x v100x8", dtypes={"ref": "float16"}, engine="hf")
    plan = plan_auto(request)
    kinds = {role: plan.device_types[plan.pool_of(role).name] for role in plan.roles}
    assert {kinds[role] for role in ("actor", "rollout", "critic")} == {"a100-40"}
    with pytest.raises(PlacementError, match="actor is in bfloat16: v100-32 has float16, float32"):
        plan_auto(ppo("2 x v100x8", engine="hf"))


def test_the_best_plan_is_no_slower_than_any_strategy_and_reads_back():
    request = ppo("2 x h100x8", LLAMA_8B, LLAMA_1B, workload=TAILED, runnable=False)
    plan = plan_auto(request)
    assert PlacementPlan.from_yaml(plan.to_yaml()) == plan
    assert plan_strategy(request, plan).prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-4)
    for name in ("colocate", "split", "standalone"):
        other = plan_strategy(request, name)
        assert other.strategy == name
        assert other.prediction.step_s >= plan.prediction.step_s * (1 - 1e-4)
        assert set(other.prediction.operations_s) == set(plan.prediction.operations_s)
        assert all(sum(items.values()) > 0 for items in other.prediction.memory.values())


def test_the_same_request_gives_the_same_plan():
    first, second = (plan_auto(ppo("2 x a100x8", workload=TAILED, runnable=False)) for _ in range(2))
    assert replace(first, proof=None) == replace(second, proof=None)


def test_pins_of_pools_devices_and_layouts_hold():
    pins = [
        Pin(("actor", "critic"), "apart"),
        Pin(("critic",), "devices", 4),
        Pin(("actor",), "tp", 4),
        Pin(("ref",), "micro_batch", 1),
    ]
    plan = plan_auto(ppo("2 x h100x8", workload=TAILED), pins=pins)
    assert plan.pool_of("actor") != plan.pool_of("critic")
    assert plan.pool_of("critic").world == 4
    assert plan.layout_of("actor").tp == 4
    assert plan.settings_of("ref").micro_batch == 1


def test_slots_of_a_cpu_are_planned_too():
    cluster = ClusterSpec.uniform(1, 2, device_kind="cpu")
    tiny = replace(LLAMA_1B, n_layers=2, hidden=64, ffn=128, n_heads=4, n_kv_heads=2, head_dim=16, vocab=256)
    dtypes = dict.fromkeys(("actor", "rollout", "critic", "ref"), "float32")
    load = replace(SHORT, prompts=16, mini_batch_samples=None, response_lengths=Fixed(16))
    request = replace(ppo("1 x h100x8", tiny, workload=load, engine="hf", dtypes=dtypes), cluster=cluster)
    plan = plan_auto(request)
    assert plan.n_devices <= 2
    assert all(pool.device_kind == "cpu" for pool in plan.pools)
    assert {plan_strategy(request, name).strategy for name in ("colocate", "split")} == {"colocate", "split"}


def test_pools_of_several_device_types_are_refused():
    with pytest.raises(PlacementError, match="mixes devices of types a100-40, h100-80"):
        plan_strategy(ppo("1 x a100-40x8 + 1 x h100x8"), "colocate")


def test_what_does_not_fit_is_told_with_the_item_the_rank_and_what_would_do():
    changes = {"critic": {"recompute": "none", "micro_batch_tokens": 131_072}}
    load = replace(TAILED, mini_batch_samples=None)
    request = ppo("1 x a100-80x8", LLAMA_1B, LLAMA_8B, workload=load, engine="hf", changes=changes)
    with pytest.raises(PlacementError) as caught:
        plan_auto(request)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("nothing fits: critic")
    assert "device memory over by" in lines[0]
    assert "GiB" in lines[0]
    assert "on rank" in lines[0]
    assert any(line.startswith("would fit: critic with recompute full") for line in lines[1:])
    assert any(line.startswith("would fit: critic with micro-batch of") for line in lines[1:])
    critic = replace(request.roles["critic"], recompute="full")
    relaxed = replace(request, roles={**request.roles, "critic": critic})
    assert plan_auto(relaxed).settings_of("critic").recompute == "full"


def test_a_cluster_that_is_too_small_is_told_how_many_nodes_would_do():
    with pytest.raises(PlacementError, match=r"would fit: with \d+ more nodes of 1 x a100-40"):
        plan_auto(ppo("1 x a100-40x1", LLAMA_8B, LLAMA_1B, engine="hf"))


def test_losing_strategies_are_told_why():
    found = search_plan(ppo("2 x h100x8", workload=TAILED, runnable=False))
    lines = explain_result(found)
    assert "proven best" in lines[0]
    for name in ("colocate", "split", "standalone"):
        assert any(line.startswith(f"{name}: ") for line in lines[1:])


def test_the_timeline_of_fixed_lengths_is_the_plan_itself():
    request = ppo("1 x h100x8", workload=SHORT)
    plan = plan_auto(request)
    told = predict(plan, request, steps=2, seeds=range(3))
    assert told.simulation.period_s == pytest.approx([plan.prediction.step_s] * 2, rel=1e-4)
    assert told.range.step_s[0.05] == told.range.step_s[0.95]
    assert {span.name for span in told.simulation.timeline.spans} == set(plan.prediction.operations_s)


def test_sampled_lengths_make_a_range_around_the_expected_step():
    request = ppo("1 x h100x8", workload=TAILED)
    plan = plan_auto(request)
    told = predict(plan, request, steps=2, seeds=range(6))
    low, middle, high = (told.range.step_s[q] for q in (0.05, 0.5, 0.95))
    assert low < middle < high
    assert middle == pytest.approx(plan.prediction.step_s, rel=0.1)
    again = predict(plan, request, steps=2, seeds=range(6))
    assert again.range == told.range
