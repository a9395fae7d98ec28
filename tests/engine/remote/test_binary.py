"""The binary body brings back header and arrays, and nothing cut, lengthened or foreign is read."""

import json
import struct

import numpy as np
import pytest

from rolemesh.engine.remote.binary import DTYPES, MAGIC, decode, encode
from rolemesh.engine.remote.forms import FormError

ARRAYS = {
    "ids": np.array([1, 2, 3], np.int32),
    "empty": np.array([], np.float32),
    "grid": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "wide": np.array([[-(2**40)]], np.int64),
    "none": np.zeros((0, 4), np.int64),
}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(text)) + text + data


def test_header_and_arrays_come_back():
    header, arrays = decode(encode({"version": 1, "ids": ["a"]}, ARRAYS))
    assert header == {"version": 1, "ids": ["a"]}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_every_dtype_comes_back_at_any_offset(dtype, n):
    arrays = {"odd": np.arange(3, dtype=np.int32), "more": np.arange(n).astype(dtype)}
    _, back = decode(encode({}, arrays))
    assert {name: (array.dtype.name, array.tolist()) for name, array in back.items()} == {
        name: (array.dtype.name, array.tolist()) for name, array in arrays.items()
    }


def test_every_cut_and_any_addition_is_refused():
    body = encode({"version": 1}, {"ids": ARRAYS["ids"]})
    for length in range(len(body)):
        with pytest.raises(FormError):
            decode(body[:length])
    with pytest.raises(FormError, match="1 bytes after its last array"):
        decode(body + b"x")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\x80\x04K\x01.", "does not begin with"),
        (b"<html>an error page</html>", "does not begin with"),
        (with_header([]), "header is not readable"),
        (with_header({"version": 1}), "header is not readable"),
        (with_header({"arrays": [["a", "object", [1]]]}, b"12345678"), "a is object"),
        (with_header({"arrays": [["a", "int32", [-1]]]}), "header is not readable"),
        (with_header({"arrays": [["a", "int32", [2**62, 2**62]]]}), "ends in array a"),
    ],
)
def test_foreign_bodies_are_refused(body, says):
    with pytest.raises(FormError, match=says):
        decode(body)


def test_objects_are_not_written():
    with pytest.raises(ValueError, match="array a is object"):
        encode({}, {"a": np.array([{}], object)})
    with pytest.raises(ValueError, match="made here"):
        encode({"arrays": 1}, {})
