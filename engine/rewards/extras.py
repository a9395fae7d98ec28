"""What a scoring function returns besides the score: dicts of any keys, one per sample, as columns."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolemesh.engine.columns import object_column


def ragged_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """An object column [b] for every key of any record, sorted by name; None where a record lacks it."""
    names = sorted({name for record in records for name in record})
    return {name: object_column(record.get(name) for record in records) for name in names}


def present_means(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The mean of every column of numbers over the values that are there (None and NaN are not)."""
    means = {}
    for name, column in columns.items():
        present = [value for value in column if value is not None]
        if present and all(isinstance(value, numbers.Real) for value in present):
            finite = [float(value) for value in present if not math.isnan(value)]
            means[name] = math.fsum(finite) / len(finite) if finite else math.nan
    return means
