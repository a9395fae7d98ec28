"""Fit the constants of the time model to published training rows; writes placement/data/timing.yaml.

    python benchmarks/fit_timing.py            fit and print
    python benchmarks/fit_timing.py --write    also store them

Every constant has a prior: a figure of a published benchmark or a data sheet, and how far it may be off. The fit
minimises the sum of absolute relative errors plus the priors' squares (iteratively reweighted Gauss-Newton on
logarithms), each source weighted by the square root of its number of distinct configurations.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import prediction_train as train

from rolemesh.placement.timing.efficiency import Efficiency

GENERATION = {"v100": "volta", "a100": "ampere", "a6000": "ampere", "h": "hopper", "b": "blackwell", "gb": "blackwell"}


def generation(device: str) -> str:
    """The device's generation."""
    return next(value for key, value in sorted(GENERATION.items(), reverse=True) if device.startswith(key))


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


GEMM = "cuBLAS on large squares reaches 70 to 85% of the sheet (NVIDIA, Lambda, SemiAnalysis benchmarks)"
FA = "Dao 2023 (FlashAttention-2) figures 4 to 6 and Shah 2024 (FlashAttention-3) figure 5, causal, width 128"
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
    Prior("blackwell", "flash", 0.60, 0.1, "cuDNN 9 release notes: 1.4 to 1.6 PFLOP/s forward"),
    Prior("blackwell", "flash_backward", 0.48, 0.1, "cuDNN 9 release notes: about 1.1 PFLOP/s backward"),
    Prior("blackwell", "flash2", 0.27, 0.15, "the kernel has no code for this device: Hopper's absolute rate"),
    Prior("volta", "memory", 0.80, 0.08, "STREAM-like copies: 80 to 92%"),
    Prior("ampere", "memory", 0.80, 0.08, "STREAM-like copies: 80 to 92%"),
    Prior("hopper", "memory", 0.80, 0.08, "STREAM-like copies: 80 to 92%"),
    Prior("blackwell", "memory", 0.80, 0.08, "STREAM-like copies: 80 to 92%"),
    Prior("h100-96", "power", 0.80, 0.08, "500 W instead of 700 W: clock falls by its cube root to square root"),
    Prior("gb300-279", "power", 1.12, 0.06, "1,400 W against 1,200 W of GB200 at the same peak"),
    Prior("b300-270", "power", 1.08, 0.08, "1,200 W or more against 1,000 W of B200 at the same peak"),
    Prior("a100-40", "power", 1.0, 0.04, "same chip as with 80 GB"),
    Prior("a6000-48", "power", 0.90, 0.15, "boost clock against sustained"),
    Prior("common", "tile_start", 256.0, 0.5, GUESS),
    Prior("common", "wave_weight", 0.5, 0.5, "between stream-K (0) and whole waves (1)"),
    Prior("common", "misaligned", 16.0, 0.5, "NVIDIA deep-learning performance guide, figure on alignment"),
    Prior("common", "unaligned", 1.15, 0.1, "NVIDIA deep-learning performance guide, figure on alignment"),
    Prior("common", "head_half", 32.0, 0.3, FA),
    Prior("common", "unfused", 1.4, 0.1, "casts and copies of an eager graph beyond the operators counted"),
    Prior("common", "kernel", 4e-6, 0.4, GUESS),
    Prior("common", "host", 4e-4, 0.5, GUESS),
    Prior("common", "moe_host", 1.5e-3, 0.5, GUESS),
    Prior("common", "moe_extra", 3e-4, 0.5, GUESS),
    Prior("volta", "link", 0.87, 0.06, "NCCL tests: about 130 of 150 GB/s"),
    Prior("ampere", "link", 0.78, 0.06, "NCCL tests: about 235 of 300 GB/s"),
    Prior("hopper", "link", 0.95, 0.08, "comm_truth.csv: 480 of 450 GB/s for all-reduce in the switch, 370 else"),
    Prior("blackwell", "link", 0.85, 0.1, "as Hopper"),
    Prior("common", "network", 0.85, 0.1, "NCCL tests over InfiniBand"),
    Prior("common", "overlap", 0.85, 0.1, GUESS),
    Prior("common", "step_fixed", 0.03, 0.4, GUESS),
    Prior("common", "jitter", 0.003, 0.5, "Llama 3 paper: MFU 43 to 41% from 8k to 16k devices"),
    Prior("common", "imbalance", 1.15, 0.1, "Megatron-MoE: forced against real routing"),
)  # fmt: skip
DECODE = (
    Prior("common", "decode_memory", 0.85, 0.05, "STREAM-like reads: 85 to 93% of the sheet"),
    Prior("common", "decode_gemm", 0.8, 0.15, "products of some hundred rows against large ones"),
    Prior("common", "decode_kernel", 3e-6, 0.3, GUESS),
    Prior("common", "serving", 1.5e-3, 0.4, GUESS),
    Prior("common", "serving_python", 6e-3, 0.3, "vLLM and SGLang profiles: 4 to 8 ms between steps"),
    Prior("common", "serving_sequence", 5e-6, 0.5, GUESS),
)
NAMES = {field.name for field in fields(Efficiency)}
assert all(prior.name in NAMES for prior in (*PRIORS, *DECODE))


