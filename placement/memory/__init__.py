"""How much memory a role takes on its heaviest rank, item by item; exact counts where there are any."""

from rolemesh.placement.memory.items import GIB, MemoryItems
from rolemesh.placement.memory.parameters import RankParams, rank_params
from rolemesh.placement.memory.software import Software, SoftwareError, software, softwares
from rolemesh.placement.memory.training import state_memory, training_memory

__all__ = [
    "GIB", "MemoryItems", "RankParams", "Software", "SoftwareError", "rank_params", "software", "softwares",
    "state_memory", "training_memory",
]  # fmt: skip
