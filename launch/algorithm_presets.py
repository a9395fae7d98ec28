"""What the name of an algorithm stands for: keys of the section `algorithm`, each of which can be set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rolemesh.launch.fields import RecipeError
from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.steps import step_names

Keys = Mapping[str, Any]

# Where the papers (or verl's examples for them) differ from the section's own defaults.
PRESETS: Mapping[str, Keys] = MappingProxyType(
    {
        "ppo": {"estimator": "gae"},
        "grpo": {"estimator": "grpo"},
        "dr_grpo": {
            "estimator": "grpo",
            "norm_adv_by_std": False,
            "loss_agg": "seq-mean-token-sum-norm",
        },
        "rloo": {"estimator": "rloo"},
        "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
        "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline"},
        "remax": {"estimator": "remax"},
        "dapo": {"estimator": "grpo", "clip_high": 0.28, "dual_clip": 10.0},
        "gspo": {"estimator": "grpo", "loss": "gspo"},
        "cispo": {"estimator": "grpo", "loss": "cispo"},
    }
)
# What a policy loss needs: it clips another ratio, or sums in its own way.
LOSS_PRESETS: Mapping[str, Keys] = MappingProxyType(
    {
        "gspo": {"loss_agg": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"clip_low": 1.0},
    }
)
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
LOSSES = ("vanilla", "gspo", "cispo")


def with_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's tree with what `algorithm.name` and `algorithm.loss` stand for, below what is written.

    A file of the user's (`algorithm.file`) is loaded first: it may register names. Raises RecipeError for an
    algorithm that neither a preset nor a step is named after, and for a file that cannot be loaded.
    """
    written = tree.get("algorithm")
    if not isinstance(written, Mapping):
        return dict(tree)
    if isinstance(file := written.get("file"), str):
        _load(file)
    name = written.get("name") or "ppo"
    if name not in PRESETS and name not in step_names():
        known = sorted({*PRESETS, *step_names()})
        raise RecipeError(
            f"algorithm.name is {name!r}, but must be one of {', '.join(known)}, or named after a step that "
            f"algorithm.file registers{did_you_mean(str(name), known)}"
        )
    keys = {**_preset(name, written.get("loss")), **written}
    if isinstance(kl := written.get("kl"), Mapping) and kl.get("in") == "loss":
        keys["kl"] = {"kind": "k3", **kl}
    return {**tree, "algorithm": keys}


def shown_by_name(key: str, default: Any) -> str:
    """A key's default in words: `0.2; dapo: 0.28`."""
    exceptions = [
        f"{name}: {_word(value)}" for name in PRESETS if (value := _preset(name).get(key, default)) != default
    ]
    return "; ".join([_word(default), *exceptions])


def preset_keys() -> frozenset[str]:
    """Dotted keys whose default depends on others of the section: the name, the loss, where the KL acts."""
    tables = (*PRESETS.values(), *LOSS_PRESETS.values())
    return frozenset({f"algorithm.{key}" for keys in tables for key in keys} | {"algorithm.kl.kind"})


def _preset(name: str, loss: str | None = None) -> dict[str, Any]:
    keys = PRESETS.get(name, {})
    return {**LOSS_PRESETS.get(loss or keys.get("loss", ""), {}), **keys}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _load(file: str) -> None:
    from rolemesh.engine.algorithms import load_algorithm_file  # torch: seconds
    from rolemesh.engine.user_file import UserFileError

    try:
        load_algorithm_file(file)
    except UserFileError as error:
        raise RecipeError(str(error)) from error
