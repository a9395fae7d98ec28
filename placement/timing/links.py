"""How the devices of a pool are connected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Rates are bytes/s of one device in one direction.

    `per_node` devices share the fast link (a node, or an NVLink domain that spans several). `host` is the
    rate between a device and its host's memory. Where the fast link joins only some devices of a node (boards of
    four, bridged pairs), `island` is their number and `island_link` the rate between islands of a node. `latency` multiplies the latencies of NCCL on its usual links.
    """

    per_node: int = 8
    intra: float = 450e9
    inter: float = 50e9
    host: float = 32e9
    latency: float = 1.0
    island: int = 0
    island_link: float = 16e9

    def __post_init__(self) -> None:
        if self.per_node < 1 or min(self.intra, self.inter, self.host) <= 0:
            raise ValueError(f"links need per_node >= 1 and rates above 0, got {self}")
