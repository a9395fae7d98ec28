"""Curves of one device: matrix products, attention, memory, copies to the host, the start of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from rolemesh.parallel.calibration.points import Point, dtype_name, seconds_of

SLOWEST_S = 0.1  # a run that takes longer ends its curve: larger ones add little
HEADS, HEAD_WIDTH = 8, 64


@dataclass(frozen=True)
class Extent:
    """How much is measured. `products` are m, n, k; `tokens` lengths of attention; `nbytes` of one tensor."""

    products: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    nbytes: int
    budget_s: float

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Extent:
        """What suits a device; `quick` takes a few seconds on a CPU slot."""
        if device.type == "cuda":
            sides = (256, 512, 1024, 2048, 4096, 8192)
            flat = ((1024, 4096, 1024), (4096, 4096, 16384), (8192, 16384, 4096))
            return cls((*_squares(sides), *flat), (512, 2048, 8192), 2**29, 0.05 if quick else 0.4)
        flat = ((64, 512, 128), (256, 1024, 256), (32, 256, 1024))
        if quick:
            return cls((*_squares((64, 256, 512)), *flat), (128, 512), 2**25, 0.08)
        return cls((*_squares((32, 64, 128, 256, 512, 1024)), *flat), (64, 128, 512, 1024), 2**26, 0.5)


def measure(device: torch.device, quick: bool) -> Iterator[Point]:
    """Every curve's points."""
    extent = Extent.of(device, quick)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _products(device, dtype, extent)
        yield from _attention(device, dtype, extent)
    yield from _memory(device, extent)
    yield from _host_copies(device, extent)


def _squares(sides: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((side, side, side) for side in sides)


def _products(device: torch.device, dtype: torch.dtype, extent: Extent) -> Iterator[Point]:
    """[m, k] x [k, n], the weight stored as [n, k] as linear layers have it."""
    for m, n, k in extent.products:
        x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        out = torch.empty(m, n, device=device, dtype=dtype)
        seconds = seconds_of(
            lambda x=x, weight=weight, out=out: torch.mm(x, weight.T, out=out),  # type: ignore[misc]
            device,
            extent.budget_s,
        )
        yield Point("gemm", dtype_name(dtype), (m, n, k), seconds)
        if _too_slow(seconds, device):
            return


def _attention(device: torch.device, dtype: torch.dtype, extent: Extent) -> Iterator[Point]:
    """Causal attention as the models call it: [tokens, batch, heads, width], seen as batches of heads."""
    for tokens in extent.tokens:
        shape = (tokens, 1, HEADS, HEAD_WIDTH)
        leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]

        def forward(leaves: list[torch.Tensor] = leaves) -> torch.Tensor:
            query, key, value = (x.permute(1, 2, 0, 3) for x in leaves)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        out = forward()
        grad = torch.randn_like(out)

        def backward(
            out: torch.Tensor = out, grad: torch.Tensor = grad, leaves: list[torch.Tensor] = leaves
        ) -> None:
            torch.autograd.grad(out, leaves, grad, retain_graph=True)

        sizes, name = (1, HEADS, tokens, HEAD_WIDTH), dtype_name(dtype)
        with torch.no_grad():
            seconds = seconds_of(forward, device, extent.budget_s)
        yield Point("attention_forward", name, sizes, seconds)
        seconds = seconds_of(backward, device, extent.budget_s)
        yield Point("attention_backward", name, sizes, seconds)
        if _too_slow(seconds, device):
            return


def _too_slow(seconds: float, device: torch.device) -> bool:
    """Whether it took one of the ranks so long: all of them end a curve at the same point, or none does."""
    slowest = torch.tensor(seconds, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item() > SLOWEST_S


def _memory(device: torch.device, extent: Extent) -> Iterator[Point]:
    """Bytes are those that cross the memory's pins: read and written."""
    n, name = extent.nbytes // 4, "float32"
    one, other, out = (torch.ones(n, device=device) for _ in range(3))
    runs = {
        "copy": (2, lambda: out.copy_(one)),
        "add": (3, lambda: torch.add(one, other, out=out)),
        "sum": (1, lambda: one.sum()),
    }
    for kind, (tensors, run) in runs.items():
        seconds = seconds_of(run, device, extent.budget_s)  # type: ignore[arg-type]
        yield Point(kind, name, (tensors * 4 * n,), seconds)
    small = torch.ones(16, device=device)
    loops = 200

    def many() -> None:
        for _ in range(loops):
            torch.add(small, small, out=small)

    yield Point("start", name, (3 * 4 * 16,), seconds_of(many, device, extent.budget_s) / loops)


def _host_copies(device: torch.device, extent: Extent) -> Iterator[Point]:
    """To host memory and back; on a CPU slot both sides are host memory."""
    there = torch.ones(extent.nbytes // 4, device=device)
    here = torch.empty(extent.nbytes // 4, pin_memory=device.type == "cuda")
    for kind, run in (
        ("to_host", lambda: here.copy_(there, non_blocking=True)),
        ("from_host", lambda: there.copy_(here, non_blocking=True)),
    ):
        yield Point(kind, "float32", (extent.nbytes,), seconds_of(run, device, extent.budget_s))
