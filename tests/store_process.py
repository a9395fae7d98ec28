"""A torch store in a process of its own: `from store_process import serving_store`.

A process that serves one has threads, and what is forked from it may inherit their locks.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def serving_store() -> Iterator[int]:
    """The port on 127.0.0.1 of a TCPStore that serves for as long as the block runs."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender,), daemon=True)
    process.start()
    try:
        assert receiver.poll(60), "no store within 60 s"
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


def _serve(sender: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    multiprocessing.get_context("fork").Event().wait()
