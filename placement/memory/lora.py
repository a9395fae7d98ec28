"""Parameters of low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape


def adapter_params(shape: ModelShape, layout: Layout, n_layers: int, rank: int) -> int:
    """Of `rank` on every projection of `n_layers` layers, on one rank; routed experts go without.

    An adapter of a projection from n to m values has rank x (n + m); the side that is cut over tp is cut.
    """
    if rank < 1:
        return 0
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    ffn = shape.ffn if shape.moe is None else shape.moe.shared_ffn
    whole = shape.hidden * (4 + (2 + shape.gated) * (ffn > 0))
    cut = q + 2 * kv + q + (2 + shape.gated) * ffn
    return n_layers * rank * (whole + cut // layout.tp)
