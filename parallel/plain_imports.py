"""Loads tensordict and megatron-core without torch's compiler, in processes that compile nothing.

Both mark functions for `torch.compile` while they are imported, which loads the compiler: a third of all the
time that a process takes to start. Nobody compiles through tensordict's functions here, and megatron-core's
are compiled on a GPU alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PACKAGES = ("tensordict", "megatron.core")


def install() -> None:
    """Hold for what this process imports from now on; once."""
    if not any(isinstance(finder, _PlainImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PlainImports())


class _PlainImports(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in _PACKAGES):
            return find_spec(fullname, path, target)
        return None


def find_spec(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    """Where a module is, with a loader that marks nothing for the compiler."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None and not _compiles(fullname):
        run = spec.loader.exec_module

        def run_plainly(module: types.ModuleType) -> None:
            with _no_marks():
                run(module)

        spec.loader.exec_module = run_plainly  # type: ignore[method-assign]
    return spec


def _compiles(fullname: str) -> bool:
    import torch

    return fullname.startswith("megatron") and torch.cuda.is_available()


@contextmanager
def _no_marks() -> Iterator[None]:
    """Torch's marks for its compiler give functions back as they are."""
    import torch

    marks: list[tuple[Any, str]] = [(torch, "compile")]
    marks += [(torch.compiler, name) for name in ("allow_in_graph", "assume_constant_result", "disable")]
    before = [getattr(owner, name) for owner, name in marks]
    for owner, name in marks:
        setattr(owner, name, _as_it_is)
    try:
        yield
    finally:
        for (owner, name), value in zip(marks, before, strict=True):
            setattr(owner, name, value)


def _as_it_is(marked: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    return (lambda function: function) if marked is None else marked
