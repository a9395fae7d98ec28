"""Layer parts: few-KV-head projection; attention and norm for machines without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Core attention through torch's `scaled_dot_product_attention`: memory linear in the sequence length.

    Rows are padded on the right, so that causality alone keeps every token from seeing padding: there
    is no mask. The constructor's arguments are those megatron-core passes to a core attention.
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
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, kv heads, d] to [s, b, heads * d]."""
        s, b, heads, _d = query.shape
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = key.shape[1] != heads
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)


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
