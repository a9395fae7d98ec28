"""How many parameters each rank holds: exactly those of the megatron-core modules that it builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import ModelShape, padded_vocab

# Where the lm head is multiplied and reduced a tile at a time: the share of the logits, and its bounds.
TILE_SHARE, SMALL_TILE, LARGE_TILE = 1 / 32, 1 << 16, 1 << 26


@dataclass(frozen=True)
class RankParams:
    """Parameters of one (tp, pp) rank; all tp ranks of a stage hold the same number.

    Attributes:
        dense: all but the routed experts, which other data-parallel groups share.
        experts: routed experts' parameters on this rank.
        layer: of the largest layer, the unit that ZeRO-3 gathers.
        ends: embedding, positions, last norm and head on this stage.
        largest: of the embedding's (head's) matrix where the stage has one, else `largest_inner`.
        largest_inner: of the largest matrix of a layer.
    """

    dense: int
    experts: int
    layer: int
    ends: int
    largest: int
    largest_inner: int = 0

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts


def layers_of(shape: ModelShape, layout: Layout, stages: Sequence[int] | None = None) -> list[int]:
    """Layers of each pipeline stage; `stages` overrides the even cut, raising LayoutError for a wrong sum."""
    if stages is None:
        return [sum(map(len, parts)) for parts in layout.stages(shape.n_layers)]
    if len(stages) != layout.pp or sum(stages) != shape.n_layers or min(stages) < 0:
        raise LayoutError(
            f"stages {list(stages)} must be {layout.pp} numbers that add up to {shape.n_layers} layers"
        )
    return list(stages)


def rank_params(
    shape: ModelShape, layout: Layout, stage: int, stages: Sequence[int] | None = None, *, padded: bool = True
) -> RankParams:
    """What a rank of pipeline stage `stage` holds. `padded`: the vocabulary is padded as Megatron pads it.

    A tied model's first and last stage both hold the embedding. A model with `n_labels` has a small head,
    the same on every rank, in place of the vocabulary's. Raises LayoutError when experts do not divide.
    """
    return _rank_params(shape, layout, stage, tuple(layers_of(shape, layout, stages)), padded)


@lru_cache(maxsize=4096)
def _rank_params(
    shape: ModelShape, layout: Layout, stage: int, layers: tuple[int, ...], padded: bool
) -> RankParams:
    first = sum(layers[:stage])
    mine = range(first, first + layers[stage])
    n_moe = len(set(mine) & set(shape.moe_layers))
    dense_layer, moe_layer, experts = (
        _dense_layer(shape, layout),
        _moe_layer(shape, layout),
        _experts(shape, layout),
    )
    ends, matrix = _ends(shape, layout, stage, padded)
    kinds = [dense_layer] * (len(mine) > n_moe) + [moe_layer + experts] * (n_moe > 0)
    inner = _largest(shape, layout, dense=len(mine) > n_moe) if len(mine) else 0
    return RankParams(
        dense=(len(mine) - n_moe) * dense_layer + n_moe * moe_layer + ends,
        experts=n_moe * experts,
        layer=max(kinds, default=0),
        ends=ends,
        largest=matrix or inner,
        largest_inner=inner,
    )


def _attention(shape: ModelShape, tp: int) -> int:
    """Projections are cut over tp; latent attention's way down and all norms are the same on every rank."""
    hidden = shape.hidden
    if latent := shape.latent:
        q = shape.n_heads * shape.head_dim
        down = latent.kv_rank + latent.rope_dim
        copied = down * (hidden + shape.qkv_bias) + latent.kv_rank
        cut = latent.kv_rank * shape.n_heads * (latent.nope_dim + latent.v_dim)
        if latent.q_rank is None:
            cut += hidden * q
        else:
            copied += latent.q_rank * (hidden + shape.qkv_bias + 1)
            cut += latent.q_rank * q
        return copied + (cut + hidden * shape.n_heads * latent.v_dim) // tp + shape.out_bias * hidden
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    cut = (hidden + shape.qkv_bias) * (q + 2 * kv) + q * hidden
    return cut // tp + shape.out_bias * hidden + shape.qk_norm * 2 * shape.head_dim


def _mlp(shape: ModelShape, columns: int, tp: int, bias: bool) -> int:
    width = (1 + shape.gated) * columns
    return (width * (shape.hidden + bias) + columns * shape.hidden) // tp + bias * shape.hidden


def _dense_layer(shape: ModelShape, layout: Layout) -> int:
    return (
        _attention(shape, layout.tp)
        + 2 * shape.norm_params
        + _mlp(shape, shape.ffn, layout.tp, shape.mlp_bias)
    )


def _moe_layer(shape: ModelShape, layout: Layout) -> int:
    """A mixture-of-experts layer without its routed experts."""
    if shape.moe is None:
        return 0
    router = shape.hidden * (shape.moe.n + shape.moe.shared_gate)
    shared = _mlp(shape, shape.moe.shared_ffn, layout.tp, False)
    return _attention(shape, layout.tp) + 2 * shape.norm_params + router + shared


def _experts(shape: ModelShape, layout: Layout) -> int:
    if shape.moe is None:
        return 0
    if shape.moe.n % layout.ep:
        raise LayoutError(f"ep={layout.ep} does not divide the {shape.moe.n} experts")
    return shape.moe.n // layout.ep * _mlp(shape, shape.moe.ffn, layout.etp, False)


def vocab_rows(shape: ModelShape, layout: Layout, *, padded: bool = True) -> int:
    """Rows of the embedding on one tp rank."""
    rows = padded_vocab(shape.vocab, layout.tp) if padded else shape.vocab
    return -(-rows // layout.tp)


def tile_logits(logits: float) -> float:
    """How many of a pass's logits exist at a time where they are made a tile at a time."""
    return min(logits, max(logits * TILE_SHARE, SMALL_TILE), LARGE_TILE)


def _ends(shape: ModelShape, layout: Layout, stage: int, padded: bool) -> tuple[int, int]:
    """Parameters outside of the layers, and those of the largest matrix among them."""
    matrix = vocab_rows(shape, layout, padded=padded) * shape.hidden
    first, last = stage == 0, stage == layout.pp - 1
    count, has_matrix = 0, first
    if first:
        count += matrix + shape.learned_positions * shape.max_positions * shape.hidden
    if last:
        count += shape.norm_params
        if shape.n_labels is not None:
            count += shape.n_labels * (shape.hidden + shape.label_bias)
        elif not shape.tied or not first:
            count, has_matrix = count + matrix, True
    return count, matrix * has_matrix


def _largest(shape: ModelShape, layout: Layout, *, dense: bool) -> int:
    """The feed-forward's first matrix, gate and up in one; of all local experts where layers have them."""
    if dense or shape.moe is None:
        return (1 + shape.gated) * shape.ffn * shape.hidden // layout.tp
    return shape.moe.n // layout.ep * (1 + shape.gated) * shape.moe.ffn * shape.hidden // layout.etp


def shard_sizes(layout: Layout) -> tuple[int, int]:
    """Ranks that share optimizer state: of dense parameters (dp x cp), and of routed experts."""
    return layout.dp * layout.cp, max(layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp), 1)
