"""What decoders with RMSNorm, rotary positions and SwiGLU have in common: names and cuts of their parameters.

The names on the left are megatron-core's (its layer specification without Transformer Engine), those on the
right the ones transformers writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from rolemesh.parallel.weights.pieces import (
    Columns,
    GateUp,
    HfTensor,
    QueryKeyValue,
    Replicated,
    Rule,
    VocabRows,
)
from rolemesh.placement.model import ModelShape

LayerRules = Callable[[ModelShape, str], Mapping[str, Rule]]
"""Rules by parameter name inside a layer, for (shape, prefix of the layer's Hugging Face names)."""


@dataclass(frozen=True)
class WeightMap:
    """Rules for a whole model. `layer(n)` has the rules of global layer n by name inside the layer.

    `derived` matches names of tensors that old checkpoints hold though they follow from the configuration.
    """

    embedding: Rule
    layer: Callable[[int], Mapping[str, Rule]]
    final_norm: Rule
    lm_head: Rule
    derived: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def decoder_map(
    shape: ModelShape,
    *own: LayerRules,
    attention: LayerRules | None = None,
    experts: LayerRules | None = None,
    derived: str = WeightMap.derived,
) -> WeightMap:
    """The common map, with the family's `own` rules added to every layer.

    `attention` is in the place of grouped attention; `experts` are the feed-forward of the layers that have a
    mixture of experts.
    """
    sparse = set(shape.moe_layers)

    def layer(n: int) -> Mapping[str, Rule]:
        feed_forward = experts if experts and n in sparse else dense
        parts = (_norms, attention or _grouped_attention, feed_forward, *own)
        prefix = f"model.layers.{n}."
        return {name: rule for rules in parts for name, rule in rules(shape, prefix).items()}

    vocab_shape = (shape.vocab, shape.hidden)
    return WeightMap(
        derived=derived,
        embedding=VocabRows(HfTensor("model.embed_tokens.weight", vocab_shape)),
        layer=cache(layer),
        final_norm=Replicated(HfTensor("model.norm.weight", (shape.hidden,))),
        lm_head=VocabRows(HfTensor("lm_head.weight", vocab_shape)),
    )


def qkv(shape: ModelShape, prefix: str, kind: str, *rest: int) -> QueryKeyValue:
    """The fused projection's rule for its `kind`, weight or bias; `rest` are the sizes after the rows."""
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    return QueryKeyValue(
        HfTensor(f"{prefix}self_attn.q_proj.{kind}", (q, *rest)),
        HfTensor(f"{prefix}self_attn.k_proj.{kind}", (kv, *rest)),
        HfTensor(f"{prefix}self_attn.v_proj.{kind}", (kv, *rest)),
        shape.head_dim,
    )


def feed_forward(
    shape: ModelShape,
    prefix: str,
    columns: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[GateUp, Columns]:
    """The two matrices of a SwiGLU feed-forward of so many columns, from those called `names`."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    inner = (columns, shape.hidden)
    return GateUp(HfTensor(gate, inner), HfTensor(up, inner)), Columns(HfTensor(down, inner[::-1]))


def dense(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    """A layer's feed-forward where all of it takes part for every token."""
    gate_up, down = feed_forward(shape, f"{prefix}mlp.", shape.ffn)
    return {"mlp.linear_fc1.weight": gate_up, "mlp.linear_fc2.weight": down}


def _norms(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    attention = HfTensor(f"{prefix}input_layernorm.weight", (shape.hidden,))
    mlp = HfTensor(f"{prefix}post_attention_layernorm.weight", (shape.hidden,))
    return {
        "input_layernorm.weight": Replicated(attention),
        "pre_mlp_layernorm.weight": Replicated(mlp),
    }


def _grouped_attention(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    out = HfTensor(f"{prefix}self_attn.o_proj.weight", (shape.hidden, shape.n_heads * shape.head_dim))
    return {
        "self_attention.linear_qkv.weight": qkv(shape, prefix, "weight", shape.hidden),
        "self_attention.linear_proj.weight": Columns(out),
    }
