"""A user's own estimators and losses: a Python file that registers them when it is loaded."""

import hashlib
import importlib.util
import sys
from pathlib import Path


class AlgorithmFileError(ValueError):
    """A user's algorithm file that is missing or cannot be loaded; the message names it and why."""


def load_algorithm_file(path: str | None) -> None:
    """Run the Python file, once in a process; None is no file.

    It registers with `register_estimator` and `register_policy_loss`. Every process of a run loads it, so the
    nodes must see it under one path. Raises AlgorithmFileError.
    """
    if path is None:
        return
    file = Path(path).resolve()
    name = f"rolemesh_algorithm_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise AlgorithmFileError(f"algorithm.file: no file {file} on this node")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise AlgorithmFileError(f"algorithm.file: {file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise AlgorithmFileError(f"algorithm.file: {file} failed: {type(error).__name__}: {error}") from error
