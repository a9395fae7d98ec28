"""Seconds of moving weights between layouts, and of moving states between a device and its host."""

from __future__ import annotations

from dataclasses import dataclass

from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency
from rolemesh.placement.timing.links import Links

BUCKET = 512e6  # bytes that a transfer sends in one piece
BUCKET_START = 2e-3  # seconds of gathering names, copying and starting one piece
# Seconds of one tensor that is gathered, renamed and loaded by itself, beyond those of its bytes. verl's
# table of weight transfers (docs/advance/fully_async.md), tensor by tensor against large buckets: (15.76 -
# 4.38 s) / 18,771 tensors of Qwen3-30B-A3B and (58.57 - 23.7 s) / 36,757 of Qwen3-235B-A22B are 0.61 and
# 0.95 ms.
TENSOR = 0.8e-3


@dataclass(frozen=True)
class Remote:
    """A role behind a network service: seconds before an answer starts, and answers each second."""

    latency_s: float
    requests_per_s: float

    def seconds(self, n_requests: float) -> float:
        """Seconds until the last of `n_requests` sent at once is answered."""
        return self.latency_s + n_requests / self.requests_per_s if n_requests > 0 else 0.0


def weight_bytes(shape: ModelShape | Dims, bytes_per_param: float = 2.0) -> float:
    """Bytes of a whole model's weights."""
    dims = Dims.of(shape)
    return bytes_per_param * (dims.dense_params() + dims.expert_params() + dims.embedding_params())


def n_tensors(shape: ModelShape | Dims) -> int:
    """Tensors of a checkpoint: experts, and gate and up, are stored one by one."""
    dims = Dims.of(shape)
    each = 3 if dims.gated else 2
    layer = len(dims.attention_weights()) + (4 if not dims.kv_rank else 2)  # q, k, v apart; two norms
    moe = 1 + each * (dims.n_experts + (1 if dims.shared_ffn else 0))
    dense = dims.n_layers - dims.n_moe_layers
    return dims.n_layers * layer + dense * each + dims.n_moe_layers * moe + (2 if dims.tied else 3)


def gathered_seconds(
    shape: ModelShape | Dims,
    source: Layout,
    target: Layout,
    *,
    links: Links,
    efficiency: Efficiency,
    same_pool: bool,
    between: float | None = None,
    bytes_per_param: float = 2.0,
) -> float:
    """The same where every tensor is made whole on every source rank, and handed over as a checkpoint's.

    Exports of Megatron models to inference engines work so (Megatron-Bridge in NeMo RL, verl): all ranks see
    the whole model pass, whatever they keep of it. In the same pool an engine picks its part on the same
    device; between pools a broadcast to all target ranks follows piece by piece, so the slower way counts.
    """
    model = weight_bytes(shape, bytes_per_param)
    apart = source.tp * source.pp * source.ep > 1
    near = source.tp * source.pp * source.ep <= links.per_node
    rate = links.intra * efficiency.link if near else links.inter * efficiency.network
    moving = model / rate if apart else 0.0
    if not same_pool:
        across = (links.inter if between is None else between) * efficiency.network
        moving = max(moving, model / across)
    return TENSOR * n_tensors(shape) + moving


def moved_bytes(
    shape: ModelShape | Dims, source: Layout, target: Layout, bytes_per_param: float = 2.0
) -> float:
    """Bytes that a device of one pool lacks of its part in `target`, having that in `source`."""
    if (source.tp, source.pp, source.ep) == (target.tp, target.pp, target.ep):
        return 0.0
    model = weight_bytes(shape, bytes_per_param)
    kept = model / (max(source.tp, target.tp) * max(source.pp, target.pp))
    return max(model / (target.tp * target.pp) - kept, 0.0)


def transfer_seconds(
    shape: ModelShape | Dims,
    source: Layout,
    target: Layout,
    *,
    links: Links,
    efficiency: Efficiency,
    same_pool: bool,
    between: float | None = None,
    bytes_per_param: float = 2.0,
) -> float:
    """Seconds to bring one layout's weights into another.

    In the same pool every device receives what its target part lacks (HybridFlow 2024, table 2: without a
    redundant copy (tp - tg) / (tg tp) of the model): parts nest, so it keeps 1 / (larger tp x larger pp).
    Between pools (`between`: bytes/s of one device on the way) every target replica receives the
    model once; sources share the sending, targets hand pieces on.
    """
    model = weight_bytes(shape, bytes_per_param)
    wanted = model / (target.tp * target.pp)
    starts = BUCKET_START * max(1.0, wanted / BUCKET)
    if same_pool:
        lacking = moved_bytes(shape, source, target, bytes_per_param)
        fast = max(source.tp * source.pp, target.tp * target.pp) <= links.per_node
        rate = links.intra * efficiency.link if fast else links.inter * efficiency.network
        return starts + lacking / rate if lacking > 0 else 0.0
    rate = (links.inter if between is None else between) * efficiency.network
    sending = model / max(1, source.world)  # each source rank sends its share once
    receiving = wanted
    return starts + max(sending, receiving) / rate


def offload_seconds(n_bytes: float, links: Links, *, share: float = 0.8) -> float:
    """Seconds to move that many bytes between one device and its host, one way.

    `share` of the nominal rate is what pinned copies reach (25 of 32 GB/s on PCIe 4).
    """
    return n_bytes / (links.host * share)
