"""Names and shapes of the tensors in a Hugging Face folder, without torch: from headers, or a list of them.

A folder may have `tensor_shapes.json` in place of weights, for trying out how a model would be cut:
`{"model.layers.{0-79}.mlp.up_proj.weight": [28672, 8192], ...}`, where `{0-79}` stands for each of 0 to 79.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rolemesh.parallel.checkpoint_error import CheckpointError, listed

SHAPES_FILE = "tensor_shapes.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_RANGE = re.compile(r"\{(\d+)-(\d+)\}")


def stored_shapes(folder: str | Path) -> dict[str, tuple[int, ...]] | None:
    """Shape of every tensor that the folder's weights have, by name; None for a folder without weights.

    Raises CheckpointError for files that an index names and the folder lacks.
    """
    folder = Path(folder)
    if (folder / SHAPES_FILE).is_file():
        return dict(expand(json.loads((folder / SHAPES_FILE).read_text())))
    if (folder / INDEX_FILE).is_file():
        files = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        if lost := {file for file in files if not (folder / file).is_file()}:
            raise CheckpointError(f"{folder / INDEX_FILE} names files that are not there: {listed(lost)}")
        return dict(itertools.chain.from_iterable(_header(folder / file) for file in sorted(files)))
    return dict(_header(folder / SINGLE_FILE)) if (folder / SINGLE_FILE).is_file() else None


def expand(patterns: Mapping[str, Iterable[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that the patterns stand for."""
    for pattern, shape in patterns.items():
        first, *rest = _RANGE.split(pattern)  # text, low, high, text, low, high, text ...
        ranges = [range(int(low), int(high) + 1) for low, high in zip(rest[::3], rest[1::3], strict=True)]
        for numbers in itertools.product(*ranges):
            pairs = zip(numbers, rest[2::3], strict=True)
            yield first + "".join(f"{number}{text}" for number, text in pairs), tuple(shape)


def compressed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Patterns that stand for these names and shapes, with one range for layers and one for experts."""
    rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for (template, shape, layer), of_layer in _by_layer(shapes).items():
        rows.setdefault((template, shape, tuple(sorted(of_layer))), []).append(layer)
    found = {}
    for (template, shape, experts), layers in rows.items():
        for numbers in itertools.product(_ranges(layers), _ranges(experts)):
            name = template
            for number in numbers:
                name = name.replace("#", number, 1)
            found[name] = list(shape)
    return found


def _by_layer(
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[tuple[str, tuple[int, ...], int], list[int]]:
    found: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for name, shape in shapes.items():
        layer, *expert = [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name)] or [-1]
        template = re.sub(r"(?<=\.)\d+(?=\.)", "#", name)
        found.setdefault((template, shape, layer), []).extend(expert or [-1])
    return found


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Runs of whole numbers as patterns."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{{{run[0]}-{run[-1]}}}" for run in runs]


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as opened:
        text = opened.read(int.from_bytes(opened.read(8), "little"))
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])
