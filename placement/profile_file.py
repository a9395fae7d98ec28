"""Profile files as they are written: what was measured, and what runs have told since.

Feeding a profile is simple on purpose. Each kind of operation (generate, infer, train, transfer) has one
factor that its predicted seconds are multiplied with, 1 at first. A run whose plan was made with the profile
says that operations of a kind took r times what was predicted (all of them together, so that long ones count
more). The factor is then multiplied with r ** DAMPING, r at most MOST either way: half of the error goes with
each run, and one odd run does little harm. Over runs the factor settles where predictions are right on
average.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rolemesh.placement.hardware import HardwareError, load_profile

DAMPING = 0.5
MOST = 4.0
_CURVES = (
    "# kind, dtype, sizes (a product's m, n, k; attention's batch, heads, tokens, width; layers;\n"
    "# else bytes), seconds\n"
)


def profile_text(data: Mapping[str, Any]) -> str:
    """The content of a profile file; `curves`, one row a line, come last."""
    head = {name: value for name, value in data.items() if name != "curves"}
    rows = "".join(f"- {_flow(row)}\n" for row in data.get("curves", ()))
    return (
        "# What `rolemesh calibrate` measured; the data sheet holds for the rest.\n"
        + yaml.safe_dump(head, sort_keys=False, default_flow_style=None, width=110)
        + (f"{_CURVES}curves:\n{rows}" if rows else "")
    )


def read_profile_data(path: str | Path) -> dict[str, Any]:
    """The content of a profile file. Raises HardwareError for a file that is none."""
    load_profile(path)  # says what is wrong with it
    data: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return data


def fed(
    data: Mapping[str, Any], predicted_s: Mapping[str, float], measured_s: Mapping[str, float], run: str
) -> dict[str, Any]:
    """`data` with the factors that follow from a run: seconds by kind of operation, planned and measured.

    Kinds that lack one of the two, or are 0, stay as they are. Raises HardwareError for a run that the
    profile has been fed with.
    """
    runs = list(data.get("runs", ()))
    if run in runs:
        raise HardwareError(f"the profile was fed with the run {run} before: once is enough")
    factors = {kind: dict(entry) for kind, entry in data.get("factors", {}).items()}
    for kind, predicted in predicted_s.items():
        measured = measured_s.get(kind, 0.0)
        if predicted > 0 and measured > 0:
            ratio = min(max(measured / predicted, 1 / MOST), MOST)
            entry = factors.get(kind, {"factor": 1.0, "runs": 0})
            factor = float(f"{entry['factor'] * ratio**DAMPING:.5g}")
            factors[kind] = {"factor": factor, "runs": entry["runs"] + 1}
    curves = {"curves": data["curves"]} if "curves" in data else {}
    rest = {name: value for name, value in data.items() if name not in ("curves", "factors", "runs")}
    return {**rest, "factors": factors, "runs": [*runs, run], **curves}


def _flow(row: Any) -> str:
    """One row on one line."""
    return yaml.safe_dump(row, default_flow_style=True, width=1000).strip()
