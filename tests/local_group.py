"""A worker group whose one rank lives in this process: `from local_group import LocalGroup`."""

from typing import Any

from rolemesh.engine.future import DataProtoFuture


class LocalGroup:
    """Calls a worker's methods here; those on a thread of their own are asked, as with a Ray group."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.layout, self.world_size = worker, worker.layout, 1

    def ask(self, method: str, *args: Any, ranks: Any = None, timeout_s: float = 0.0) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, blocking: bool = True) -> Any:
            value = [getattr(self.worker, method)(*args)]
            if blocking:
                return value
            return DataProtoFuture.completed(value, name=method, fetch=lambda ref: ref, timeout_s=60.0)

        return call
