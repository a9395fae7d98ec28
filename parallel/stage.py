"""The megatron-core module of one pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.parallel.rope import inverse_frequencies
from rolemesh.parallel.spec import block_spec
from rolemesh.parallel.weights import Head
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape, padded_vocab


class OutputLayer(nn.Module):
    """What stands in the place of megatron-core's output layer; its output is whole on every tp rank."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = groups.tp, config.sequence_parallel

    def gather(self, output: Tensor) -> Tensor:
        """The whole sequence [s, b, ...] from this rank's piece of it under sequence parallel.

        Every rank goes on to compute the same loss: backward takes this rank's piece of the gradient.
        """
        if not self.sequence_parallel:
            return output
        return gather_from_sequence_parallel_region(
            output, tensor_parallel_output_grad=False, group=self.tp_group
        )


class PolicyHead(OutputLayer):
    """Holds the lm head's weight, this rank's rows of the vocabulary, and gives out what it is to multiply.

    Logits are never held whole: `linear_log_prob_and_entropy` makes them a tile at a time. The weight is None
    where a tied model's is the embedding's.
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, lm_head: ColumnParallelLinear
    ) -> None:
        super().__init__(config, groups)
        self.register_parameter("weight", lm_head.weight)  # as made: with the marks of a shard over tp

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """hidden [s, b, h], or this rank's piece of s under sequence parallel, to hidden [s, b, h]."""
        return self.gather(hidden), None


class ValueHead(OutputLayer):
    """One number for each token in place of logits: a vector, the same on every tp rank."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Its gradient is then summed over tp, whose ranks each see a piece of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """hidden [s, b, h], or this rank's piece of s under sequence parallel, to values [s, b, 1] fp32."""
        return self.gather(F.linear(hidden.float(), self.weight.float())), None


class _Stage(GPTModel):
    """megatron-core's model, which takes the padding mask of this rank's own tokens on every stage.

    The class itself cuts it over tp, on the first stage only and through global state.
    """

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
        found = super()._preprocess(*args, **kwargs)
        return (*found[:5], padding_mask, *found[6:])


def build_stage(
    shape: ModelShape,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    layout: Layout,
    head: Head,
    device: torch.device,
    part: int = 0,
) -> GPTModel:
    """This rank's part of the model; its weights are whatever memory held until a checkpoint fills them.

    With interleaving a stage has several parts, `part` is the one to build. The last stage's last part gives
    out hidden states [b, s, h] after the final norm (`head` "lm") or values [b, s, 1].

    The vocabulary is padded so that it divides over tp. For a tied model the pipeline's first and last
    stage must both call: they share a matrix.
    """
    parts = layout.stages(shape.n_layers)[groups.pp.rank()]
    with device:
        model = _Stage(
            config,
            block_spec(shape, parts[part], device),
            vocab_size=padded_vocab(shape.vocab, groups.tp.size()),
            max_sequence_length=shape.max_positions,
            pre_process=parts[part].start == 0,
            post_process=parts[part].stop == shape.n_layers,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied and head == "lm",
            pg_collection=groups,
            vp_stage=part if layout.vpp > 1 else None,
        )
        if model.post_process:
            model.output_layer = (
                PolicyHead(config, groups, model.output_layer) if head == "lm" else ValueHead(config, groups)
            )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape).to(device)
    for name, parameter in model.named_parameters():
        if ".local_experts." in name:
            # megatron-core would sum their gradients like dense ones where ep is 1, and miss those of other
            # tp ranks' tokens.
            parameter.allreduce = False
    return model
