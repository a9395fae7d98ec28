"""What a user may have meant by a key or value that a recipe doesn't have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolemesh.launch.fields import Section, declared
from rolemesh.launch.schema import Recipe


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a nested mapping that hold a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}"


def unknown_key(path: str, value: Any, siblings: Sequence[str], root: type[Section] = Recipe) -> str:
    """Message for the unknown dotted key `path` (or mapping of keys, as `value` tells) of a `root`.

    Tried in turn: one of verl's names; one of ours with something before it; the nearest name or
    meaning in the same section; the nearest key anywhere.
    """
    keys = list(declared(root))
    paths = [k.path for k in keys]
    below = [f"{path}.{leaf}" for leaf in leaves(value)] if isinstance(value, Mapping) else []
    leaf = next(iter(below), path)
    for name in below or [path]:
        if ours := [k.path for k in keys if name in re.split(r"[, ]+", k.metadata["verl"])]:
            return f"unknown key {name}: verl's name; here it is {' with '.join(ours)}"
    if inside := [p for p in paths if leaf.lstrip("+~").endswith(p) and "." in p]:
        return f"unknown key {leaf}; did you mean {max(inside, key=len)}?"
    section, _, name = path.rpartition(".")
    names = {sibling: f"{section}.{sibling}".lstrip(".") for sibling in siblings}
    if section:
        names |= {_slug(k.metadata["doc"]): k.path for k in keys if k.path.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(name, names, n=1):
        return f"unknown key {path}; did you mean {names[near[0]]}?"
    same_end = [p for p in paths if p.rpartition(".")[2] == leaf.rpartition(".")[2]]
    if near := difflib.get_close_matches(leaf, same_end or paths, n=1, cutoff=0.3):
        return f"unknown key {leaf}; did you mean {near[0]}? (`rolemesh schema` lists all keys)"
    return f"unknown key {leaf}; known here: {', '.join(siblings)}"


def _slug(doc: str) -> str:
    """The first words of a description in the form of a key: `learning_rate`."""
    return re.split(r"[.;:,(]", doc)[0].lower().replace(" ", "_")
