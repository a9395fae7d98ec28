"""Layer parts: few-KV-head projection; attention and norm for machines without Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.parallel.context import Packed, Span


class CausalAttention(nn.Module):
    """Core attention through torch's `scaled_dot_product_attention`: memory linear in the sequence length.

    With a sliding window a token sees itself and the `window` - 1 tokens before it.

    Samples come packed, and each sees itself alone. Under context parallelism a rank's queries meet the keys
    and values of all cp ranks, under a boolean mask of (a rank's chunk of a sample) x (the sample up to the
    chunk's end). The constructor's arguments are those megatron-core passes to a core attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_group = None if pg_collection is None else pg_collection.cp
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] of this rank's tokens to [t, heads * d]."""
        if packed_seq_params.order is not None:
            key, value = (self._of_all(x)[packed_seq_params.order] for x in (key, value))
        spans = list(self._windows(packed_seq_params.spans))
        of_spans = zip(
            query.split([span.n_queries for span in spans]), seen(key, spans), seen(value, spans), strict=True
        )
        outputs = [self._attend(*(x.transpose(0, 1)[None] for x in parts))[0] for parts in of_spans]
        return torch.cat([output.transpose(0, 1) for output in outputs]).flatten(1)

    def _of_all(self, x: Tensor) -> Tensor:
        """The cp ranks' tokens laid end to end; backward sums what every rank's queries ask of each."""
        return gather_from_sequence_parallel_region(x, group=self.cp_group)

    def _windows(self, spans: Sequence[Span]) -> Iterator[Span]:
        """The spans, those longer than the window cut so that memory stays linear in their length."""
        for span in spans:
            n_queries, start, stop = span
            if self.window is None or stop - start <= self.window:
                yield span
                continue
            for first in range(stop - n_queries, stop, self.window):
                last = min(first + self.window, stop)
                yield Span(last - first, max(start, first - self.window + 1), last)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of queries [1, heads, s, d], the last ones of keys [1, kv heads, k, d]."""
        s, k = query.shape[2], key.shape[2]
        mask = None
        if s < k or (self.window is not None and self.window < k):
            mask = torch.ones(s, k, dtype=torch.bool, device=query.device).tril(k - s)
        if mask is not None and self.window is not None:
            mask = mask.triu(k - s - self.window + 1)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )


def seen(x: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """What each span sees of x [t, ...]. Where that is each token once, backward is one concatenation; slices
    would each give a gradient of x's whole size.
    """
    ends = [0, *(span.stop for span in spans)]
    if [*(span.start for span in spans), len(x)] == ends:
        return x.split([span.stop - span.start for span in spans])
    return [x[span.start : span.stop] for span in spans]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; under sequence parallel it sees a piece of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Its gradient is then summed over tp, whose ranks each see a piece of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GroupedSelfAttention(SelfAttention):
    """Self-attention where tp may be larger than the number of KV heads, over an explicit tp group.

    megatron-core handles this case too, but through its global state.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [s, b, h] to query [s, b, heads / tp, d], key and value [s, b, 1, d]."""
        kv_heads, tp = self.config.num_query_groups, self.tp_group.size()
        if kv_heads >= tp:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
        kv_head, part = divmod(self.tp_group.rank(), tp // kv_heads)
        heads = mixed.unflatten(-1, (kv_heads, -1, self.config.kv_channels))[:, :, kv_head]
        query, key, value = heads.split([heads.shape[2] - 2, 1, 1], dim=2)
        query = query.chunk(tp // kv_heads, dim=2)[part]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value
