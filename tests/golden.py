"""Cases computed by other implementations, in `data/golden`: `from golden import golden_cases, run_case`.

A case holds id, level ("must" any implementation, "compat" what verl does, "better" a float64 oracle where
others give NaN or an error), kw, raises, where (the mask input outside of which nothing is compared), rtol,
atol, note.
"""

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "data" / "golden"


def golden_cases(function: str, *, without: Container[str] = (), **keywords: Any) -> list[Any]:
    """The cases of `function` whose kw hold all `keywords`, but for ids in `without`, as parameters."""
    cases = json.loads((GOLDEN / f"{function}.json").read_text())["cases"]
    chosen = [case for case in cases if keywords.items() <= case["kw"].items() and case["id"] not in without]
    return [pytest.param(case, id=case["id"]) for case in chosen]


def run_case(function: str, case: dict[str, Any], call: Callable[..., dict[str, Tensor]]) -> None:
    """Call with the case's inputs and keywords; compare what it returns, or that it raises as it should."""
    inputs, expected = _read(function, case, "in"), _read(function, case, "out")
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    if case["raises"]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call(**inputs, **case["kw"])
        names = [base.__name__ for base in type(caught.value).__mro__]
        assert set(names) & set(case["raises"]), f"{names[0]} is none of {case['raises']}"
        return
    outputs = call(**inputs, **case["kw"])
    where = inputs[case["where"]].bool() if case["where"] else ...
    for name, truth in expected.items():
        output = outputs[name].detach()
        assert output.shape == truth.shape, name
        match(output[where], truth[where], rtol=case["rtol"], atol=case["atol"], name=name)
    for name, value in before.items():
        assert torch.equal(inputs[name].nan_to_num(), value.nan_to_num()), f"{name} was changed in place"


def match(output: Tensor, truth: Tensor, *, rtol: float, atol: float, name: str = "output") -> None:
    """Compare in float64, equal infinities and NaN included."""
    torch.testing.assert_close(
        output.double(),
        truth.double(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def _read(function: str, case: dict[str, Any], part: str) -> dict[str, Any]:
    arrays = np.load(GOLDEN / f"{function}.npz", allow_pickle=False)
    return {
        name: _tensor(arrays[entry["key"]], entry["dtype"], entry.get("layout", "contig"))
        for name, entry in case[part].items()
    }


def _tensor(array: np.ndarray, dtype: str, layout: str) -> Any:
    if dtype.startswith("np:"):
        return torch.from_numpy(array) if dtype == "np:float64" else array
    tensor = torch.from_numpy(array.copy())
    tensor = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.stack([tensor, tensor], dim=-1)
        return wide[..., 0]
    return tensor
