"""How much memory a role takes on its heaviest rank, item by item; exact counts where there are any."""

from rolemesh.placement.memory.activations import Recompute
from rolemesh.placement.memory.inference import (
    generation_memory,
    inference_memory,
    kv_bytes,
    kv_bytes_per_token,
    kv_capacity_tokens,
    transfer_memory,
)
from rolemesh.placement.memory.items import GIB, MemoryItems
from rolemesh.placement.memory.parameters import RankParams, layers_of, rank_params
from rolemesh.placement.memory.process import process_memory
from rolemesh.placement.memory.software import Sharding, Software, SoftwareError, software, softwares
from rolemesh.placement.memory.training import state_memory, training_memory
from rolemesh.placement.memory.verdict import Demand, Fit, Shortfall, check_fit, usable_bytes

__all__ = [
    "GIB",
    "Demand",
    "Fit",
    "MemoryItems",
    "RankParams",
    "Recompute",
    "Sharding",
    "Shortfall",
    "Software",
    "SoftwareError",
    "check_fit",
    "generation_memory",
    "inference_memory",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "layers_of",
    "process_memory",
    "rank_params",
    "software",
    "softwares",
    "state_memory",
    "training_memory",
    "transfer_memory",
    "usable_bytes",
]
