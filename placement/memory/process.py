"""What a process takes of a device beside its tensors."""

from __future__ import annotations

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import MemoryItems
from rolemesh.placement.memory.software import Software, memory_data

MIB = 2**20


def context_bytes(device: str) -> float:
    """CUDA's context and kernels on a device type (`h100-80`); 0 on a CPU slot."""
    known = memory_data()["process"]["context"]
    if device.lower().startswith("cpu"):
        return 0.0
    name = next((name for name in known if device.lower().startswith(name)), "default")
    return known[name][0] * MIB


def communicators(layout: Layout) -> int:
    """NCCL communicators of a role: of each axis that is cut, and those that megatron-core adds to them."""
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep))
    model_parallel = layout.tp > 1 and layout.pp > 1
    return axes + model_parallel + (layout.pp > 1) + (layout.world > 1)  # ends of the pipeline; all ranks


def communicator_bytes(layout: Layout, device: str) -> float:
    """Buffers of a role's communicators; gloo's on CPU slots are counted with their host."""
    if device.lower().startswith("cpu"):
        return 0.0
    return communicators(layout) * memory_data()["process"]["communicator"][0] * MIB


def slack_fraction(by: Software, *, without: str | None = None) -> float:
    """Part of the working memory lost between blocks; the mean of its fits, one source left out if told."""
    if by.expandable:
        return 0.0
    fits = {source: fit[0] for source, fit in memory_data()["process"]["slack"].items() if source != without}
    return sum(fits.values()) / len(fits)


def default_margin() -> float:
    """Part of a device that a plan leaves free."""
    return float(memory_data()["process"]["margin"][0])


def process_memory(
    items: MemoryItems, device: str, layout: Layout, by: Software, *, without: str | None = None
) -> MemoryItems:
    """`items` and what their process takes beside them, as the device's limit sees it."""
    return MemoryItems(
        {
            **items.resident,
            "context": context_bytes(device),
            "communicators": communicator_bytes(layout, device),
        },
        {**items.working, "allocator slack": slack_fraction(by, without=without) * items.working_bytes},
        items.stage,
        items.phase,
        items.cached,
    )
