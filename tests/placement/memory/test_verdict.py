"""What fits on a device, and by how much a role is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.placement.hardware import hardware
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory import (
    GIB,
    Demand,
    Fit,
    MemoryItems,
    Shortfall,
    check_fit,
    process_memory,
    software,
    usable_bytes,
)
from rolemesh.placement.memory.process import communicators, context_bytes

A100 = hardware("a100-40")
SNUG = replace(software("megatron"), expandable=True)  # no slack
LAYOUT = Layout(tp=2, dp=2, pp=2)


def items(resident: float, working: float, stage: int = 0) -> MemoryItems:
    return MemoryItems({"weights": resident * GIB}, {"activations": working * GIB}, stage)


def test_communicators_of_a_layout() -> None:
    assert communicators(Layout()) == 0
    assert communicators(Layout(dp=8)) == 2  # data parallel, and all ranks
    # tp, pp, dp; tp x pp for gradient norms; both ends of the pipeline; all ranks
    assert communicators(Layout(tp=8, pp=12, dp=4)) == 6


def test_residents_add_up_and_one_operation_runs_at_a_time() -> None:
    actor = Demand({"update_actor": items(10, 8), "old_log_prob": items(10, 2)}, LAYOUT)
    ref = Demand({"ref_log_prob": items(6, 3)}, LAYOUT)
    verdict = check_fit({"actor": actor, "ref": ref}, A100, by=SNUG, margin=0)
    process = context_bytes("a100-40") + 2 * 6 * 294 * 2**20
    assert isinstance(verdict, Fit)
    assert (verdict.role, verdict.operation) == ("actor", "update_actor")
    assert verdict.used == pytest.approx(process + 24 * GIB)


def test_an_offloaded_role_is_away_while_others_run() -> None:
    actor = Demand({"update_actor": items(20, 8)}, LAYOUT, offloaded=True)
    rollout = Demand({"generate": items(20, 10)}, LAYOUT, offloaded=True)
    assert check_fit({"actor": actor, "rollout": rollout}, A100, by=SNUG).fits
    stay = {"actor": replace(actor, offloaded=False), "rollout": replace(rollout, offloaded=False)}
    assert not check_fit(stay, A100, by=SNUG).fits


def test_a_shortfall_names_role_rank_item_and_gib() -> None:
    critic = Demand({"update_critic": items(30, 10, stage=1)}, LAYOUT)
    verdict = check_fit({"critic": critic}, A100, by=SNUG, margin=0)
    assert isinstance(verdict, Shortfall)
    assert (verdict.role, verdict.operation, verdict.rank) == ("critic", "update_critic", 4)
    assert (verdict.item, verdict.item_bytes) == ("weights", 30 * GIB)
    # 39.39 GiB of device; 1573 MiB of context, 6 communicators of 294 MiB, 40 GiB of tensors
    over = 40 + (1573 + 6 * 294) / 1024 - 39.39
    assert verdict.over / GIB == pytest.approx(over, abs=1e-9)
    assert f"update_critic of critic is {over:.1f} GiB over on rank 4" in str(verdict)


def test_the_largest_item_can_be_another_roles() -> None:
    actor, ref = Demand({"train": items(15, 12)}, LAYOUT), Demand({"score": items(20, 1)}, LAYOUT)
    verdict = check_fit({"actor": actor, "ref": ref}, A100, by=SNUG)
    assert isinstance(verdict, Shortfall)
    assert (verdict.role, verdict.item) == ("actor", "ref's states")


def test_slack_grows_with_the_working_set_unless_segments_expand() -> None:
    loose = process_memory(items(1, 10), "a100-80", Layout(), software("megatron"))
    snug = process_memory(items(1, 10), "a100-80", Layout(), SNUG)
    assert loose["allocator slack"] == pytest.approx((0.106 + 0.157) / 2 * 10 * GIB)
    assert "allocator slack" not in snug


def test_a_cpu_slot_has_no_context() -> None:
    cpu = hardware("cpu")
    assert usable_bytes(cpu, {"actor": Layout(dp=2)}) == 0.99 * cpu.memory_bytes


def test_usable_bytes_leave_out_context_and_communicators() -> None:
    taken = (1573 + 2 * 294) * 2**20
    assert usable_bytes(A100, {"actor": Layout(dp=8)}) == 0.99 * A100.memory_bytes - taken


def test_a_plan_leaves_one_percent_of_the_device_free() -> None:
    assert check_fit({"ref": Demand({"score": items(10, 1)}, LAYOUT)}, A100).limit == 0.99 * A100.memory_bytes
