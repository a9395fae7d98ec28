"""Arrays and a small JSON header as one body, for token ids and log-probs; nothing in it can run code.

Eight bytes `RMARRAY1`, the header's length (uint32), the header (JSON, UTF-8), the arrays' bytes one after
the other; all little-endian, in C order. The header's `arrays` lists `[name, dtype, shape]` in that order.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolemesh.engine.remote.forms import FormError

CONTENT_TYPE = "application/x-rolemesh-arrays"
MAGIC = b"RMARRAY1"
DTYPES = ("int32", "int64", "float32", "float64")


def encode(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The body. `header` is JSON with any keys but `arrays`; arrays have a dtype of `DTYPES`.

    Raises ValueError for another dtype, or a header that holds `arrays`.
    """
    if "arrays" in header:
        raise ValueError("the header's `arrays` is made here")
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise ValueError(f"array {name} is {array.dtype}; one of {', '.join(DTYPES)} is needed")
    listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}, allow_nan=False).encode()
    parts = [
        np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays.values()
    ]
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *parts])


def decode(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays, which are read-only views of `content`.

    Raises FormError when the body is cut short, too long, or not of this form.
    """
    start = len(MAGIC) + 4
    if len(content) < start or not content.startswith(MAGIC):
        raise FormError(f"the binary body does not begin with {MAGIC.decode()}: {content[:16]!r}")
    (length,) = struct.unpack_from("<I", content, len(MAGIC))
    try:
        header = json.loads(content[start : start + length].decode())
        listed = [
            (str(name), str(dtype), [*map(_size, shape)]) for name, dtype, shape in header.pop("arrays")
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormError(f"the binary body's header is not readable: {error!r}") from error
    arrays: dict[str, np.ndarray] = {}
    at = start + length
    for name, dtype, shape in listed:
        if dtype not in DTYPES:
            raise FormError(f"array {name} is {dtype}; one of {', '.join(DTYPES)} is needed")
        count = math.prod(shape)
        n_bytes = count * np.dtype(dtype).itemsize
        if at + n_bytes > len(content):
            raise FormError(f"the binary body ends in array {name} {shape}: {len(content)} bytes came")
        little = np.dtype(dtype).newbyteorder("<")
        arrays[name] = np.frombuffer(content, little, count, at).reshape(shape)
        at += n_bytes
    if at != len(content):
        raise FormError(f"the binary body has {len(content) - at} bytes after its last array")
    return header, arrays


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
