"""The roles of RLHF, named as verl's users know them."""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    """What a model does in the step; a combined role does both on one pool."""

    Actor = auto()
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()
