"""Fit the constants of the time model to published rows; writes placement/data/timing.yaml.

    python benchmarks/fit_timing.py            fit and print
    python benchmarks/fit_timing.py --write    also store them

Every constant has a prior: a figure of a published benchmark or a data sheet, and how far it may be off.
The fit minimises the sum of absolute relative errors plus the priors' squares (iteratively reweighted
Gauss-Newton on logarithms), each source weighted by the square root of its number of distinct configurations.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import prediction_decode as decode
import prediction_train as train
import yaml

from rolemesh.placement.timing.efficiency import Efficiency, generation


@dataclass(frozen=True)
class Prior:
    """`where` is `common`, a generation or a device; `sigma` is of the logarithm. 0 holds it fixed."""

    where: str
    name: str
    value: float
    sigma: float
    source: str

    @property
    def key(self) -> tuple[str, str]:
        """Where and name."""
        return self.where, self.name


GEMM = "large cuBLAS products reach 70 to 85% of the sheet; public benchmarks, from memory"
FA = "Dao 2023 (FlashAttention-2), Shah 2024 (FlashAttention-3): causal, width 128; read from memory"
GUESS = "order of magnitude of profiler traces"
PRIORS = (
    Prior("volta", "gemm16", 0.72, 0.1, GEMM),
    Prior("ampere", "gemm16", 0.80, 0.1, GEMM),
    Prior("hopper", "gemm16", 0.70, 0.1, GEMM),
    Prior("blackwell", "gemm16", 0.72, 0.1, GEMM),
    Prior("hopper", "gemm8", 0.62, 0.12, GEMM),
    Prior("blackwell", "gemm8", 0.66, 0.12, GEMM),
    Prior("blackwell", "gemm4", 0.50, 0.2, GEMM),
    Prior("ampere", "flash", 0.62, 0.05, FA),
    Prior("ampere", "flash_backward", 0.52, 0.05, FA),
    Prior("ampere", "flash1", 0.60, 0.15, FA),
    Prior("hopper", "flash", 0.62, 0.05, FA),
    Prior("hopper", "flash_backward", 0.53, 0.05, FA),
    Prior("hopper", "flash2", 0.60, 0.08, FA),
    Prior("hopper", "flash1", 0.32, 0.15, FA),
    Prior("blackwell", "flash", 0.60, 0.1,
          "as Hopper's own kernel; cuDNN on B200 about 1.4 PFLOP/s, from memory"),
    Prior("blackwell", "flash_backward", 0.48, 0.1,
          "as Hopper's own kernel; cuDNN on B200 about 1.1 PFLOP/s, from memory"),
    Prior("blackwell", "flash2", 0.27, 0.15,
          "the kernel has no code for this device: Hopper's absolute rate"),
    Prior("volta", "memory", 0.80, 0.08, "copies reach 80 to 92%, from memory"),
    Prior("ampere", "memory", 0.80, 0.08, "copies reach 80 to 92%, from memory"),
    Prior("hopper", "memory", 0.80, 0.08, "copies reach 80 to 92%, from memory"),
    Prior("blackwell", "memory", 0.80, 0.08, "copies reach 80 to 92%, from memory"),
    Prior("h100-96", "power", 0.80, 0.08,
          "500 W instead of 700 W: clock falls by its cube root to square root"),
    Prior("gb300-279", "power", 1.12, 0.06, "1,400 W against 1,200 W of GB200 at the same peak"),
    Prior("b300-270", "power", 1.08, 0.08, "1,200 W or more against 1,000 W of B200 at the same peak"),
    Prior("a100-40", "power", 1.0, 0.04, "same chip as with 80 GB"),
    Prior("a6000-48", "power", 0.90, 0.15, "boost clock against sustained"),
    Prior("common", "tile_start", 256.0, 0.5, GUESS),
    Prior("common", "wave_weight", 0.5, 0.5, "between stream-K (0) and whole waves (1)"),
    Prior("common", "misaligned", 16.0, 0.5,
          "NVIDIA's guide to matrix products says aligned rows matter; size a guess"),
    Prior("common", "unaligned", 1.15, 0.1,
          "NVIDIA's guide to matrix products says aligned rows matter; size a guess"),
    Prior("common", "head_half", 32.0, 0.3, FA),
    Prior("common", "unfused", 1.4, 0.1, "casts and copies of an eager graph beyond the operators counted"),
    Prior("common", "kernel", 4e-6, 0.4, GUESS),
    Prior("common", "host", 4e-4, 0.5, GUESS),
    Prior("common", "moe_host", 1.5e-3, 0.5, GUESS),
    Prior("common", "moe_extra", 3e-4, 0.5, GUESS),
    Prior("volta", "link", 0.87, 0.06, "NCCL tests: about 130 of 150 GB/s, from memory"),
    Prior("ampere", "link", 0.78, 0.06, "NCCL tests: about 235 of 300 GB/s, from memory"),
    Prior("hopper", "link", 0.95, 0.08,
          "comm_truth.csv: 480 of 450 GB/s for all-reduce in the switch, 370 else"),
    Prior("blackwell", "link", 0.85, 0.1, "as Hopper"),
    Prior("common", "network", 0.85, 0.1, "NCCL tests over InfiniBand, from memory"),
    Prior("common", "overlap", 0.85, 0.1, GUESS),
    Prior("common", "step_fixed", 0.03, 0.4, GUESS),
    Prior("common", "jitter", 0.003, 0.5, "Llama 3 paper: 43 to 41% MFU from 8k to 16k devices, from memory"),
    Prior("common", "imbalance", 1.15, 0.1,
          "train_truth.csv: Megatron-MoE-ModelZoo, forced against real routing, 8 to 25%"),
)  # fmt: skip
DECODE = (
    Prior("common", "decode_memory", 0.85, 0.05, "reads reach 85 to 93%, from memory"),
    Prior("common", "decode_gemm", 0.8, 0.15, "products of some hundred rows against large ones"),
    Prior("common", "decode_kernel", 3e-6, 0.3, GUESS),
    Prior("common", "serving", 1.5e-3, 0.4, GUESS),
    Prior("common", "serving_python", 6e-3, 0.3, "vLLM and SGLang: 4 to 8 ms between steps, from memory"),
    Prior("common", "serving_sequence", 5e-6, 0.5, GUESS),
)
NAMES = {field.name for field in fields(Efficiency)}
assert all(prior.name in NAMES for prior in (*PRIORS, *DECODE))


Table = dict[tuple[str, str], float]
DATA = Path(__file__).resolve().parents[1] / "placement" / "data" / "timing.yaml"


def constants(device: str, table: Table) -> Efficiency:
    """Constants of a device: common ones, its generation's, its own."""
    values: dict[str, float] = {}
    for where in ("common", generation(device), device):
        values.update({name: value for (place, name), value in table.items() if place == where})
    for name in ("overlap", "network", "memory", "wave_weight"):
        values[name] = min(values[name], 1.0)
    return Efficiency(**values)


