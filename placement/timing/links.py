"""How the devices of a pool are connected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Rates are bytes/s of one device in one direction; latencies are seconds of one hop.

    `per_node` devices share the fast link (a node, or an NVLink domain that spans several). `host` is the
    rate between a device and its host's memory.
    """

    per_node: int = 8
    intra: float = 450e9
    inter: float = 50e9
    intra_latency: float = 0.6e-6
    inter_latency: float = 5e-6
    host: float = 32e9

    def __post_init__(self) -> None:
        if self.per_node < 1 or min(self.intra, self.inter, self.host) <= 0:
            raise ValueError(f"links need per_node >= 1 and rates above 0, got {self}")
