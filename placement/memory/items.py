"""Bytes on one device, item by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class MemoryItems(Mapping[str, float]):
    """What a role keeps on the device of its heaviest rank: item to bytes.

    Attributes:
        resident: there throughout the step (weights, optimizer state), unless it is offloaded.
        working: there only while the operation runs (activations, KV cache, buffers).
        stage: pipeline stage of that rank.
        phase: part of the operation in which the device is fullest.
        cached: bytes of its other phases; a caching allocator may go on holding them, and gives them up
            before it runs out.
    """

    resident: Mapping[str, float] = field(default_factory=dict)
    working: Mapping[str, float] = field(default_factory=dict)
    stage: int = 0
    phase: str = ""
    cached: float = 0.0

    def __post_init__(self) -> None:
        for part in ("resident", "working"):
            kept = {name: float(amount) for name, amount in getattr(self, part).items() if amount}
            object.__setattr__(self, part, kept)
        if twice := set(self.resident) & set(self.working):
            raise ValueError(f"{', '.join(sorted(twice))} named both resident and working")
        if below := [name for name, amount in self.items() if amount < 0]:
            raise ValueError(f"{', '.join(below)} below 0 bytes")

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return self.resident_bytes + self.working_bytes

    @property
    def resident_bytes(self) -> float:
        """Bytes that stay for the whole step."""
        return sum(self.resident.values())

    @property
    def working_bytes(self) -> float:
        """Bytes beside them at the peak of the operation."""
        return sum(self.working.values())

    def __getitem__(self, name: str) -> float:
        return self.resident[name] if name in self.resident else self.working[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.resident
        yield from self.working

    def __len__(self) -> int:
        return len(self.resident) + len(self.working)

    def __hash__(self) -> int:
        return hash((tuple(self.items()), self.stage))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {amount / GIB:.2f}" for name, amount in self.items())
        return f"{self.total / GIB:.2f} GiB on stage {self.stage} ({parts or 'nothing'})"
