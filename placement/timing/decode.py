"""Seconds of generation: prefill, and decode steps bound by weights, KV cache, products, kernels or links.

A decode step reads all weights that its tokens touch once, and every sequence's KV cache; a set of
sequences takes as many steps as its longest response, each over the sequences that still run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Lengths
from rolemesh.placement.model import ModelShape
from rolemesh.placement.timing import collectives as net
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Machine
from rolemesh.placement.timing.layer import How, attention_flops, decoder_layer, wide
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import TimeItems

KERNELS = 9  # of a dense decode layer: two norms, qkv, rotary and cache, attention, output, up, act, down
EXPERT_KERNELS = 6  # more with experts: router, top-k, sort, gather, second grouped product, combine
STEPS = 64  # points at which the survival curve is sampled


@dataclass(frozen=True)
class Engine:
    """How the engine serves: types of weights and cache.

    `data_attention`: each of the tp ranks runs attention for its own sequences; experts are spread over them.
    `reserve`: a sequence is admitted only when its longest response fits (TensorRT-LLM's default), else
    what it holds grows as it does. `python`: steps are scheduled by Python processes (vLLM, SGLang);
    `eager`: kernels are started one by one. `tokens_per_step` above 1 is speculative decoding: accepted
    tokens a step, each step checking `drafted` more.
    `chunk`: tokens of one prefill pass.
    """

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    data_attention: bool = False
    reserve: bool = False
    python: bool = True
    eager: bool = False
    tokens_per_step: float = 1.0
    drafted: int = 0
    chunk: int = 8192


@dataclass(frozen=True)
class Server:
    """One replica of a model under one engine: what its steps take."""

    dims: Dims
    layout: Layout
    machine: Machine
    links: Links
    engine: Engine

    # -- bytes -----------------------------------------------------------------------------------------------

    def touched(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected distinct experts of a layer that a step of `tokens` tokens reads, over all ranks."""
        d = self.dims
        if not d.n_experts:
            return np.zeros_like(tokens)
        return d.n_experts * (1 - (1 - d.top_k / d.n_experts) ** tokens)

    def weight_bytes(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of weights that one rank reads in a step, its pipeline stage's part."""
        d, size = self.dims, self.machine.bytes_of(self.engine.weights)
        ranks = self.layout.tp * self.layout.pp
        dense = d.dense_params() * size / (self.layout.pp if self._spread else ranks)
        experts = d.n_moe_layers * self.touched(tokens) * d.ffn_params(d.expert_ffn) * size / ranks
        return dense + experts + 2.0 * d.vocab * d.hidden / self.layout.tp / self.layout.pp

    def cache_bytes_of_token(self) -> float:
        """Bytes that one token keeps on one rank; fewer KV heads than ranks are copied, latents always."""
        d, size = self.dims, self.machine.bytes_of(self.engine.cache)
        cut = 1 if d.kv_rank else min(self.layout.tp, d.n_kv_heads)
        if self._spread:
            cut = self.layout.tp  # every rank keeps its own sequences alone
        return d.n_layers / self.layout.pp * d.cache_numbers * size / cut

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self, sequences: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Seconds of one decode step over `sequences`, each with `context` tokens in the cache."""
        return sum(self.step_items(sequences, context).values(), np.zeros(1))

    def step_items(self, sequences: ArrayLike, context: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """The same by kind: weights (or their products), routing, cache, kernels, links, serving."""
        eff, d, engine = self.machine.efficiency, self.dims, self.engine
        n = np.atleast_1d(np.asarray(sequences, dtype=float))
        held = np.atleast_1d(np.asarray(context, dtype=float))
        rows = n * (1 + engine.drafted)
        stages = self.layout.pp
        # A pipeline runs its stages in turn on a part of the sequences each; a step takes all of them.
        part = rows / stages
        read = self.weight_bytes(part) / (self.machine.memory_bandwidth * eff.decode_memory)
        active = d.dense_params() + d.n_moe_layers * d.top_k * d.ffn_params(d.expert_ffn) + d.vocab * d.hidden
        rate = self.machine.peak(engine.weights) * eff.gemm(engine.weights) * eff.decode_gemm
        work = 2.0 * active * part / (self.layout.tp * stages) / rate
        moved = np.array([self._routed_seconds(x) for x in part])
        window = held if not d.window else d.windowed * np.minimum(held, d.window) + (1 - d.windowed) * held
        cache = n / stages * window * self.cache_bytes_of_token()
        memory = self.machine.memory_bandwidth * eff.decode_memory
        kernels = (d.n_layers * KERNELS + d.n_moe_layers * EXPERT_KERNELS) / stages * eff.decode_kernel
        return {
            "weights": stages * np.maximum(read, work),
            "routing": stages * moved,
            "cache": stages * cache / memory,
            "kernels": np.full_like(n, stages * kernels) if not engine.eager else self._eager(n),
            "links": stages * self._links_of(part),
            "serving": eff.host_clock
            * ((eff.serving_python if engine.python else eff.serving) + eff.serving_sequence * n),
        }

    def _routed_seconds(self, rows: float) -> float:
        """Sorting a stage's rows by expert and back, and the experts' activation, by the bytes they move."""
        d = self.dims
        each = 2 * 4.0 * d.hidden + 6.0 * d.expert_ffn + 2 * 2.5 * (d.hidden + d.expert_ffn)
        routed = d.n_moe_layers / self.layout.pp * rows * d.top_k / self.layout.tp
        return routed * each / self.machine.memory_rate

    def _eager(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Kernels that the host starts one by one take its time, whatever the device needs."""
        eff, d = self.machine.efficiency, self.dims
        each = d.n_layers * eff.host + d.n_moe_layers * (eff.moe_host - eff.host)
        return np.full_like(n, eff.host_clock * each)

    def _links_of(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of all links of a stage for each of `rows`."""
        tp = self.layout.tp
        if tp == 1 and self.layout.pp == 1:
            return np.zeros_like(rows)
        if self._spread or self.layout.pp > 1:
            return np.array([self._links(x) for x in rows])
        ways = np.array(
            net.all_reduce_ways(net.Group.of(tp, 1, self.links), self.links, self.machine.efficiency)
        )
        each = (ways[:, :1] + ways[:, 1:] * (2.0 * self.dims.hidden * rows)).min(axis=0)
        return 2 * self.dims.n_layers * each

    def _links(self, rows: float) -> float:
        """Two all-reduces a layer, or dispatch and combine instead of the second where experts are spread."""
        d, tp, eff, links = self.dims, self.layout.tp, self.machine.efficiency, self.links
        layers = d.n_layers / self.layout.pp
        size = 2.0 * rows * d.hidden
        total = 0.0
        if tp > 1 and self._spread:
            group = net.Group.of(tp, 1, links)
            each = net.all_to_all(rows / tp, 2.0 * d.hidden, d.top_k, group, links, eff)
            total += 2 * d.n_moe_layers / self.layout.pp * each
        elif tp > 1:
            group = net.Group.of(tp, 1, links)
            total += 2 * layers * net.quick_all_reduce(size, group, links, eff)
        if self.layout.pp > 1:
            total += net.send(size / tp, tp * self.layout.pp > links.per_node, links, eff)
        return total

    # -- prefill ---------------------------------------------------------------------------------------------

    def prefill(self, tokens: float, prompt: float) -> float:
        """Seconds of a forward pass over `tokens` prompt tokens, in prompts of `prompt` tokens each."""
        if tokens <= 0:
            return 0.0
        d, machine, engine = self.dims, self.machine, self.engine
        tp = self.layout.tp
        layout = replace(self.layout, sequence_parallel=False)
        if self._spread:  # each rank takes prompts of its own, and its share of the experts
            layout = replace(layout, tp=1, dp=tp, ep=tp)
        chunk = min(tokens, max(engine.chunk, 1))
        how = How(engine.weights, inference=True, graphs=not engine.python)
        seconds = 0.0
        for moe, count in ((False, d.n_layers - d.n_moe_layers), (True, d.n_moe_layers)):
            if count:
                one = decoder_layer(
                    d, layout, sequences=1, seq_len=round(chunk), moe=moe, machine=machine, how=how
                )
                rest = sum(value for kind, value in one.forward.items() if kind != "attention")
                seconds += count * rest
        rate = machine.peak(wide(engine.weights)) * machine.efficiency.flash
        attention = d.n_layers * attention_flops(d, 1, prompt, prompt) / layout.tp / rate
        group, eff = net.Group.of(tp, 1, self.links), machine.efficiency
        if self._spread:
            each = net.all_to_all(chunk, 2.0 * d.hidden, d.top_k, group, self.links, eff)
            seconds += 2 * d.n_moe_layers * each
        else:
            seconds += 2 * d.n_layers * net.all_reduce(2.0 * chunk * d.hidden, group, self.links, eff)
        # A pipeline's stages work on different chunks at a time, so layers count once over all stages.
        at_once = self.layout.pp * (tp if self._spread else 1)
        return (seconds * tokens / chunk + attention * tokens / prompt) / at_once

    @property
    def _spread(self) -> bool:
        return self.engine.data_attention and self.dims.n_experts > 0

    # -- loads -----------------------------------------------------------------------------------------------

    def steady_tokens_per_s(self, sequences: float, prompt: float, response: float) -> float:
        """Output tokens/s when `sequences` always run and a finished one makes room for the next.

        In the time of one response each of them has decoded it and one prompt was prefilled for each.
        """
        context = prompt + response / 2
        decode = response / self.engine.tokens_per_step * float(self.step(sequences, context)[0])
        return sequences * response / (decode + self.prefill(sequences * prompt, prompt))

    def fits(self, capacity_tokens: float, prompt: float, response: float) -> float:
        """Sequences that run at once with that many tokens of cache, half of the response held on average."""
        return max(1.0, capacity_tokens / (prompt + response * (1.0 if self.engine.reserve else 0.5)))


def decode_seconds(
    shape: ModelShape | Dims,
    layout: Layout,
    *,
    prompt_tokens: float,
    response: Lengths,
    n_sequences: float,
    capacity_tokens: float,
    machine: Machine,
    links: Links,
    max_running: float = math.inf,
    engine: Engine = Engine(),
    streamed: bool = False,
) -> TimeItems:
    """Seconds in which a replica generates `n_sequences` responses that all wait at the start.

    `capacity_tokens` is what its KV cache holds, `max_running` the engine's own limit. While sequences
    wait, a finished one makes room for the next; then the batch shrinks along the lengths' survival curve,
    and the longest response sets the end. Without waiting ones it is the survival curve alone.

    `streamed`: responses that are not done go on in the next step, so there is no tail and `running` of them
    always run. A long one is met more often: E[r^2] / 2 E[r] of the response is in the cache on average.
    """
    server = Server(Dims.of(shape), layout, machine, links, engine)
    mean, longest = response.mean, response.longest(max(1, round(n_sequences)))
    running = min(n_sequences, max_running, server.fits(capacity_tokens, prompt_tokens, mean))
    prefill = server.prefill(n_sequences * prompt_tokens, prompt_tokens)
    if streamed:
        steps = n_sequences * mean / running / engine.tokens_per_step
        context = prompt_tokens + response.mean_square / (2 * mean)
        return TimeItems((("prefill", prefill), ("stream", steps * float(server.step(running, context)[0]))))
    waiting = n_sequences - running
    steady = 0.0
    if waiting > 0:
        # Room comes as sequences end: `waiting` responses of mean length, `running` at a time.
        steps = waiting * mean / running / engine.tokens_per_step
        steady = steps * float(server.step(running, prompt_tokens + mean / 2)[0])
    grid = np.linspace(0.0, longest, STEPS + 1)
    middle = (grid[1:] + grid[:-1]) / 2
    # One sequence is left until the end: the survival curve of n stays above that.
    alive = np.maximum(running * response.active(middle), 1.0)
    width = longest / STEPS / engine.tokens_per_step
    parts = {
        name: float((width * value).sum())
        for name, value in server.step_items(alive, prompt_tokens + middle).items()
    }
    return TimeItems((("prefill", prefill), ("waves", steady), *parts.items()))
