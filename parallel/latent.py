"""Latent attention (DeepSeek-V2, arXiv 2405.04434) over explicit process groups."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.parallel.attention import CausalAttention, RMSNorm
from rolemesh.parallel.context import Packed
from rolemesh.parallel.rope import rotation_scale, softmax_scale
from rolemesh.placement.model import ModelShape


class CopiedLinear(nn.Module):
    """A projection that is the same on every tp rank; under sequence parallel it sees a piece of it."""

    def __init__(self, n_in: int, n_out: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=config.params_dtype))
        # Its gradient is then summed over tp, whose ranks each see a piece of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(nn.Module):
    """Queries, keys and values through small vectors, which every tp rank has whole; heads are cut over tp.

    megatron-core has such a module; its way down is cut over tp and gathered through global state.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        shape: ModelShape,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__()
        assert shape.latent is not None, "the model has latent attention"
        self.config, self.latent, self.groups = config, shape.latent, pg_collection
        self.n_heads, self.head_dim = shape.n_heads // pg_collection.tp.size(), shape.head_dim
        latent, hidden, queries = shape.latent, shape.hidden, shape.n_heads * shape.head_dim
        if latent.q_rank is None:
            self.linear_q_proj = self._up(hidden, queries)
        else:
            self.linear_q_down_proj = CopiedLinear(hidden, latent.q_rank, config)
            self.q_layernorm = RMSNorm(config, latent.q_rank, _NORM_EPS)
            self.linear_q_up_proj = self._up(latent.q_rank, queries)
        self.linear_kv_down_proj = CopiedLinear(hidden, latent.kv_rank + latent.rope_dim, config)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, _NORM_EPS)
        self.linear_kv_up_proj = self._up(latent.kv_rank, shape.n_heads * (latent.nope_dim + latent.v_dim))
        self.core_attention = CausalAttention(
            config,
            layer_number,
            attn_mask_type,
            "self",
            softmax_scale=softmax_scale(shape),
            pg_collection=pg_collection,
        )
        self.linear_proj = RowParallelLinear(
            shape.n_heads * latent.v_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )
        self.rotation_scale = rotation_scale(shape)
        # What megatron-core's rotation reads: neighbours are pairs.
        self._rotation = copy.copy(config)
        self._rotation.multi_latent_attention = True

    def _up(self, n_in: int, n_out: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            n_in,
            n_out,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.groups.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Packed,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [t, 1, h], or this rank's piece of t under sequence parallel, to the same."""
        latent = self.latent
        if latent.q_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        down = self.linear_kv_down_proj(hidden_states)
        small, turned = down.split([latent.kv_rank, latent.rope_dim], dim=-1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(small))
        kv = kv[:, 0].unflatten(-1, (self.n_heads, -1))  # [t, heads / tp, nope + v]
        key, value = kv.split([latent.nope_dim, latent.v_dim], dim=-1)
        query = query[:, 0].unflatten(-1, (self.n_heads, self.head_dim))
        query, query_turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        # One key of a token turns for all heads; each tp rank's heads add to its gradient.
        if self.config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned, group=self.groups.tp)
        else:
            turned = copy_to_tensor_model_parallel_region(turned, group=self.groups.tp)
        query_turned = self._rotate(query_turned, rotary_pos_emb, packed_seq_params)
        turned = self._rotate(turned, rotary_pos_emb, packed_seq_params)
        query = torch.cat([query, query_turned], dim=-1)
        key = torch.cat([key, turned.expand(-1, self.n_heads, -1)], dim=-1)
        out = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        return self.linear_proj(out.unsqueeze(1))[0], None

    def _rotate(self, x: Tensor, frequencies: Tensor, packed: Packed) -> Tensor:
        """x [t, heads, rope_dim], its pairs turned by their places in their samples."""
        starts = packed.cu_seqlens_q
        return apply_rotary_pos_emb(
            x, frequencies, self._rotation, starts, self.rotation_scale, cp_group=self.groups.cp
        )


_NORM_EPS = 1e-6  # transformers leaves these norms' to its default, whatever the configuration says
