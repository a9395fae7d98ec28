"""Values of any kind that a run's processes leave for each other in a store which others may reach too.

`torch.distributed`'s stores let everyone in who can connect. What is unpickled from them carries a seal that
only a process which knows the run's secret can make.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import Any

_SEAL_BYTES = hashlib.sha256().digest_size


class SealError(Exception):
    """A value in a store that no process of this run has put there."""


def sealed(value: Any, secret: bytes, key: str) -> bytes:
    """The value as it goes into a store under `key`."""
    told = pickle.dumps(value)
    return _seal(told, secret, key) + told


def unsealed(data: bytes, secret: bytes, key: str) -> Any:
    """The value that `sealed` made for this key. Raises SealError for anything else, which is not read."""
    seal, told = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(told, secret, key)):
        raise SealError(
            f"the store of this run holds a value under {key!r} that no process of it has written: who else "
            "reaches the nodes' ports?"
        )
    return pickle.loads(told)


def _seal(told: bytes, secret: bytes, key: str) -> bytes:
    return hmac.digest(secret, key.encode() + b"\0" + told, "sha256")
