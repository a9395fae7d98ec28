"""`rolemesh calibrate`: measure the devices of this machine, and write what they do as a profile."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rolemesh.parallel.calibration import fit
from rolemesh.parallel.calibration.points import Point
from rolemesh.placement.hardware import HardwareProfile, hardware
from rolemesh.placement.profile_file import profile_text

LIMIT_S = {True: 300.0, False: 1200.0}  # quick or not; what takes longer hangs
MOST_SLOTS = 8


class CalibrationError(RuntimeError):
    """Devices that cannot be measured: none there, a rank that failed or hangs."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on devices of one type, and the profile that follows from it."""

    device: str
    world: int
    machine: str
    day: date
    points: tuple[Point, ...]
    figures: dict[str, tuple[Any, str]]
    constants: dict[str, tuple[float, str]]

    def to_yaml(self) -> str:
        """A profile file, as `placement.hardware.load_profile` reads it, with the curves below."""
        return profile_text(
            {
                "device": self.device,
                "measured": self.day.isoformat(),
                "machine": self.machine,
                "figures": {name: list(entry) for name, entry in self.figures.items()},
                "constants": {name: list(entry) for name, entry in self.constants.items()},
                "curves": [point.row() for point in self.points],
            }
        )

    def summary(self) -> list[str]:
        """Lines for a person: each figure with where it is from."""
        lines = [f"{self.device}: {self.world} at once, {self.machine}"]
        for name, (value, source) in (*self.figures.items(), *self.constants.items()):
            each = value if isinstance(value, dict) else {"": value}
            said = ", ".join(f"{dtype} {amount:.4g}".strip() for dtype, amount in each.items())
            lines.append(f"  {name:<16} {said:<34} {source}")
        return lines


def calibrate(device: str = "", *, quick: bool = False, device_type: str = "") -> Calibration:
    """Measure this machine's GPUs ("cuda") or its cores as worker slots ("cpu"); by default GPUs, if any.

    `device_type` names the data sheet for what isn't measured, where the GPU's own name is not known.
    Raises CalibrationError, and HardwareError for a type that is not known.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device or ("cuda" if gpus else "cpu")
    if kind == "cuda" and not gpus:
        raise CalibrationError("torch reaches no GPU here; `rolemesh doctor` says why")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    world = gpus if kind == "cuda" else max(2, min(cores, MOST_SLOTS))
    sheet = hardware(device_type or (torch.cuda.get_device_name(0) if kind == "cuda" else "cpu"))
    points = measure(kind, world, quick=quick)
    return profile_of(points, sheet, world, _machine(kind, cores), date.today())


def measure(kind: str, world: int, *, quick: bool) -> tuple[Point, ...]:
    """Points of `world` ranks that measure at the same time: of each, the median over the ranks.

    Raises CalibrationError with the traceback of a rank that fails, or what the ranks do when it takes too
    long.
    """
    limit_s = LIMIT_S[quick]
    with tempfile.TemporaryDirectory(prefix="rolemesh-calibrate-") as name:
        folder = Path(name)
        ranks = [_start(folder, rank, world, kind, quick, limit_s) for rank in range(world)]
        try:
            _wait(ranks, folder, limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    columns = zip(*([Point.of_row(row) for row in rows] for rows in found), strict=True)
    return tuple(_median(same) for same in columns)


def profile_of(
    points: Sequence[Point], sheet: HardwareProfile, world: int, machine: str, day: date
) -> Calibration:
    """Figures and constants from the points; a GPU keeps its data sheet's peaks, a CPU slot has no other."""
    source = f"measured on {day.isoformat()}"
    figures: dict[str, tuple[Any, str]] = {}
    constants: dict[str, tuple[float, str]] = {}
    rates, peaks = fit.rates(points), fit.peak_flops(points)
    profile = sheet
    if sheet.device_kind == "cpu":
        tflops = {dtype: _round(rate / 1e12) for dtype, rate in peaks.items()}
        figures["tflops"] = (tflops, f"{source}, fastest matrix product")
        bandwidth = max(rates["copy"], rates["add"], rates["sum"])
        figures["memory_gb_per_s"] = (_round(bandwidth / 1e9), f"{source}, fastest of copy, add, sum")
        flops = {**sheet.flops, **peaks}
        profile = replace(sheet, flops=flops, memory_bytes_per_s=bandwidth)
    host = min(rates["to_host"], rates["from_host"])
    figures["pcie_gb_per_s"] = (_round(host / 1e9), f"{source}, slower of both ways")
    start = next(p.seconds for p in points if p.kind == "start")
    moved = rates["add"] / profile.memory_bytes_per_s
    constants["kernel"] = (_round(start), source)
    constants["host"] = (_round(fit.host_seconds(points)), f"{source}, what a further layer costs")
    constants["memory"] = (_round(moved), f"{source}, add")
    profile = replace(profile, constants={"kernel": start, "memory": moved})

    def keep(found: dict[str, float], error: float) -> None:
        why = f"{source}, fit within {error:.0%} on average"
        constants.update({name: (_round(value), why) for name, value in found.items()})

    products, error = fit.fit_gemm(points, profile)
    keep(products, error)
    profile = replace(profile, constants={**profile.constants, **products})
    keep(*fit.fit_attention(points, profile, "float32" if sheet.device_kind == "cpu" else "bfloat16"))
    if world > 1:
        rate, latency, error = fit.fit_links(points, world)
        why = f"{source}, collectives of {world} ranks, fit within {error:.0%} on average"
        figures["link_gb_per_s"] = (_round(rate / 1e9), why)
        figures["latency"] = (_round(latency), why)
        constants["link"] = (1.0, f"{source}: link_gb_per_s is what is reached")
    return Calibration(sheet.name, world, machine, day, tuple(points), figures, constants)


def _median(same: Sequence[Point]) -> Point:
    """One point of what each rank measured; only the first two send to each other."""
    taking_part = same[:2] if same[0].kind == "send" else same
    return replace(same[0], seconds=median(point.seconds for point in taking_part))


def _start(
    folder: Path, rank: int, world: int, kind: str, quick: bool, limit_s: float
) -> subprocess.Popen[bytes]:
    arguments = [str(folder), str(rank), str(world), kind, str(int(quick)), str(limit_s)]
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "rolemesh.parallel.calibration.rank", *arguments], stderr=errors, env=env
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    running = True
    while running:
        running = any(process.poll() is None for process in ranks)
        for rank, process in enumerate(ranks):
            if process.returncode:
                said = (folder / f"{rank}.err").read_text(errors="replace").strip()
                raise CalibrationError(f"rank {rank} of {len(ranks)} failed:\n{said}")
        if time.monotonic() > deadline:
            raise CalibrationError(f"not done within {limit_s:g} s; {_state(folder, len(ranks))}")
        time.sleep(0.05)


def _state(folder: Path, world: int) -> str:
    """The last thing that each rank measured."""
    last = [
        path.read_text() if (path := folder / f"{rank}.now").exists() else "nothing yet"
        for rank in range(world)
    ]
    return "measured last: " + ", ".join(f"rank {rank} {what}" for rank, what in enumerate(last))


def _machine(kind: str, cores: int) -> str:
    """What the figures hold for."""
    name = torch.cuda.get_device_name(0) if kind == "cuda" else _cpu_name()
    return f"{name}, {cores} cores, torch {torch.__version__}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _round(value: float) -> float:
    """Four digits: more is noise."""
    return float(f"{value:.4g}")
