"""`rolemesh cluster`: a cluster as a table and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rolemesh.placement.cluster import ClusterError, ClusterSpec, DeviceKind, NodeSpec
from rolemesh.placement.memory.items import GIB

_HEADER = ("nodes", "devices", "memory", "host", "CPUs", "in node", "to others", "to host", "more")


def find_cluster(
    address: str = "", preset: str = "", slots: int = 0, kind: DeviceKind | None = None
) -> tuple[ClusterSpec, list[str]]:
    """The Ray cluster at `address`, or what `preset` says, or else this machine; and notes for a person.

    Raises RecipeError when nothing answers, ClusterError for a preset that is none.
    """
    if address and preset:
        raise ClusterError("give an address or a preset, not both")
    if preset:
        file = Path(preset)
        return (ClusterSpec.from_yaml(file.read_text()) if file.is_file() else ClusterSpec.preset(preset)), []
    if address:
        return _live(address, kind)
    return this_machine(slots, kind)


def this_machine(slots: int = 0, kind: DeviceKind | None = None) -> tuple[ClusterSpec, list[str]]:
    """This machine as a cluster of one node: its GPUs, or worker slots (by default one for each core)."""
    from rolemesh.engine.machine import described, look

    facts = look()
    kind = kind or ("cuda" if facts.gpus and not slots else "cpu")
    devices = len(facts.gpus) if kind == "cuda" else slots or facts.cores
    node, notes = described(NodeSpec("localhost", devices, cpus=facts.cores), facts, kind)
    return ClusterSpec((node,), kind), notes


def cluster_lines(cluster: ClusterSpec) -> list[str]:
    """A table for a person: equal neighbours on one line, figures from the nodes or their device type."""
    rows: list[tuple[str, ...]] = [_HEADER]
    rows += [_row(cluster, nodes) for nodes in _runs(cluster.nodes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    types = ", ".join(f"{count} x {kind or 'unknown'}" for kind, count in cluster.device_types.items())
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    head = f"nodes with devices: {len(cluster.usable)}; devices: {cluster.n_devices} ({types or 'none'})"
    return [head, *table]


def _live(address: str, kind: DeviceKind | None) -> tuple[ClusterSpec, list[str]]:
    from rolemesh.engine.ray.cluster import RayStartError, joined_cluster
    from rolemesh.engine.ray.survey import survey
    from rolemesh.launch.fields import RecipeError

    try:
        with joined_cluster(address, device_kind=kind) as cluster:
            return survey(cluster)
    except RayStartError as error:
        raise RecipeError(f"--address: {error}; is Ray running?") from error


def _runs(nodes: Sequence[NodeSpec]) -> list[list[NodeSpec]]:
    """Neighbours that are alike."""
    runs: list[list[NodeSpec]] = []
    for node in nodes:
        if runs and runs[-1][-1].like(node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _row(cluster: ClusterSpec, nodes: Sequence[NodeSpec]) -> tuple[str, ...]:
    node = nodes[0]
    name = node.name if len(nodes) == 1 else f"{node.name} ... {nodes[-1].name} ({len(nodes)})"
    more = [f"{key}={value}" for key, value in sorted(node.labels.items())]
    more += [f"{amount:g} {key}" for key, amount in sorted(node.resources.items())]
    more += [f"group {node.group}"] if node.group else []
    more += [node.address] if node.address and len(nodes) == 1 else []
    more += [] if node.alive else ["not alive"]
    kind = cluster.device_type(node)
    try:
        profile = cluster.profile_of(node)
    except ClusterError:
        figures = [_gib(node.memory_bytes), _gib(node.host_bytes), f"{node.cpus:g}", "?", "?", "?"]
    else:
        host = node.host_bytes or profile.host_bytes * node.devices
        rates = (profile.link_bytes_per_s, profile.nic_bytes_per_s, profile.pcie_bytes_per_s)
        figures = [_gib(profile.memory_bytes), _gib(host), f"{node.cpus:g}".replace("inf", "?")]
        figures += [f"{rate / 1e9:.3g} GB/s" for rate in rates]
    return (name, f"{node.devices} x {kind or 'unknown'}", *figures, ", ".join(more))


def _gib(amount: float | None) -> str:
    return "?" if amount is None else f"{amount / GIB:.4g} GiB"
