"""What each type of device can do, from data sheets; every figure carries its source."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rolemesh.placement.hints import did_you_mean

GIB = 2**30
_DATA = Path(__file__).with_name("data") / "hardware.yaml"
_SCALES = {  # key in the data file: (field, its factor)
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
    "link_devices": ("link_devices", 1),
    "nic_gb_per_s": ("nic_bytes_per_s", 1e9),
    "pcie_gb_per_s": ("pcie_bytes_per_s", 1e9),
    "host_gib": ("host_bytes", GIB),
}


class HardwareError(ValueError):
    """A device type or dtype that is not known, or a profile that contradicts itself."""


@dataclass(frozen=True)
class HardwareProfile:
    """Nominal figures of one type of device; what is reached of them is the cost models' matter.

    Attributes:
        flops: dense peak FLOP/s by dtype (`float32` without tensor cores); a dtype left out is not there.
        memory_bytes: what a process may allocate.
        memory_bytes_per_s: bandwidth of the device's own memory.
        link_bytes_per_s: to another device of its `link_devices`, per direction: NVLink, else PCIe.
        link_devices: devices that the fast link joins; more of them talk over PCIe or the network.
        nic_bytes_per_s: to other nodes, per direction, each device's part.
        pcie_bytes_per_s: to host memory, per direction (NVLink-C2C where that is the way).
        host_bytes: host memory for each device of a usual node.
        sources: where each figure is from, by field.
        latency: how many times longer a message takes to start than NCCL's on its usual links.
        constants: constants of the time model (`timing.Efficiency`) that were measured, by name.
        factors: measured over predicted seconds of a run's operations, by kind (generate, infer, ...).

    Raises HardwareError for an amount that is not above 0 and for a figure without a source.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_devices: int
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    host_bytes: float
    sources: Mapping[str, str] = field(hash=False, repr=False)
    aliases: tuple[str, ...] = ()
    latency: float = 1.0
    constants: Mapping[str, float] = field(default_factory=dict, hash=False, repr=False)
    factors: Mapping[str, float] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        amounts = {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        amounts |= {figure: getattr(self, figure) for figure, _ in _SCALES.values()}
        amounts |= {"latency": self.latency, **self.constants, **self.factors}
        for figure, amount in amounts.items():
            if not amount > 0:
                raise HardwareError(f"{self.name}: {figure} must be above 0, got {amount!r}")
        without = [
            name for name in ("flops", *(name for name, _ in _SCALES.values())) if not self.sources.get(name)
        ]
        if without:
            raise HardwareError(f"{self.name}: no source for {', '.join(without)}")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes it computes in."""
        return tuple(self.flops)

    @property
    def device_kind(self) -> str:
        """`cpu` for a worker slot, else `cuda`."""
        return "cpu" if self.name == "cpu" else "cuda"

    def peak_flops(self, dtype: str) -> float:
        """Dense peak, FLOP/s. Raises HardwareError when the device has no such dtype, naming those it has."""
        if dtype not in self.flops:
            raise HardwareError(f"{self.name} has no {dtype}; it has {', '.join(self.dtypes)}")
        return self.flops[dtype]

    def factor(self, kind: str) -> float:
        """What predicted seconds of operations of this kind are multiplied with; 1 where no run has told."""
        return self.factors.get(kind, 1.0)


def hardware(name: str) -> HardwareProfile:
    """The profile of a device type, by its name (`h100-80`) or an alias (`H100`, `A100-40GB`), in any case.

    Raises HardwareError for an unknown one, naming the nearest.
    """
    found = _by_name().get(_plain(name))
    if found is None:
        raise HardwareError(
            f"no profile of a device {name!r} (known: {', '.join(profiles())})"
            f"{did_you_mean(_plain(name), _by_name())}"
        )
    return found


def load_profile(path: str | Path) -> HardwareProfile:
    """A profile from a file that `rolemesh calibrate` wrote; what it does not have is the data sheet's.

    Raises HardwareError for a file that is none, and for an unknown device type, figure or constant, naming
    the nearest.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise HardwareError(f"{path}: no profile can be read: {error}") from None
    if not isinstance(data, Mapping) or "device" not in data:
        raise HardwareError(f"{path}: no profile; `rolemesh calibrate --out FILE` writes one")
    try:
        return _measured(data)
    except (HardwareError, TypeError, ValueError) as error:
        raise HardwareError(f"{path}: {error}") from None


def canonical(name: str) -> str:
    """The profile's name of a device type; a type without a profile as it is."""
    found = _by_name().get(_plain(name))
    return found.name if found else name


@functools.cache
def profiles() -> Mapping[str, HardwareProfile]:
    """Every profile that comes with the package, by name."""
    with _DATA.open(encoding="utf-8") as file:
        data = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: _profile(name, figures, data["sources"]) for name, figures in data["devices"].items()}


@functools.cache
def _by_name() -> Mapping[str, HardwareProfile]:
    return {
        _plain(alias): profile
        for profile in profiles().values()
        for alias in (profile.name, *profile.aliases)
    }


def _plain(name: str) -> str:
    return str(name).strip().lower()


def _profile(name: str, figures: Mapping[str, Any], sources: Mapping[str, str]) -> HardwareProfile:
    tflops, source = figures["tflops"]
    values: dict[str, Any] = {"flops": {dtype: peak * 1e12 for dtype, peak in tflops.items()}}
    origin = {"flops": sources[source]}
    for key, (figure, factor) in _SCALES.items():
        value, source = figures[key]
        values[figure], origin[figure] = value * factor, sources[source]
    return HardwareProfile(name, sources=origin, aliases=tuple(figures["aliases"]), **values)


def _measured(data: Mapping[str, Any]) -> HardwareProfile:
    """The profile of a file's content, on top of the data sheet's."""
    from rolemesh.placement.timing.efficiency import Efficiency  # it imports this module

    base = hardware(data["device"])
    figures = dict(data.get("figures", {}))
    _check_names("figure", figures, ("tflops", "latency", *_SCALES))
    constants = data.get("constants", {})
    _check_names("constant", constants, tuple(f.name for f in fields(Efficiency)))
    changes: dict[str, Any] = {}
    sources = dict(base.sources)
    if "tflops" in figures:
        tflops, sources["flops"] = figures.pop("tflops")
        changes["flops"] = {**base.flops, **{dtype: float(peak) * 1e12 for dtype, peak in tflops.items()}}
    if "latency" in figures:
        latency, sources["latency"] = figures.pop("latency")
        changes["latency"] = float(latency)
    for key, (value, source) in figures.items():
        figure, factor = _SCALES[key]
        changes[figure], sources[figure] = type(factor)(float(value) * factor), source
    return replace(
        base,
        sources=sources | {name: source for name, (_, source) in constants.items()},
        constants={name: float(value) for name, (value, _) in constants.items()},
        factors={kind: float(entry["factor"]) for kind, entry in data.get("factors", {}).items()},
        **changes,
    )


def _check_names(what: str, names: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise HardwareError(
                f"no {what} is called {name!r} (known: {', '.join(known)}){did_you_mean(name, known)}"
            )
