"""A user's own Python files: each is run once in a process, as a module of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


class UserFileError(ValueError):
    """A user's file or class that is missing or cannot be loaded; the message names its key and why."""


def load_file(path: str, key: str) -> ModuleType:
    """Run the Python file that the recipe's `key` names, once in a process. It may import its neighbours.

    Every process that needs it loads it, so the nodes must see it under one path. Raises UserFileError.
    """
    file = Path(path).resolve()
    name = f"rolemesh_user_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise UserFileError(f"{key}: no file {file} on this node")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{key}: {file} is not a Python file (.py)")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # the last place, so that it hides nothing
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserFileError(f"{key}: {file} failed: {type(error).__name__}: {error}") from error
    return module


@dataclass(frozen=True)
class UserClass:
    """A class of a user's file, as `file.py:Class`: a value that travels to the processes that `load` it.

    It must be a subclass of `base`.
    """

    path: str
    key: str
    base: type = object

    def load(self) -> Any:
        """The class. Raises UserFileError."""
        file, _, name = self.path.rpartition(":")
        if not file:
            raise UserFileError(f"{self.key}: {self.path!r} names no class; write file.py:Class")
        module = load_file(file, self.key)
        cls = getattr(module, name, None)
        if not inspect.isclass(cls):
            found = [key for key, value in vars(module).items() if inspect.isclass(value)]
            raise UserFileError(
                f"{self.key}: {file} has no class {name}; it has {', '.join(found) or 'none'}"
            )
        if not issubclass(cls, self.base):
            raise UserFileError(
                f"{self.key}: {name} of {file} must be a subclass of {self.base.__name__} "
                f"(from {self.base.__module__} import {self.base.__name__}), the role's own worker"
            )
        return cls