def stored() -> Table:
    """The constants in the data file, by (where, name)."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    table: Table = {("common", name): entry["value"] for name, entry in data["common"].items()}
    for section in (data["generations"], data["devices"]):
        for where, entry in section.items():
            table.update({(where, name): c["value"] for name, c in entry.get("constants", {}).items()})
    return table


class Question(Protocol):
    """A published row: what it measured, what the model says, and what tells distinct questions apart."""

    source: str
    device: str

    @property
    def measured(self) -> float: ...
    @property
    def key(self) -> Hashable: ...
    def value(self, constants: Efficiency | None = None) -> float: ...


class Fit:
    """Rows, priors, and a fit that can leave rows out. `fixed` are constants that are not fitted."""

    def __init__(
        self, cases: Sequence[Question], priors: Sequence[Prior], fixed: Table | None = None
    ) -> None:
        self.cases, self.priors, self.fixed = list(cases), list(priors), fixed or {}
        first: dict[Hashable, int] = {}
        self.index = np.array([first.setdefault(case.key, len(first)) for case in cases])
        self.unique = [self.cases[int(np.argmax(self.index == u))] for u in range(len(first))]
        self.log_measured = np.log([case.measured for case in cases])
        repeats = Counter(zip((c.source for c in cases), self.index.tolist(), strict=True))
        sizes = Counter(source for source, _ in repeats)
        self.weight = np.array(
            [1 / (repeats[c.source, int(u)] * math.sqrt(sizes[c.source]))
             for c, u in zip(cases, self.index, strict=True)]
        )  # fmt: skip

    def predict(self, theta: np.ndarray, only: np.ndarray | None = None) -> np.ndarray:
        """Logarithm of the model's answer to each distinct question."""
        table = self.fixed | {p.key: math.exp(v) for p, v in zip(self.priors, theta, strict=True)}
        known: dict[str, Efficiency] = {}
        out = np.zeros(len(self.unique))
        for u, case in enumerate(self.unique):
            if only is None or only[u]:
                if case.device not in known:
                    known[case.device] = constants(case.device, table)
                out[u] = math.log(case.value(known[case.device]))
        return out

    def jacobian(self, theta: np.ndarray, base: np.ndarray) -> np.ndarray:
        """[question, constant], by small steps."""
        out = np.zeros((len(self.unique), len(theta)))
        for j, prior in enumerate(self.priors):
            only = np.array([prior.where in ("common", generation(c.device), c.device) for c in self.unique])
            moved = theta.copy()
            moved[j] += 0.02
            out[only, j] = (self.predict(moved, only) - base)[only] / 0.02
        return out

    def solve(
        self, theta: np.ndarray, keep: np.ndarray, steps: int, jacobian: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(theta, jacobian) after `steps`; with a jacobian given it is not made anew in each."""
        centre = np.log([p.value for p in self.priors])
        sigma = np.array([p.sigma for p in self.priors])
        slopes = np.zeros((len(self.unique), len(theta))) if jacobian is None else jacobian
        for _ in range(steps):
            base = self.predict(theta)
            slopes = self.jacobian(theta, base) if jacobian is None else jacobian
            residual = self.log_measured - base[self.index]
            weight = keep * self.weight / np.maximum(np.abs(residual), 0.03) / NOISE
            rows = slopes[self.index]
            left = rows.T @ (weight[:, None] * rows) + np.diag(1 / sigma**2)
            right = rows.T @ (weight * residual) + (centre - theta) / sigma**2
            theta = theta + np.clip(np.linalg.solve(left, right), -0.25, 0.25)
        return theta, slopes

    def start(self) -> np.ndarray:
        """Logarithms of the priors."""
        return np.log([p.value for p in self.priors])

    def at(self, table: Table) -> np.ndarray:
        """Logarithms of stored constants."""
        return np.log([table.get(p.key, p.value) for p in self.priors])

    def errors(self, predicted: np.ndarray) -> np.ndarray:
        """Absolute relative errors of rows' predictions (logarithms)."""
        return np.abs(np.exp(predicted - self.log_measured) - 1)

    def leave_one_source_out(self, theta: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Logarithm of the answer to each row, by constants fitted without its source."""
        out = np.zeros(len(self.cases))
        sources = np.array([c.source for c in self.cases])
        for source in sorted(set(sources)):
            refit, _ = self.solve(theta, (sources != source).astype(float), 4, slopes)
            mine = np.zeros(len(self.unique), dtype=bool)
            mine[self.index[sources == source]] = True
            out[sources == source] = self.predict(refit, mine)[self.index][sources == source]
        return out


def report(
    fit: Fit,
    inside: np.ndarray,
    outside: np.ndarray,
    kinds: Mapping[Question, str],
    skipped: Sequence[tuple[str, str]],
) -> None:
    """Print mean errors per source, by kind and in total, and every row that is not used with the reason."""
    groups: dict[str, list[int]] = {}
    for i, case in enumerate(fit.cases):
        groups.setdefault(case.source, []).append(i)
    for name in dict.fromkeys(kinds.values()):
        groups[f"all: {name}"] = [i for i, case in enumerate(fit.cases) if kinds[case] == name]
    groups["all rows"] = list(range(len(fit.cases)))
    first, second = fit.errors(inside), fit.errors(outside)
    ratio = outside - fit.log_measured
    print(
        f"{'source':58s} {'rows':>5s} {'in sample':>10s} {'without the source':>19s}"
        f" {'median':>7s} {'bias':>6s}"
    )
    for name, rows in groups.items():
        bias = math.exp(float(np.mean(ratio[rows]))) - 1
        print(
            f"{name[:58]:58s} {len(rows):5d} {100 * first[rows].mean():10.1f}"
            f" {100 * second[rows].mean():19.1f}"
            f" {100 * float(np.median(second[rows])):7.1f} {100 * bias:+6.1f}"
        )
    by_source = {name: second[rows].mean() for name, rows in groups.items() if not name.startswith("all")}
    print(
        f"{'mean over sources':58s} {len(by_source):5d} {'':10s}"
        f" {100 * np.mean(list(by_source.values())):19.1f}"
    )
    print(f"\n{len(skipped)} rows not used:" if skipped else "\nno row left out")
    for (source, reason), count in Counter(skipped).items():
        print(f"  {count:3d} {source}: {reason}")


def write(table: Table) -> None:
    """Store fitted constants beside what the file holds of devices and of generations without rows."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    for prior in (*PRIORS, *DECODE):
        if prior.where == "common":
            section = data["common"]
        elif prior.where in data["generations"]:
            section = data["generations"][prior.where].setdefault("constants", {})
        else:
            section = data["devices"][prior.where].setdefault("constants", {})
        value = float(f"{table[prior.key]:.4g}")
        section[prior.name] = {
            "value": value,
            "prior": prior.value,
            "sigma": prior.sigma,
            "source": prior.source,
        }
    text = yaml.safe_dump(data, sort_keys=False, width=110, default_flow_style=None)
    DATA.write_text(HEADER + text, encoding="utf-8")


HEADER = """# Constants of the time model: what devices reach of their data sheets.
#
# `value` is what the model uses, fitted by benchmarks/fit_timing.py to published rows; `prior` and `sigma`
# (of the logarithm) are what the fit starts from and how far it may move, `source` where the prior is from.
# Some priors were widened or moved while the model's terms were built on these same rows. Without a
# prior a value is taken as it is. `units`: processors of a device; `float4`: TFLOP/s, dense, where it has
# that type.
"""
NOISE = 0.05  # absolute log error of a row that is as much as one sigma of a prior


def main() -> None:
    """Fit training constants, then decode's, and print; `--write` stores them."""
    cases, _ = train.load()
    fit = Fit(cases, PRIORS)
    theta, _ = fit.solve(fit.start(), np.ones(len(cases)), 6)
    table = stored() | {p.key: math.exp(v) for p, v in zip(fit.priors, theta, strict=True)}
    rows, _ = decode.load()
    second = Fit(rows, DECODE, table)
    theta, _ = second.solve(second.start(), np.ones(len(rows)), 6)
    table |= {p.key: math.exp(v) for p, v in zip(second.priors, theta, strict=True)}
    for p in (*PRIORS, *DECODE):
        print(
            f"{p.where:10s} {p.name:16s} prior {p.value:9.4g} +- {p.sigma:4.2f}"
            f"  fitted {table[p.key]:9.4g}  {p.source}"
        )
    if "--write" in sys.argv:
        write(table)


if __name__ == "__main__":
    main()
