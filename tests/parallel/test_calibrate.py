"""Calibration: fits that find the constants points were made with, and a real one of this machine's cores."""

import math
import time
from dataclasses import replace
from datetime import date

import psutil
import pytest
import torch
from gloo import run_ranks

from rolemesh.parallel import calibrate
from rolemesh.parallel.calibrate import CalibrationError, profile_of
from rolemesh.parallel.calibration import fit, kernels
from rolemesh.parallel.calibration.points import Point, seconds_of
from rolemesh.placement.hardware import hardware, load_profile
from rolemesh.placement.timing import collectives as net
from rolemesh.placement.timing.efficiency import Efficiency, Machine, efficiency
from rolemesh.placement.timing.gemm import gemm_seconds
from rolemesh.placement.timing.links import Links

SLOT = replace(hardware("cpu"), flops={"float32": 100e9, "bfloat16": 20e9}, memory_bytes_per_s=10e9)


def points(gemm32=0.5, gemm16=0.8, tile_start=100.0, link=2e9, latency=40.0, world=2):
    """What a slot with these constants would be measured as; the rest is worked out by hand below."""
    constants = {"gemm32": gemm32, "gemm16": gemm16, "tile_start": tile_start, "kernel": 1e-6, "memory": 0.75}
    machine = Machine.of(replace(SLOT, constants=constants))
    made = [
        Point("gemm", dtype, (m, m, k), 1e-6 + gemm_seconds(m, m, k, machine, dtype, rows=(k, k, m)))
        for dtype in ("float32", "bfloat16")
        for m in (32, 128, 512)
        for k in (32, 512)
    ]
    group, links = net.Group(world, world), Links(per_node=world, intra=link, latency=latency)
    for size in (2**12, 2**16, 2**20, 2**23):
        made += [
            Point("all_reduce", "float32", (size,), net.all_reduce(size, group, links, Efficiency(link=1.0))),
            Point("all_gather", "float32", (size,), net.all_gather(size, group, links, Efficiency(link=1.0))),
            Point("send", "float32", (size,), net.send(size, False, links, Efficiency(link=1.0))),
        ]
    made += [Point(kind, "float32", (3 * 10**9,), 0.4) for kind in ("add",)]  # 7.5e9 bytes/s
    made += [Point(kind, "float32", (10**10,), 1.0) for kind in ("copy", "sum")]
    made += [Point(kind, "float32", (10**9,), s) for kind, s in (("to_host", 0.5), ("from_host", 0.25))]
    made += [Point("start", "float32", (192,), 1e-6)]
    for n, infer, train in ((1, 2e-3, 9e-3), (5, 6e-3, 33e-3)):  # a layer: 1 ms without gradients, 6 ms with
        made += [Point("layers_infer", "float32", (n,), infer), Point("layers_train", "float32", (n,), train)]
    for tokens in (128, 512):  # 8 heads of 64, causal: at half of the peak forward, a quarter backward
        flops = 2 * 8 * tokens * tokens * 64 * (1 + 128 / tokens)
        half = efficiency("cpu").head_half
        fill = 64 / (64 + half) * (128 + half) / 128
        made += [
            Point("attention_forward", "float32", (1, 8, tokens, 64), flops / (100e9 * fill * 0.5)),
            Point("attention_backward", "float32", (1, 8, tokens, 64), 2.5 * flops / (100e9 * fill * 0.25)),
        ]
    return made


def test_the_fits_find_the_constants_that_the_points_were_made_with():
    profile = replace(SLOT, constants={"kernel": 1e-6, "memory": 0.75})
    found, error = fit.fit_gemm(points(), profile)
    assert error < 0.02
    assert found == pytest.approx({"gemm32": 0.5, "gemm16": 0.8, "tile_start": 100.0}, rel=0.08)
    rate, latency, error = fit.fit_links(points(), 2)
    assert error < 0.02
    assert (rate, latency) == pytest.approx((2e9, 40.0), rel=0.05)
    shares, error = fit.fit_attention(points(), profile, "float32")
    assert shares == pytest.approx({"flash": 0.5, "flash_backward": 0.25})
    assert error == pytest.approx(0.0, abs=1e-9)


def test_a_layers_host_time_is_what_a_further_layer_costs():
    # 1 ms is half of 2 ms, 6 ms three times 2 ms
    assert fit.host_seconds(points()) == pytest.approx(2e-3)


