"""JudgeCache: answers kept in files between runs, by a hash of all that was asked."""

import contextlib
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASIDE_LIMIT_S = 3600.0


def content_key(question: Mapping[str, Any]) -> str:
    """The SHA-256, in hex, of a question: equal for equal content, whatever the order of its keys."""
    text = json.dumps(question, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class JudgeCache:
    """At most `entries` answers under `folder`, one small file each; several processes may share it.

    A file is written aside and moved into place, so a reader sees a whole entry or none; one that cannot be
    read counts as absent. When there are too many, those unused longest go, a tenth at a time.
    Methods may be called from several threads.
    """

    def __init__(self, folder: Path | str, entries: int = 100_000) -> None:
        if entries < 1:
            raise ValueError(f"judge cache of {entries} entries: at least 1")
        self.folder, self.entries = Path(folder), entries
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._count = len(self._files())
        for left in self.folder.glob("*/*.aside-*"):  # by a process that died while it wrote
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < time.time() - ASIDE_LIMIT_S:
                    left.unlink()

    def get(self, key: str) -> str | None:
        """The answer kept under `key`."""
        path = self._path(key)
        try:
            entry = json.loads(path.read_bytes())
            answer = entry["answer"]
            if entry["key"] != key or not isinstance(answer, str):
                return None
            os.utime(path)  # used now
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return answer

    def put(self, key: str, answer: str) -> None:
        """Keep `answer` under `key`. Raises OSError where the folder cannot be written."""
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(f".aside-{uuid.uuid4().hex}")
        try:
            aside.write_text(json.dumps({"key": key, "answer": answer}), encoding="ascii")
            is_new = not path.exists()
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        with self._lock:
            self._count += is_new
            if self._count > self.entries:
                self._drop_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def _files(self) -> list[os.DirEntry[str]]:
        """Every entry's file."""
        files = []
        for folder in self.folder.iterdir():
            if folder.is_dir():
                with os.scandir(folder) as listed:
                    files += [entry for entry in listed if entry.name.endswith(".json")]
        return files

    def _drop_oldest(self) -> None:
        """Remove the entries unused longest, down to nine tenths of the limit."""
        aged = []
        for entry in self._files():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                aged.append((entry.stat().st_mtime_ns, entry.path))
        aged.sort()
        self._count = min(len(aged), max(1, self.entries * 9 // 10))
        for _, path in aged[: len(aged) - self._count]:
            Path(path).unlink(missing_ok=True)
