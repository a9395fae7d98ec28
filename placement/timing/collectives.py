"""Seconds of collectives over a group of devices: latency and bandwidth, ring or tree, one node or many.

Rates follow NCCL's two protocols: a low-latency one that reaches a part of the link's rate, and a simple
one that reaches nearly all of it after a fixed start. The quicker of the two counts, as NCCL's tuner chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolemesh.placement.timing.efficiency import Efficiency
from rolemesh.placement.timing.links import Links


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
    return _collective(2.0, size, group, links, eff)


def all_gather(size: float, group: Group, links: Links, eff: Efficiency) -> float:
    """Every rank ends with `size` bytes, of which it had its share."""
    return _collective(1.0, size, group, links, eff)


reduce_scatter = all_gather  # the same bytes cross the same links the other way round


def _collective(rounds: float, size: float, group: Group, links: Links, eff: Efficiency) -> float:
    n, nodes = group.size, group.nodes
    if n <= 1 or size <= 0:
        return 0.0
    start = eff.collective_start
    if nodes == 1:
        busy = rounds * (n - 1) / n * size / (links.intra * eff.link)
        quick = start + rounds * (n - 1) * links.intra_latency + busy / eff.quick_share
        return min(quick, start + eff.simple_start + rounds * (n - 1) * links.intra_latency + busy)
    # Every node forwards all other nodes' bytes through the group's own network cards there.
    inside = rounds * (n - 1) / n * size / (links.intra * eff.link) if group.per_node > 1 else 0.0
    between = rounds * (nodes - 1) / nodes * size / (links.inter * eff.network * group.per_node)
    # A tree has log2 hops and sends the bytes as often as a ring does.
    hops = rounds * min(nodes - 1, 2 * math.log2(nodes)) * links.inter_latency
    steps = rounds * (group.per_node - 1) * links.intra_latency
    return start + eff.simple_start + hops + steps + max(inside, between)


def send(size: float, crosses_nodes: bool, links: Links, eff: Efficiency) -> float:
    """From one rank to another."""
    if size <= 0:
        return 0.0
    if crosses_nodes:
        return eff.collective_start + links.inter_latency + size / (links.inter * eff.network)
    return eff.collective_start + links.intra_latency + size / (links.intra * eff.link)


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
    ranks = n * (1 - (1 - 1 / n) ** copies)  # distinct ranks touched by one token, of which one may be itself
    inside = tokens * token_bytes * ranks * (n - 1) / n / (links.intra * eff.link)
    between = 0.0
    if nodes > 1:
        touched = nodes * (1 - (1 - 1 / nodes) ** copies)
        between = tokens * token_bytes * touched * (nodes - 1) / nodes / (links.inter * eff.network)
    hops = links.inter_latency if nodes > 1 else links.intra_latency
    return 2 * eff.collective_start + hops + max(inside, between)