def test_a_slots_profile_has_what_was_measured_and_reads_back(tmp_path):
    calibration = profile_of(points(), hardware("cpu"), 2, "a machine", date(2026, 1, 2))
    (tmp_path / "cpu.yaml").write_text(calibration.to_yaml())
    profile = load_profile(tmp_path / "cpu.yaml")
    assert profile.memory_bytes_per_s == 10e9
    assert profile.pcie_bytes_per_s == 2e9
    assert profile.latency == pytest.approx(40, rel=0.05)
    assert profile.constants["memory"] == 0.75
    assert profile.constants["host"] == 2e-3
    assert profile.sources["memory_bytes_per_s"].startswith("measured on 2026-01-02")
    assert profile.nic_bytes_per_s == hardware("cpu").nic_bytes_per_s
    machine = Machine.of(profile)
    errors = [
        abs(math.log((1e-6 + gemm_seconds(*p.sizes, machine, p.dtype)) / p.seconds))
        for p in points()
        if p.kind == "gemm"
    ]
    assert max(errors) < 0.25
    assert sum(errors) / len(errors) < 0.1
    assert len(calibration.summary()) > 10


def test_a_gpu_keeps_its_data_sheets_peaks(tmp_path):
    sheet = hardware("h100-80")
    fast = [replace(p, seconds=p.seconds / 1000) for p in points()]
    fast += [replace(p, dtype="bfloat16") for p in fast if p.kind.startswith("attention")]
    calibration = profile_of(fast, sheet, 8, "a machine", date(2026, 1, 2))
    (tmp_path / "h100.yaml").write_text(calibration.to_yaml())
    profile = load_profile(tmp_path / "h100.yaml")
    assert profile.flops == sheet.flops
    assert profile.memory_bytes_per_s == sheet.memory_bytes_per_s
    assert 0 < profile.constants["gemm16"] < 1


def test_slow_runs_are_few_and_the_quicker_ones_count():
    taken = iter([0.0, 0.02, 0.001, 0.001, 0.001, 0.02])
    seconds = seconds_of(lambda: time.sleep(next(taken)), torch.device("cpu"), 0.0, runs=5)
    assert 0.001 <= seconds < 0.01


def test_the_kernels_of_a_core_are_measured_in_every_dtype(monkeypatch):
    small = kernels.Extent(((16, 16, 16),), (16,), 2**12, 0.0)
    monkeypatch.setattr(kernels.Extent, "of", classmethod(lambda cls, device, quick: small))
    found = {(point.kind, point.dtype) for point in kernels.measure(torch.device("cpu"), True)}
    assert {("gemm", "bfloat16"), ("attention_backward", "float32"), ("sum", "float32")} <= found


@pytest.mark.full
def test_a_curve_ends_on_all_ranks_where_one_is_too_slow():
    """Else their numbers of points, and so of barriers, would differ and all would wait forever."""

    def points_of(rank: int, world: int) -> int:
        extent = kernels.Extent(((16, 16, 16), (32, 32, 32)), (16,), 2**12, 0.0)
        slow = {0: 0.0, 1: 2 * kernels.SLOWEST_S}[rank]
        kernels.seconds_of = lambda run, device, budget_s: slow
        return len(list(kernels._products(torch.device("cpu"), torch.float32, extent)))

    assert run_ranks(points_of, 2, timeout=60) == [1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_no_gpu_is_said_and_a_rank_that_fails_brings_its_traceback():
    with pytest.raises(CalibrationError, match="no GPU here"):
        calibrate.calibrate("cuda")
    with pytest.raises(CalibrationError, match=r"(?s)rank 0 of 1 failed:.*Traceback"):
        calibrate.measure("cuda", 1, quick=True)


def test_ranks_that_take_too_long_are_ended_and_what_they_did_is_said(monkeypatch):
    monkeypatch.setattr(calibrate, "LIMIT_S", {True: 0.3})
    with pytest.raises(CalibrationError, match=r"not done within 0.3 s; measured last: rank 0 nothing yet"):
        calibrate.measure("cpu", 2, quick=True)
    assert not [p for p in psutil.Process().children() if "calibration.rank" in " ".join(p.cmdline())]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_this_machines_cores_are_calibrated_for_real(tmp_path):
    calibration = calibrate.calibrate("cpu", quick=True)
    (tmp_path / "cpu.yaml").write_text(calibration.to_yaml())
    profile = load_profile(tmp_path / "cpu.yaml")
    assert 1e8 < profile.flops["float32"] < 1e13
    assert 1e8 < profile.memory_bytes_per_s < 1e12
    assert 1e6 < profile.link_bytes_per_s < 1e12
    kinds = {point.kind for point in calibration.points}
    assert {"gemm", "all_reduce", "all_gather", "reduce_scatter", "send", "to_host", "layers_train"} <= kinds
    assert all(point.seconds > 0 for point in calibration.points)
