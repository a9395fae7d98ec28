"""What one step of a run has to do: how many sequences, how long, how often they are learned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rolemesh.placement.lengths import Fixed, Lengths


class WorkloadError(ValueError):
    """A batch that cannot be."""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        algorithm: name of the step graph (`ppo`, `grpo`).
        prompts: prompts of a step.
        samples_per_prompt: responses to each.
        prompt_lengths, response_lengths: tokens of each sequence.
        mini_batch_samples: samples of one optimizer update, over all ranks; None: the whole batch.
        epochs: passes over the batch.
        tries: how often a step's refilling operations run, on average.
        micro_batch_tokens: tokens that one rank puts through a model at once, a longer sample alone;
            None: the planner chooses.

    Raises WorkloadError for a count below 1 and for a mini-batch larger than the batch.
    """

    prompts: int
    prompt_lengths: Lengths
    response_lengths: Lengths
    algorithm: str = "ppo"
    samples_per_prompt: int = 1
    mini_batch_samples: int | None = None
    epochs: int = 1
    micro_batch_tokens: int | None = None
    tries: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prompts", "samples_per_prompt", "mini_batch_samples", "epochs", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is None and name in ("mini_batch_samples", "micro_batch_tokens"):
                continue
            if type(value) is not int or value < 1:
                raise WorkloadError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not self.tries >= 1:
            raise WorkloadError(f"tries must be at least 1, got {self.tries!r}")
        if self.mini_batch > self.samples:
            raise WorkloadError(
                f"mini_batch_samples is {self.mini_batch}, but a step has {self.samples} samples "
                f"({self.prompts} prompts x {self.samples_per_prompt}): at most {self.samples}"
            )

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any], folder: str | Path = ".") -> Workload:
        """Read the sections `algorithm`, `batch`, `data` and `lengths` of a recipe that has its defaults.

        Prompts count as long as `data.max_prompt_tokens` allows. A file of lengths is relative to `folder`.
        Raises WorkloadError for a missing number, LengthsError for lengths that cannot be.
        """
        algorithm, batch = recipe.get("algorithm", "ppo"), recipe.get("batch", {})
        data = recipe.get("data", {})
        for key, section in (("batch.prompts", batch), ("data.max_prompt_tokens", data)):
            if not isinstance(section, Mapping) or key.partition(".")[2] not in section:
                raise WorkloadError(f"a workload needs {key}")
        if "lengths" not in recipe:
            raise WorkloadError("a workload needs lengths.max_response_tokens")
        counts = ("prompts", "samples_per_prompt", "mini_batch_samples", "epochs", "micro_batch_tokens")
        return cls(
            algorithm=algorithm if isinstance(algorithm, str) else str(algorithm.get("name", "ppo")),
            prompt_lengths=Fixed(float(data["max_prompt_tokens"])),
            response_lengths=Lengths.from_keys(recipe["lengths"], folder),
            **{key: batch[key] for key in counts if key in batch},
        )

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batch(self) -> int:
        """Samples of one optimizer update."""
        return self.samples if self.mini_batch_samples is None else self.mini_batch_samples

    @property
    def updates(self) -> int:
        """Optimizer updates of a step; the last of an epoch may have fewer samples."""
        return self.epochs * -(-self.samples // self.mini_batch)

    @cached_property
    def sequence_tokens(self) -> float:
        """Expected tokens of one sequence, prompt and response."""
        return self.prompt_lengths.mean + self.response_lengths.mean

    @cached_property
    def longest_tokens(self) -> float:
        """Tokens of the longest sequence there can be."""
        return self.prompt_lengths.maximum + self.response_lengths.maximum

    @property
    def tokens(self) -> float:
        """Expected tokens of all sequences of a step."""
        return self.samples * self.sequence_tokens
