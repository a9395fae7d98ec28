"""What a device reaches of its data sheet: a few constants for each device generation.

`placement/data/timing.yaml` holds them, each with how it was obtained; `benchmarks/fit_timing.py` fits them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from rolemesh.placement.hardware import HardwareProfile

BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "float4": 0.5625,
}  # float4: a scale of one byte for 16


@dataclass(frozen=True)
class Efficiency:
    """Shares are of the data sheet's figure; times are seconds.

    Attributes:
        power: share of its rate that the device sustains under its power limit.
        gemm16, gemm8, gemm4, gemm32: share of the peak that a large matrix product reaches, by bits.
        tile_start: columns of k that starting and ending a tile costs as much time as.
        wave_weight: how far a partly filled last wave costs a whole one (1) or its share (0).
        misaligned: how much longer a product takes whose rows are no multiple of 16 bytes.
        unaligned: the same where they are a multiple of 16, but not of 128 bytes.
        flash: share of the 16-bit peak that fused attention reaches, forward; `flash_backward` backward.
        flash2, flash1: share of that which the kernel's second and first generation reach on this device.
        head_half: width of a head at which fused attention reaches half of that.
        memory: share of the memory bandwidth that element-wise operators reach.
        unfused: how many times more bytes element-wise operators move without fusion.
        kernel: start of one kernel.
        host, moe_host: seconds that the host needs to start one layer's kernels forward, plain or with
            experts; twice that backward. A layer never takes less unless its kernels are recorded.
        host_clock: how many times longer the host takes for anything than the x86 hosts that `host`,
            `moe_host` and `serving` are fitted on.
        moe_extra: seconds a layer with experts adds in one pass (routing, sorting, synchronising).
        link, network: share of the link's rate inside and between nodes.
        overlap: share of communication meant to be hidden that costs the computation nothing.
        step_fixed: seconds of each step outside of all this (host work, gradient norm, logging).
        jitter: how much each doubling of the number of devices lengthens a step.
        imbalance: how much longer experts take than under even routing.
        decode_memory: share of the memory bandwidth that weights and KV cache are read at.
        decode_gemm: share of `gemm16`, `gemm8`, `gemm4` that products with few rows reach.
        decode_kernel: seconds of one kernel of a decode step, started from a recorded graph.
        serving: seconds of scheduling and sampling in each decode step; `serving_python` where Python
            processes do it; `serving_sequence` more for each sequence.
    """

    power: float = 1.0
    gemm16: float = 0.72
    gemm8: float = 0.60
    gemm4: float = 0.45
    gemm32: float = 0.8
    tile_start: float = 256.0
    wave_weight: float = 0.5
    misaligned: float = 3.0
    unaligned: float = 1.15
    flash: float = 0.6
    flash_backward: float = 0.5
    flash2: float = 1.0
    flash1: float = 0.6
    head_half: float = 32.0
    memory: float = 0.8
    unfused: float = 1.6
    kernel: float = 4e-6
    host: float = 5e-4
    moe_host: float = 1.5e-3
    host_clock: float = 1.0
    moe_extra: float = 3e-4
    link: float = 0.9
    network: float = 0.85
    overlap: float = 0.85
    step_fixed: float = 0.02
    jitter: float = 0.002
    imbalance: float = 1.1
    decode_memory: float = 0.8
    decode_kernel: float = 3e-6
    decode_gemm: float = 0.8
    serving: float = 1e-3
    serving_python: float = 6e-3
    serving_sequence: float = 5e-6

    def gemm(self, dtype: str) -> float:
        """Share of the peak for products in `dtype`."""
        return {4.0: self.gemm32, 2.0: self.gemm16, 1.0: self.gemm8, 0.5625: self.gemm4}[BYTES[dtype]]

    def with_(self, **changes: float) -> Efficiency:
        """The same with some constants replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Machine:
    """One device for the time model: data sheet and constants. `units` are its parallel processors."""

    name: str
    peaks: tuple[tuple[str, float], ...]  # dtype, FLOP/s
    memory_bandwidth: float  # bytes/s
    units: int
    efficiency: Efficiency
    factors: tuple[tuple[str, float], ...] = ()  # what runs told, by kind of operation: see `profile_file`

    def factor(self, kind: str) -> float:
        """What a kind of operation's predicted seconds are multiplied with."""
        return dict(self.factors).get(kind, 1.0)

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet; a dtype that the device lacks runs at the next wider one's rate."""
        peaks = dict(self.peaks)
        order = ("float4", "float8", "bfloat16", "float16", "float32")
        for name in order[order.index(dtype) :]:
            if name in peaks:
                return peaks[name] * self.efficiency.power
        return max(peaks.values()) * self.efficiency.power

    @classmethod
    def of(cls, profile: HardwareProfile, constants: Efficiency | None = None) -> Machine:
        """A device type with its stored constants and what its profile measured of them, or with others."""
        figures = _data()["devices"].get(profile.name, {})
        peaks = dict(profile.flops)
        if "float4" in figures:
            peaks["float4"] = float(figures["float4"]) * 1e12
        units = int(figures.get("units", 1 if profile.device_kind == "cpu" else 108))
        chosen = constants or efficiency(profile.name).with_(**profile.constants)
        factors = tuple(profile.factors.items())
        return cls(profile.name, tuple(peaks.items()), profile.memory_bytes_per_s, units, chosen, factors)

    @staticmethod
    def bytes_of(dtype: str) -> float:
        """Bytes of one number."""
        return BYTES[dtype]

    @property
    def memory_rate(self) -> float:
        """Bytes/s that element-wise operators reach."""
        return self.memory_bandwidth * self.efficiency.memory


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = resources.files("rolemesh.placement").joinpath("data/timing.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def generation(device: str) -> str:
    """The generation whose constants a device uses: `h100` for `h800-80`; the common ones when unknown."""
    for name, entry in _data()["generations"].items():
        if any(device.startswith(prefix) for prefix in entry["devices"]):
            return str(name)
    return "common"


@lru_cache(maxsize=64)
def efficiency(device: str) -> Efficiency:
    """Constants of a device by its name."""
    data = _data()
    known = {field.name for field in fields(Efficiency)}
    values: dict[str, float] = {}
    own = data["devices"].get(device, {}).get("constants", {})
    for source in (data["common"], data["generations"].get(generation(device), {}).get("constants", {}), own):
        values.update({name: float(entry["value"]) for name, entry in source.items() if name in known})
    return Efficiency(**values)
