"""The process that runs a user's scoring function; `ScorerPool` starts it, and kills it when it hangs.

    python -m rolemesh.engine.rewards.scorer FD FILE FUNCTION

Over the connection FD it first sends `("ready", None)` or `("error", text)`, then answers each request, a
dict of keyword arguments, with `("scored", (score, extra))` or `("error", text)`. Torch is not imported here.
"""

import importlib.util
import inspect
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load(file: Path, name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Function `name` of a Python file, which may import its neighbours, and the arguments to pass.

    It must take `ARGUMENTS`; it gets `prompt_str` too where it has such a parameter.
    """
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise AttributeError(f"{file} has no function {name!r}; it has {found}")
    signature = inspect.signature(function)
    arguments = (*ARGUMENTS, "prompt_str") if "prompt_str" in signature.parameters else ARGUMENTS
    signature.bind(**dict.fromkeys(arguments))
    return function, arguments


def split_result(result: Any) -> tuple[float, dict[str, Any]]:
    """The score and the other entries of what was returned: a number, or a dict with `score`."""
    extra = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in extra:
        raise ValueError(f"the returned dict has no 'score'; it has {sorted(map(str, extra))}")
    score = extra.pop("score")
    try:
        return float(score), extra
    except (TypeError, ValueError):
        raise ValueError(
            f"the score is {score!r}; return a number, or a dict with a number as 'score'"
        ) from None


def main(fd: int, file: Path, function_name: str) -> None:
    connection = Connection(fd)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        function, names = load(file, function_name)
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ready", None))
    while True:
        arguments = requests.get()
        try:
            result = function(**{name: arguments[name] for name in names})
            connection.send(("scored", split_result(result)))
        except Exception:
            connection.send(("error", traceback.format_exc()))


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Queue requests; when the other side is gone, end this process group, however busy the function is."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
