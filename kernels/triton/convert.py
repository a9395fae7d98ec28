"""From other types to float64 and back; bfloat16 by way of float32, as the interpreter needs it."""

import triton
import triton.language as tl


@triton.jit
def to_float64(x):
    if x.dtype == tl.bfloat16:
        return x.to(tl.float32).to(tl.float64)
    else:  # noqa: RET505  # one branch is compiled
        return x.to(tl.float64)


@triton.jit
def store(at, x, inside):
    """Store the float64 `x` in the type that `at` points to."""
    if at.dtype.element_ty == tl.bfloat16:
        x = x.to(tl.float32)
    tl.store(at, x.to(at.dtype.element_ty), mask=inside)
