"""Memory of a training step, per rank: states of the weights, and the fullest moment of the passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.activations import (
    Module,
    Pass,
    Recompute,
    backward_bytes,
    layer_bytes,
    layer_input_bytes,
    module_bytes,
    score_bytes,
)
from rolemesh.placement.memory.items import MemoryItems
from rolemesh.placement.memory.lora import adapter_params
from rolemesh.placement.memory.parameters import (
    RankParams,
    layers_of,
    rank_params,
    shard_sizes,
    tile_logits,
    vocab_rows,
)
from rolemesh.placement.memory.software import Software, software
from rolemesh.placement.model import ModelShape

SCORES: tuple[Module, ...] = ("core_attn",)
CHUNK_LOGITS = 1 << 24  # of a head that makes the logits of a few tokens at a time


def training_memory(
    shape: ModelShape,
    layout: Layout,
    *,
    micro_batch: float,
    seq_len: int,
    n_micro_batches: int,
    recompute: Recompute = "none",
    modules: Collection[Module] = SCORES,
    dtype: str = "bfloat16",
    by: Software | None = None,
    head: str = "tiled",
    stages: Sequence[int] | None = None,
    lora_rank: int = 0,
    offload_activations: bool = False,
    stage: int | None = None,
) -> MemoryItems:
    """Bytes of the heaviest rank (of pipeline stage `stage`, if given) while it trains.

    Args:
        micro_batch: sequences of `seq_len` tokens (whole sequences, before cp) in one pass.
        n_micro_batches: of one update on a replica; no more of them are in flight.
        recompute: what is made anew in the backward pass: nothing; `selective`, some modules of a layer;
            `ops`, all but attention and every second matrix product; `full`, all but a layer's input.
        modules: that `selective` makes anew, by megatron-core's names.
        dtype: that products are computed in.
        by: the training software (by default megatron-core as RoleMesh runs it, `software("megatron")`).
        head: `tiled` (RoleMesh's: a tile of the logits, and hidden states' gradient in fp32), `materialised`
            (`by.logit` bytes per logit), `chunked` (few tokens' logits at a time).
        stages: layers of each pipeline stage, where the software does not cut them evenly.
        lora_rank: above 0, only adapters of that rank on every projection are trained.
        offload_activations: what layers keep waits in host memory; two layers' are on the device.

    Raises:
        LayoutError: pipeline stages or experts do not divide.
        ValueError: an unknown head.
    """
    plan = _Plan(
        shape, layout, Pass.of(layout, micro_batch, seq_len, dtype), n_micro_batches, recompute,
        frozenset(modules), by or software("megatron"), head, tuple(layers_of(shape, layout, stages)),
        lora_rank, offload_activations,
    )  # fmt: skip
    if head not in ("tiled", "materialised", "chunked"):
        raise ValueError(f"head {head!r} is none of tiled, materialised, chunked")
    wanted = range(layout.pp) if stage is None else [stage]
    return max((plan.of_stage(i) for i in wanted), key=lambda items: items.total)


def state_memory(
    params: RankParams,
    layout: Layout,
    by: Software,
    *,
    dtype_bytes: int = 2,
    adapters: int = 0,
) -> dict[str, float]:
    """Weights, gradients and optimizer state of one rank, bytes; `adapters`: parameters trained instead.

    A copy in fp32 is left out where the weights themselves are in fp32.
    """
    dense_ranks, expert_ranks = shard_sizes(layout)
    weight = by.weights or dtype_bytes
    optimizer = by.optimizer - 4 * (weight == 4 and by.optimizer > 8)

    def held(bytes_each: float, shared: bool, dense: float, experts: float) -> float:
        return bytes_each * (dense / dense_ranks + experts / expert_ranks if shared else dense + experts)

    trained = (adapters, 0) if adapters else (params.dense, params.experts)
    return {
        "weights": held(weight, by.shards("parameters"), params.dense, params.experts) + weight * adapters,
        "gradients": held(by.gradients, by.shards("gradients"), *trained),
        "optimizer": held(optimizer, by.shards("optimizer"), *trained),
    }


@dataclass(frozen=True)
class _Plan:
    """Arguments of `training_memory`, checked."""

    shape: ModelShape
    layout: Layout
    run: Pass
    n_micro_batches: int
    recompute: Recompute
    modules: frozenset[Module]
    by: Software
    head: str
    layers: tuple[int, ...]
    lora_rank: int
    offload_activations: bool

    def of_stage(self, stage: int) -> MemoryItems:
        """The fullest moment of a rank of this stage."""
        params = rank_params(self.shape, self.layout, stage, self.layers)
        adapters = adapter_params(self.shape, self.layout, self.layers[stage], self.lora_rank)
        states = state_memory(
            params, self.layout, self.by, dtype_bytes=self.run.dtype_bytes, adapters=adapters
        )
        states["communication buffers"] = self.by.buckets
        moments = {
            "layer": self._layer_moment(stage, params),
            "head": self._head_moment(stage, params),
            "gradient": self._gradient_moment(stage, params),
            "step": self._step_moment(params, adapters),
        }
        sizes = {name: sum(moment.values()) for name, moment in moments.items()}
        phase = max(sizes, key=lambda name: sizes[name])
        passes = max(size for name, size in sizes.items() if name != "step")
        copy = (phase != "gradient") * moments["gradient"]["gradient copy"]
        cached = min(sizes["step"], passes) + copy
        return MemoryItems(states, moments[phase], stage, phase, cached)

    def _mine(self, stage: int) -> tuple[int, int]:
        """(dense, mixture-of-experts) layers of the stage."""
        first = sum(self.layers[:stage])
        n_moe = len(set(range(first, first + self.layers[stage])) & set(self.shape.moe_layers))
        return self.layers[stage] - n_moe, n_moe

    def _in_flight(self, stage: int) -> float:
        """Micro-batches whose activations the stage keeps at its fullest, in units of all its layers."""
        pp, vpp, m = self.layout.pp, self.layout.vpp, self.n_micro_batches
        if self.by.schedule == "gpipe":
            return m
        if vpp > 1:  # chunks of 1 / vpp of the layers (Narayanan et al. 2021, section 2.2)
            return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, m * vpp) / vpp
        return min(pp - stage, m)

    def _full_layer(self, moe: bool) -> float:
        kept = layer_bytes(self.shape, self.layout, self.run, self.by, moe=moe)
        return kept + score_bytes(self.shape, self.layout, self.run, self.by)

    def _kept_layer(self, moe: bool) -> float:
        """Bytes that a layer keeps from the forward to the backward pass."""
        if self.recompute == "full":
            return layer_input_bytes(self.shape, self.layout, self.run)
        if self.recompute == "selective":
            dropped = module_bytes(self.shape, self.layout, self.run, self.by, self.modules, moe=moe)
            return self._full_layer(moe) - dropped
        if self.recompute == "ops":
            return self._half_of_products(moe)
        return self._full_layer(moe)

    def _half_of_products(self, moe: bool) -> float:
        """Layer input, attention's output, and results of every second product (torchtitan's `op`)."""
        shape, size = self.shape, self.run.dtype_bytes
        q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        ffn = shape.ffn if not moe or shape.moe is None else shape.moe.ffn * shape.moe.top_k
        products = q + 2 * kv + shape.hidden + (1 + shape.gated) * ffn + shape.hidden
        values = shape.hidden + q + products / 2
        return self.run.tokens * size * values / self.layout.tp

    def _kept(self, stage: int) -> float:
        dense, moe = self._mine(stage)
        layers = dense * self._kept_layer(False) + (moe * self._kept_layer(True) if moe else 0)
        if self.offload_activations:
            layers *= min(1.0, 2 / max(dense + moe, 1))
        sent_on = self.by.stage_outputs * layer_input_bytes(self.shape, self.layout, self.run)
        return self._in_flight(stage) * (layers + sent_on * (self.layout.pp > 1))

    def _layer_moment(self, stage: int, params: RankParams) -> Mapping[str, float]:
        """A layer goes backward: all that is kept, one layer in full, its gradients, its weights gathered."""
        dense, moe = self._mine(stage)
        kinds = [kind for kind, there in ((False, dense), (True, moe)) if there]
        again = max((self._full_layer(k) - self._kept_layer(k) for k in kinds), default=0)
        backward = max(
            (backward_bytes(self.shape, self.layout, self.run, self.by, moe=k) for k in kinds), default=0
        )
        passed_on = layer_input_bytes(self.shape, self.layout, self.run)
        gathered = params.layer * (self.by.gathered + (not self.lora_rank) * self.by.gathered_grad)
        return {
            "activations": self._kept(stage),
            "recomputed layer": again,
            "activation gradients": backward,
            "gathered weights": gathered + self.by.ends_stay * self._gathered_ends(params),
            "logits": self._kept_logits(stage),
            "weight gradient": self._loose_grad(params.largest_inner),
            "stage transfers": 2 * (self.layout.pp > 1) * passed_on,
        }

    def _head_moment(self, stage: int, params: RankParams) -> Mapping[str, float]:
        """The last stage's loss: all that is kept, and the logits. Nothing on the other stages."""
        if stage != self.layout.pp - 1:
            return {}
        logits = self.run.tokens * vocab_rows(self.shape, self.layout)
        if self.shape.n_labels is not None:
            head = 3 * 4 * self.run.tokens * self.shape.n_labels  # fp32, loss and gradient
        elif self.head == "tiled":
            head = self.run.dtype_bytes * tile_logits(logits) + 4 * self.run.tokens * self.shape.hidden
        else:
            head = self.by.logit * (logits if self.head == "materialised" else min(logits, CHUNK_LOGITS))
        return {
            "activations": self._kept(stage),
            "logits": head + self._kept_logits(stage),
            "head input": 3 * layer_input_bytes(self.shape, self.layout, self.run),
            "gathered weights": self._gathered_ends(params),
            "weight gradient": self._loose_grad(params.largest),
        }

    def _step_moment(self, params: RankParams, adapters: int) -> Mapping[str, float]:
        dense_ranks, expert_ranks = shard_sizes(self.layout)
        if adapters:
            return {}
        shared = self.by.shards("optimizer")
        dense = params.dense / (dense_ranks if shared else 1)
        experts = params.experts / (expert_ranks if shared else 1)
        return {"optimizer step": self.by.step * (dense + experts)}

    def _gradient_moment(self, stage: int, params: RankParams) -> Mapping[str, float]:
        """A micro-batch's backward pass ends, with the embedding's on stage 0; the others are still kept."""
        others = 1 - 1 / max(self._in_flight(stage), 1)
        return {
            "activations": others * self._kept(stage),
            "gradient copy": self.by.grad_copy * params.largest,
            "weight gradient": self._loose_grad(params.largest),
        }

    def _loose_grad(self, matrix: int) -> float:
        """A weight's gradient before it is added to the stored one."""
        return self.by.loose_grad * (not self.lora_rank) * matrix * self.run.dtype_bytes

    def _kept_logits(self, stage: int) -> float:
        """fp32 probabilities of the micro-batches that wait for their backward pass behind the last stage."""
        if stage != self.layout.pp - 1 or self.by.schedule != "gpipe":
            return 0.0
        waiting = self._in_flight(stage) - 1
        return waiting * 4 * self.run.tokens * vocab_rows(self.shape, self.layout)

    def _gathered_ends(self, params: RankParams) -> float:
        """The whole matrix of embedding or head, with ZeRO-3."""
        matrix = params.largest * (1 if self.by.cut_vocab else self.layout.tp)
        return (params.ends > 0) * matrix * (self.by.gathered_ends + (not self.lora_rank) * self.by.ends_grad)
