"""How a command's process starts and ends: quickly, however much it has loaded."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def end_with(main: Callable[[], int | None]) -> None:
    """Call `main` and end the process with the exit code that it returns or raises.

    The process ends after all that was registered with `atexit`, but takes none of its objects apart, which
    takes seconds once torch and megatron-core are loaded, and is no use.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered is called last
    try:
        code: object = main()
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        codes.append(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


def _leave(codes: list[int]) -> None:
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


@contextmanager
def quick_imports() -> Iterator[None]:
    """Load modules without garbage collections, a fifth of the time, and look at them no more."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
