"""Seconds of collectives over a group of devices: latency and bandwidth, ring or tree, one node or many.

Latencies and the three protocols (LL, LL128, Simple) are those of NCCL's own tuner (`src/graph/tuning.cc`): a
protocol has a start, a latency for each step inside a node and between nodes, and a share of the link's
rate. The quickest protocol and algorithm counts, as NCCL chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolemesh.placement.timing.efficiency import Efficiency
from rolemesh.placement.timing.links import Links

# (start, seconds of a step inside a node, between nodes, share of the link's rate)
PROTOCOLS = ((6.6e-6, 0.6e-6, 2.7e-6, 0.5), (14.0e-6, 1.9e-6, 4.0e-6, 0.92), (8.4e-6, 3.4e-6, 14.0e-6, 1.0))

QUICK_START = 8e-6  # seconds; vLLM's custom all-reduce on 8 x H100 at 64 KiB, from memory


@dataclass(frozen=True)
class Group:
    """`size` ranks, `per_node` of them on each node they touch."""

    size: int
    per_node: int

    @classmethod
    def of(cls, size: int, stride: int, links: Links) -> Group:
        """A group whose neighbours are `stride` ranks apart, on nodes that are filled in rank order."""
        return cls(size, max(1, min(size, links.per_node // max(1, stride))))

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.size / self.per_node)


def all_reduce(size: float, group: Group, links: Links, eff: Efficiency) -> float:
    """Every rank ends with the sum of `size` bytes."""
    if group.size <= 1 or size <= 0:
        return 0.0
    return min(fixed + each * size for fixed, each in all_reduce_ways(group, links, eff))


def all_reduce_ways(group: Group, links: Links, eff: Efficiency) -> list[tuple[float, float]]:
    """(seconds, seconds for each byte) of every protocol, as a ring and as a tree; the least counts."""
    ring = _ring_ways(2, group, links, eff)
    if group.nodes == 1:
        return ring
    # A tree over the nodes: up and down, log2 of them deep; NCCL reckons its rate at nine tenths of a ring's.
    each = _rounds(2, 1.0, group, links, eff) / 0.9
    depth = math.log2(group.nodes)
    tree = [
        (start + 2 * ((group.per_node - 1) * inside + depth * between) * links.latency, each / share)
        for start, inside, between, share in PROTOCOLS
    ]
    return ring + tree


def quick_all_reduce(size: float, group: Group, links: Links, eff: Efficiency) -> float:
    """The same by an engine's own kernel, which reads the other devices' memory of its node directly.

    vLLM, SGLang and TensorRT-LLM have one: one start instead of a step for each rank, the ring's bytes.
    """
    if group.nodes > 1 or links.island:
        return all_reduce(size, group, links, eff)
    if group.size <= 1 or size <= 0:
        return 0.0
    return min(QUICK_START + _rounds(2, size, group, links, eff), all_reduce(size, group, links, eff))


def all_gather(size: float, group: Group, links: Links, eff: Efficiency) -> float:
    """Every rank ends with `size` bytes, of which it had its share. There is no tree for this."""
    return _ring(1, size, group, links, eff) if group.size > 1 and size > 0 else 0.0


reduce_scatter = all_gather  # the same bytes cross the same links the other way round


def _rounds(rounds: int, size: float, group: Group, links: Links, eff: Efficiency) -> float:
    """Seconds that the bytes take on the slower of the links inside a node and between nodes."""
    n, nodes = group.size, group.nodes
    inside = rounds * (n - 1) / n * size / (links.intra * eff.link) if group.per_node > 1 else 0.0
    if nodes == 1:
        island = links.island or links.per_node
        if n <= island:
            return inside
        parts = math.ceil(n / island)
        across = rounds * (parts - 1) / parts * size / (links.island_link * eff.network * island)
        return max(inside, across)
    # Every node forwards all other nodes' bytes, through the network cards of the group's ranks there.
    between = rounds * (nodes - 1) / nodes * size / (links.inter * eff.network * group.per_node)
    return max(inside, between)


def _ring(rounds: int, size: float, group: Group, links: Links, eff: Efficiency) -> float:
    return min(fixed + each * size for fixed, each in _ring_ways(rounds, group, links, eff))


def _ring_ways(rounds: int, group: Group, links: Links, eff: Efficiency) -> list[tuple[float, float]]:
    each = _rounds(rounds, 1.0, group, links, eff)
    between_steps = rounds * (group.nodes - 1)
    inside_steps = rounds * (group.size - 1) - between_steps
    return [
        (start + (inside_steps * inside + between_steps * between) * links.latency, each / share)
        for start, inside, between, share in PROTOCOLS
    ]


def send(size: float, crosses_nodes: bool, links: Links, eff: Efficiency) -> float:
    """From one rank to another."""
    if size <= 0:
        return 0.0
    start, inside, between, _ = PROTOCOLS[2]
    if crosses_nodes:
        return start + between * links.latency + size / (links.inter * eff.network)
    return start + inside * links.latency + size / (links.intra * eff.link)


def all_to_all(
    tokens: float, token_bytes: float, copies: int, group: Group, links: Links, eff: Efficiency
) -> float:
    """Each of a rank's `tokens` goes to the ranks of `copies` experts, evenly spread over the group.

    A token crosses to another node once for all its experts there and fans out inside it (DeepSeek's and
    NVIDIA's dispatchers).
    """
    n, nodes = group.size, group.nodes
    if n <= 1 or tokens <= 0:
        return 0.0
    start, step, between_step, _ = PROTOCOLS[2]
    ranks = n * (1 - (1 - 1 / n) ** copies)  # distinct ranks touched by one token, of which one may be itself
    inside = tokens * token_bytes * ranks * (n - 1) / n / (links.intra * eff.link)
    between = 0.0
    if nodes > 1:
        touched = nodes * (1 - (1 - 1 / nodes) ** copies)
        between = tokens * token_bytes * touched * (nodes - 1) / nodes / (links.inter * eff.network)
    hops = (between_step if nodes > 1 else 0.0) + step
    return start + hops * links.latency + max(inside, between)
