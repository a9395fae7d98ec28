"""Steps by name."""

from __future__ import annotations

from collections.abc import Callable

from rolemesh.placement.graph import GraphError, StepGraph
from rolemesh.placement.hints import did_you_mean

StepBuilder = Callable[..., StepGraph]
_STEPS: dict[str, StepBuilder] = {}  # filled by the decorator while the package loads


def register_step(name: str) -> Callable[[StepBuilder], StepBuilder]:
    """Make the decorated function the step of the algorithm `name`. Raises GraphError when it is taken."""

    def register(build: StepBuilder) -> StepBuilder:
        if name in _STEPS:
            raise GraphError(f"step {name!r} is registered already, by {_STEPS[name].__module__}")
        _STEPS[name] = build
        return build

    return register


def step_names() -> tuple[str, ...]:
    """Names of the algorithms that have a step."""
    return tuple(sorted(_STEPS))


def step_graph(name: str, **features: object) -> StepGraph:
    """The step of algorithm `name`.

    Features of the built-in steps: `reference` (bool), `reward` (a recipe's kind: "model", "function", ...),
    `kl_in` ("reward", "loss" or None), `reward_takes` and `ref_takes` (as `Operation.takes`). Raises
    GraphError naming the registered steps.
    """
    if name not in _STEPS:
        raise GraphError(
            f"no step for algorithm {name!r} (registered: {', '.join(step_names())})"
            f"{did_you_mean(name, _STEPS)}"
        )
    return _STEPS[name](**features)
