"""megatron-core's configuration of one role's model, from its shape and its layout."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

Recompute = Literal["none", "selective", "full"]


class StageLayers(PipelineParallelLayerLayout):
    """Layers of each pipeline stage as one stage sees them.

    megatron-core's class does the same but asks its global state which stage this is.
    """

    def __init__(self, stages: list[list[range]], pp_rank: int) -> None:
        parts = [stage[part] for part in range(len(stages[0])) for stage in stages]
        kinds = [[LayerType.decoder] * len(part) for part in parts]
        kinds[0].insert(0, LayerType.embedding)
        kinds[-1].append(LayerType.loss)
        super().__init__(kinds, len(stages))
        self._parts = stages[pp_rank]

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Decoder layers of the stage's part."""
        return len(self._parts[vp_stage or 0])

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Decoder layers before it."""
        return self._parts[vp_stage or 0].start


def transformer_config(
    shape: ModelShape,
    layout: Layout,
    pp_rank: int,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
) -> TransformerConfig:
    """Configuration of the pipeline stage `pp_rank`.

    There is no dropout, so that a forward pass is a function of weights and tokens alone. Weights are not
    initialised: a checkpoint fills them. `recompute` says what the backward pass makes anew: `full`
    keeps only each layer's input, `selective` all but what attention gives (and, under context parallelism,
    the other ranks' keys and values). Gradients are summed over data parallel ranks, not averaged: losses
    come divided already.

    Raises LayoutError for a model that the workers do not build, and a layout that cannot cut it.
    """
    layout.check(shape)
    return TransformerConfig(
        **_experts(shape, layout),
        num_layers=shape.n_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.n_heads,
        num_query_groups=shape.n_kv_heads,
        # Of a head it is what turns with the position, by which megatron-core makes its frequencies.
        kv_channels=shape.latent.rope_dim if shape.latent else shape.head_dim,
        window_size=None if shape.window is None else (shape.window - 1, 0),
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_layout=(
            StageLayers(layout.stages(shape.n_layers), pp_rank) if layout.pp > 1 else None
        ),
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,  # micro-batches differ in length: stages tell each other the shape
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even without experts
        batch_p2p_comm=False,
        # Not `perform_initialization=False`: that also leaves out the marks that tell tp shards from copies,
        # by which a parameter counts once in the gradient norm.
        init_method=_leave,
        output_layer_init_method=_leave,
        calculate_per_token_loss=True,  # gradients are summed over dp, the loss is not divided again
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=["core_attn"],  # of `selective`
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        # What needs apex's or Transformer Engine's kernels:
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _experts(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    """Settings of a mixture of experts. How tokens are routed is our router's."""
    if shape.moe is None:
        return {}
    return {
        "num_moe_experts": shape.moe.n,
        "moe_ffn_hidden_size": shape.moe.ffn,
        "moe_router_topk": shape.moe.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": True,  # not read: megatron-core refuses other settings for one expert
        "moe_shared_expert_intermediate_size": shape.moe.shared_ffn or None,
        "moe_shared_expert_gate": shape.moe.shared_gate,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """An initialiser that does nothing, for weights that a checkpoint fills."""
    return weight
