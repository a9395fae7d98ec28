"""Memory of one process that others read in place: files in shared memory, CUDA memory by IPC handle."""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARED = Path("/dev/shm")


class HostMemory:
    """Bytes that processes of this machine see when they open `path`; private where there is no room.

    The file has no name any more after `forget`, so nothing is left behind when the processes end.
    """

    def __init__(self, n_bytes: int, shared: bool = True) -> None:
        self.path: str | None = None
        if shared:
            with contextlib.suppress(OSError):
                self.bytes = self._share(str(SHARED / f"rolemesh-{uuid.uuid4().hex}"), n_bytes)
                return
        self.bytes = torch.empty(n_bytes, dtype=torch.uint8)

    def _share(self, path: str, n_bytes: int) -> Tensor:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, n_bytes)  # a later write must not find the disk full: that kills
            memory = _mapped(file, n_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        self.path = path
        return memory

    def forget(self) -> None:
        """Take the name away; who has opened the file goes on."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def open_host_memory(path: str, n_bytes: int) -> Tensor | None:
    """Another process's `HostMemory` [n_bytes] uint8; None where this process cannot see it."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return _mapped(file, n_bytes)
    finally:
        os.close(file)


def ipc_handle(memory: Tensor) -> Any:
    """What another process on the same GPU opens CUDA memory with."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(memory)


def open_ipc(handle: Any) -> Tensor:
    """CUDA memory of another process on this GPU."""
    rebuild, args = handle
    return rebuild(*args)


def _mapped(file: int, n_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, n_bytes), dtype=torch.uint8)
