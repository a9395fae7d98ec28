"""The megatron-core module of one pipeline stage."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.parallel.spec import block_spec
from rolemesh.parallel.weights import Head
from rolemesh.placement.model import ModelShape, padded_vocab, stage_layers


class ValueHead(nn.Module):
    """One number for each token in place of logits: a vector, the same on every tp rank."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = groups.tp, config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Its gradient is then summed over tp, whose ranks each see a piece of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """hidden [s, b, h], or this rank's piece of s under sequence parallel, to values [s, b, 1] fp32."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank goes on to compute the same loss: backward takes its piece of the gradient.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


def build_stage(
    shape: ModelShape,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    head: Head,
    device: torch.device,
) -> GPTModel:
    """This rank's part of the model; its weights are whatever memory held until a checkpoint fills them.

    The vocabulary is padded so that it divides over tp. For a tied model the pipeline's first and last
    stage must both call: they share a matrix.
    """
    pp_rank, pp = groups.pp.rank(), groups.pp.size()
    layers = stage_layers(shape.n_layers, pp)[pp_rank]
    with device:
        model = GPTModel(
            config,
            block_spec(layers, qk_norm=shape.qk_norm, device=device),
            vocab_size=padded_vocab(shape.vocab, groups.tp.size()),
            max_sequence_length=shape.max_positions,
            pre_process=pp_rank == 0,
            post_process=pp_rank == pp - 1,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied and head == "lm",
            pg_collection=groups,
        )
        if model.post_process and head == "value":
            model.output_layer = ValueHead(config, groups)
    if shape.rope_scaling is not None:
        _scale_rope(model, shape)
    return model


def _scale_rope(model: GPTModel, shape: ModelShape) -> None:
    """Llama 3's scaling with the checkpoint's own numbers (GPTModel's switch fixes all but the factor)."""
    scaling, rope = shape.rope_scaling or {}, model.rotary_pos_emb
    rope.inv_freq = rope._apply_scaling(
        rope.inv_freq,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling.get("original_max_position_embeddings", shape.max_positions),
    )
