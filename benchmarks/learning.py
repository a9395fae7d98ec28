"""Does the quickstart learn? Held-out mean reward before training and over its last five steps, for several
seeds.

Each run is `rolemesh train examples/quickstart.yaml` with its own seed, and one more run has a learning
rate of 0. The held-out prompts are answered greedily and scored by the run's reward model; the 95%
intervals are bootstrapped over prompts (Efron 1979). The true share of right characters is printed beside
it: a policy that fools its reward model would show there. Needs `make quickstart` to have made the models.
Exits with 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
from reward import compute_score  # noqa: E402

Scores = NDArray[np.float64]  # [prompts]
LAST_STEPS = 5


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95% bootstrap interval."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, scores: Scores, resamples: int = 10_000) -> Interval:
        rng = np.random.default_rng(0)
        means = scores[rng.integers(len(scores), size=(resamples, len(scores)))].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return cls(float(low), float(scores.mean()), float(high))

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Result:
    """Held-out reward and true accuracy of one run, before it and over its last steps."""

    name: str
    before: Interval
    after: Interval
    true_before: float
    true_after: float

    @property
    def rose(self) -> bool:
        return self.after.low > self.before.high

    def __str__(self) -> str:
        return (
            f"{self.name:<28} {self.before!s:<24} {self.after!s:<24} "
            f"{self.true_before:>10.3f} {self.true_after:>9.3f}   {'rose' if self.rose else 'no rise'}"
        )


def run(recipe: Path, out: Path, steps: int, *overrides: str) -> tuple[list[Scores], list[Scores]]:
    """Train with validation after each step; held-out rewards and true scores of step 0, 1, ..., [prompts]
    each.
    """
    command = [sys.executable, "-m", "rolemesh.launch", "train", str(recipe), f"run.dir={out}"]
    command += [f"run.steps={steps}", "run.validate_every=1", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    rewards, truths = [], []
    for step in range(steps + 1):
        rows = [
            json.loads(line) for line in (out / "samples" / f"step_{step}.jsonl").read_text().splitlines()
        ]
        rewards.append(np.array([row["score"] for row in rows]))
        truths.append(np.array([true_score(row["prompt"], row["response"]) for row in rows]))
    return rewards, truths


def true_score(prompt: str, response: str) -> float:
    """The share of right characters: every digit of the prompt moved up by one."""
    answer = "".join(str((int(digit) + 1) % 10) for digit in prompt.strip().rstrip(">"))
    return compute_score("digits", response.removesuffix("<eos>"), answer, {})


def measure(name: str, recipe: Path, out: Path, steps: int, *overrides: str) -> Result:
    """Train once and compare step 0 with the mean of the last five steps, prompt by prompt."""
    rewards, truths = run(recipe, out, steps, *overrides)
    last, last_true = np.mean(rewards[-LAST_STEPS:], axis=0), np.mean(truths[-LAST_STEPS:])
    return Result(name, Interval.of(rewards[0]), Interval.of(last), float(truths[0].mean()), float(last_true))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    print(f"{'run':<28} {'held-out before':<24} {f'last {LAST_STEPS} steps':<24} true before true after")
    frozen = ("actor.optim.lr=0", "critic.optim.lr=0")
    runs = [(f"seed {seed}", (f"run.seed={seed}",)) for seed in args.seeds] + [("lr 0", frozen)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, overrides) in enumerate(runs):
            results.append(measure(name, args.recipe, Path(folder) / str(i), args.steps, *overrides))
            print(results[-1], flush=True)
    *trained, still = results
    return 0 if all(result.rose for result in trained) and not still.rose else 1


if __name__ == "__main__":
    raise SystemExit(main())