def constants(device: str, theta: dict[tuple[str, str], float]) -> Efficiency:
    """Constants of a device: common ones, its generation's, its own."""
    values: dict[str, float] = {}
    for where in ("common", generation(device), device):
        values.update({name: value for (place, name), value in theta.items() if place == where})
    for name in ("overlap", "network", "memory", "wave_weight"):
        values[name] = min(values[name], 1.0)
    return Efficiency(**values)


class Fit:
    """Rows, priors, and a fit that can leave rows out."""

    def __init__(self, cases: Sequence[train.Case], priors: Sequence[Prior] = PRIORS) -> None:
        self.cases, self.priors = list(cases), list(priors)
        keys = [(c.dims, c.layout, c.micro_batch, c.n_micro, c.seq_len, c.device, c.links, c.run) for c in cases]
        first: dict[object, int] = {}
        self.index = np.array([first.setdefault(key, len(first)) for key in keys])
        self.unique = [self.cases[int(np.argmax(self.index == u))] for u in range(len(first))]
        self.log_measured = np.log([c.seconds for c in cases])
        repeats = Counter(zip((c.source for c in cases), self.index.tolist(), strict=True))
        sizes = Counter(source for source, _ in repeats)
        self.weight = np.array(
            [1 / (repeats[c.source, int(u)] * math.sqrt(sizes[c.source]))
             for c, u in zip(cases, self.index, strict=True)]
        )  # fmt: skip

    def predict(self, theta: np.ndarray, only: np.ndarray | None = None) -> np.ndarray:
        """Logarithm of the predicted seconds of each distinct question."""
        table = {p.key: math.exp(v) for p, v in zip(self.priors, theta, strict=True)}
        known: dict[str, Efficiency] = {}
        out = np.zeros(len(self.unique))
        for u, case in enumerate(self.unique):
            if only is None or only[u]:
                eff = known.setdefault(case.device, None) or constants(case.device, table)  # type: ignore[arg-type]
                known[case.device] = eff
                out[u] = math.log(case.predict(eff).total)
        return out

    def jacobian(self, theta: np.ndarray, base: np.ndarray) -> np.ndarray:
        """[question, constant], by small steps."""
        out = np.zeros((len(self.unique), len(theta)))
        for j, prior in enumerate(self.priors):
            only = np.array(
                [prior.where in ("common", generation(c.device), c.device) for c in self.unique]
            )
            moved = theta.copy()
            moved[j] += 0.02
            out[only, j] = (self.predict(moved, only) - base)[only] / 0.02
        return out

    def solve(self, theta: np.ndarray, keep: np.ndarray, steps: int, fresh: bool, jac: np.ndarray | None = None):
        """(theta, jacobian) after `steps`; `fresh` recomputes the jacobian each time."""
        centre = np.log([p.value for p in self.priors])
        sigma = np.array([p.sigma for p in self.priors])
        for _ in range(steps):
            base = self.predict(theta)
            jac = self.jacobian(theta, base) if fresh or jac is None else jac
            residual = self.log_measured - base[self.index]
            weight = keep * self.weight / np.maximum(np.abs(residual), 0.03) / NOISE
            rows = jac[self.index]
            left = rows.T @ (weight[:, None] * rows) + np.diag(1 / sigma**2)
            right = rows.T @ (weight * residual) + (centre - theta) / sigma**2
            theta = theta + np.clip(np.linalg.solve(left, right), -0.25, 0.25)
        return theta, jac

    def start(self) -> np.ndarray:
        """Logarithms of the priors."""
        return np.log([p.value for p in self.priors])


NOISE = 0.05  # absolute log error of a row that is as much as one sigma of a prior


def errors(cases: Sequence[train.Case], predicted: np.ndarray) -> np.ndarray:
    """Absolute relative errors."""
    measured = np.array([c.seconds for c in cases])
    return np.abs(np.exp(predicted) / measured - 1)


def leave_one_source_out(fit: Fit, theta: np.ndarray, jac: np.ndarray) -> np.ndarray:
    """Logarithm of the predicted seconds of each row, by constants fitted without its source."""
    out = np.zeros(len(fit.cases))
    sources = np.array([c.source for c in fit.cases])
    for source in sorted(set(sources)):
        keep = (sources != source).astype(float)
        refit, _ = fit.solve(theta, keep, 4, False, jac)
        mine = np.zeros(len(fit.unique), dtype=bool)
        mine[fit.index[sources == source]] = True
        out[sources == source] = fit.predict(refit, mine)[fit.index][sources == source]
    return out


def main() -> None:
    """Fit and print."""
    cases, _ = train.load()
    fit = Fit(cases)
    theta, jac = fit.solve(fit.start(), np.ones(len(cases)), 6, True)
    for p, v in zip(fit.priors, theta, strict=True):
        print(f"{p.where:10s} {p.name:15s} prior {p.value:9.4g} fitted {math.exp(v):9.4g}")
    inside = errors(cases, fit.predict(theta)[fit.index])
    outside = errors(cases, leave_one_source_out(fit, theta, jac))
    by: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        by[case.source].append(i)
        by["= " + case.kind].append(i)
        by["= all"].append(i)
    for name, rows in by.items():
        print(f"{name[:50]:50s} n {len(rows):4d} in-sample {100 * inside[rows].mean():5.1f} out {100 * outside[rows].mean():5.1f}")


if __name__ == "__main__":
    main()
