"""Advantage estimators by name: one file each, which registers a function with `register_estimator`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """`advantages` and `returns` [b, R] float, 0 outside of the mask, of this rank's rows.

    `metrics` are the whole batch's and equal on every rank.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


# Called with all of these by keyword; an estimator names those it reads and takes the others as `**_`:
#   token_level_rewards [b, R], response_mask [b, R], values [b, R] (None without a critic),
#   reward_baselines [b] (None without a greedy pass), index [b] (verl's `uid`: the prompt of each row),
#   gamma, lam, norm_adv_by_std,
#   group (the dp ranks that share the batch; all of them call, also those without rows).
AdvantageEstimator = Callable[..., Advantages]

_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def register_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Make the decorated function the estimator `name`. ValueError when the name is taken."""

    def register(estimator: AdvantageEstimator) -> AdvantageEstimator:
        if name in _ESTIMATORS:
            raise ValueError(f"advantage estimator {name!r} is in {_ESTIMATORS[name].__module__} already")
        _ESTIMATORS[name] = estimator
        return estimator

    return register


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`. ValueError lists those that exist."""
    if name not in _ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; there are {', '.join(estimator_names())}")
    return _ESTIMATORS[name]


def estimator_names() -> tuple[str, ...]:
    """Names of the estimators there are."""
    return tuple(sorted(_ESTIMATORS))
