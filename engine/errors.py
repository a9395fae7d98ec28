"""What can go wrong with a call on a worker group; each error names role, rank, node and operation."""

from __future__ import annotations


class CallError(RuntimeError):
    """A call on a worker group that gave no result; the base of the errors below."""


class WorkerError(CallError):
    """The operation raised on a rank; the message ends with the remote traceback.

    `__cause__` is the remote exception itself where it could be sent.
    """

    def __init__(self, role: str, rank: int, node: str, operation: str, remote_traceback: str) -> None:
        super().__init__(role, rank, node, operation, remote_traceback)
        self.role, self.rank, self.node, self.operation = role, rank, node, operation
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return (
            f"{self.role} rank {self.rank} on node {self.node} failed in {self.operation}\n"
            f"{self.remote_traceback.rstrip()}"
        )


class WorkerDied(CallError):
    """The process of a rank is gone; the message holds how it ended and its last log lines."""

    def __init__(self, role: str, rank: int, node: str, operation: str, how: str, log: str) -> None:
        super().__init__(role, rank, node, operation, how, log)
        self.role, self.rank, self.node, self.operation, self.how, self.log = (
            role, rank, node, operation, how, log,
        )  # fmt: skip

    def __str__(self) -> str:
        where = f"{self.role} rank {self.rank} on node {self.node}"
        return f"{where} died in {self.operation}: {self.how}\n{self.log}"


class CallTimeout(CallError, TimeoutError):
    """A limit in time passed; for a call, the message names the late ranks and where they are."""


class PoolBroken(CallError):
    """The pool cannot take calls any more; the message repeats the first cause."""
