"""What emitters share: the command line that comes out, and pools as nodes x devices."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.placement.plan import PlacementPlan

Keys = Mapping[str, Any]


class EmitError(ValueError):
    """A plan or recipe that the other system cannot run; the message says what it cannot do."""


@dataclass(frozen=True)
class Emitted:
    """A command line: its first words, its settings as text in order, what it does not say."""

    command: str
    words: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def script(self) -> str:
        """A shell script with one setting a line."""
        quoted = [" ".join(shlex.quote(part) for part in word.split(" ")) for word in self.words]
        lines = " \\\n    ".join([self.command, *quoted])
        return "\n".join([*(f"# left out: {what}" for what in self.left_out), lines]) + "\n"


def nodes_of(plan: PlacementPlan, role: str) -> tuple[int, int]:
    """Nodes, and devices on each, of the role's pool. Raises EmitError where nodes have unequal parts."""
    pool = plan.pool_of(role)
    counts = pool.process_on_nodes
    if len(set(counts)) != 1:
        raise EmitError(f"pool {pool.name!r} takes {list(counts)} devices of its nodes: they must be equal")
    return len(counts), counts[0]


def mini_batch(keys: Keys) -> int:
    """Samples of one update."""
    batch = keys["batch"]
    return int(batch["mini_batch_samples"] or batch["prompts"] * batch["samples_per_prompt"])


def micro_batch_tokens(keys: Keys, role: str) -> int:
    """Tokens that one rank of the role computes at once."""
    return int(keys[role]["micro_batch_tokens"] or keys["batch"]["micro_batch_tokens"])


def files(value: Any) -> str:
    """One file as it is, several as a list."""
    return str(value[0]) if len(value) == 1 else f"[{','.join(map(str, value))}]"
