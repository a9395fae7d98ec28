"""Files that grow line by line and stay readable: what is added is there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def append_whole(path: Path, text: str) -> None:
    """Add `text` at the end of a file. Raises OSError, as of a full disk; the file is as it was then."""
    with path.open("ab", buffering=0) as file:
        before, left = file.seek(0, os.SEEK_END), text.encode()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise
