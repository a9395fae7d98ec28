"""What a process takes of a device beside its tensors."""

from __future__ import annotations

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import MemoryItems


def process_memory(device: str, layout: Layout, items: MemoryItems) -> MemoryItems:
    return MemoryItems({**items.resident, "context": 1.6e9}, {**items.working, "slack": 0.05 * items.working_bytes}, items.stage, items.phase)
