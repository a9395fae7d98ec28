"""Seconds of one optimizer step, and of one forward pass over a batch, on a pool of equal devices.

Pipeline time follows Narayanan et al. 2021 (SC21), section 2.2: `m` micro-batches take m turns of the slowest
stage, and filling and draining adds one turn of every other stage, divided by the virtual stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rolemesh.placement.layout import Layout
from rolemesh.placement.timing import collectives as net
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Efficiency, Machine
from rolemesh.placement.timing.layer import How, Pass, decoder_layer, head, wide
from rolemesh.placement.timing.links import Links


@dataclass(frozen=True)
class TimeItems(Mapping[str, float]):
    """Seconds by kind of work; `total` is their sum."""

    items_s: tuple[tuple[str, float], ...]

    def __getitem__(self, key: str) -> float:
        return dict(self.items_s)[key]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self.items_s])

    def __len__(self) -> int:
        return len(self.items_s)

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(seconds for _, seconds in self.items_s)

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.3g}" for name, seconds in self.items_s if seconds > 0.001 * self.total]
        return f"{self.total:.4g} s ({', '.join(parts)})"


DEFAULT_HOW = How()


@dataclass(frozen=True)
class Run:
    """How the software runs a step, beyond the layout.

    Attributes:
        how: of the layers.
        recompute: none, selective (core attention), full, or `selective:` and modules of RECOMPUTED, whose
            forward pass is repeated; `half`: every other matrix product (torchtitan's policy).
        shard: none (data-parallel copies), zero1 (optimizer), zero2 (gradients too), zero3 (weights too).
        overlap_dp: gradients and weights move while the first and last micro-batches compute.
        overlap_tp: tensor-parallel collectives run in pieces beside the products; `overlap_ep` likewise.
        grad_bytes: bytes of one gradient on the wire.
        scatter_pp: without sequence parallelism each tp rank sends its part of the activations to the next
            stage, where they are gathered (SC21, section 4.1; DeepSpeed's pipeline); else each sends all.
        gathers: collectives in which a layer's weights and gradients move under zero2 and zero3.
        chunked_head: logits are made again in the backward pass, a chunk at a time.
    """

    how: How = DEFAULT_HOW
    recompute: str = "none"
    shard: str = "zero1"
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_ep: bool = False
    grad_bytes: float = 4.0
    scatter_pp: bool = False
    chunked_head: bool = False
    gathers: int = 1


# Shares of a layer's forward pass that repeating a module repeats.
RECOMPUTED: Mapping[str, Mapping[str, float]] = {
    "attn": {"attention": 1.0},
    "mlp": {"gemm": 0.7, "memory_bound": 0.3},
    "moe": {"experts": 1.0, "ep": 1.0, "memory_bound": 0.4},
    "norm": {"memory_bound": 0.25},
    "act": {"memory_bound": 0.15},
    "up_proj": {"gemm": 0.25},
}


def stage_layers(n_layers: int, pp: int, vpp: int = 1, parts: Sequence[int] = ()) -> list[int]:
    """Layers of each stage; `parts` says those of each part of the pipeline, see `Layout.pp_layers`.

    Where the layers do not divide, but do with embedding and head counted as one each, they are counted so;
    else the earlier stages take one more.
    """
    if parts:
        return [sum(parts[stage::pp]) for stage in range(pp)]
    chunks = pp * vpp
    if pp > 1 and n_layers % chunks and (n_layers + 2) % chunks == 0:
        each = (n_layers + 2) // pp
        return [each - 1, *[each] * (pp - 2), each - 1]
    return [n_layers // pp + (stage < n_layers % pp) for stage in range(pp)]


@dataclass(frozen=True)
class Work:
    """One micro-batch: kind -> (forward, backward) seconds on the stage that takes longest, their sum
    (`turn`), and what filling and draining the pipeline adds; the same for a forward pass alone.
    """

    stage: Mapping[str, tuple[float, float]]
    turn: float
    bubble: float
    forward: Mapping[str, float]
    forward_turn: float
    forward_bubble: float


@dataclass(frozen=True)
class Exchange:
    """Between data-parallel ranks: seconds to gather weights, to reduce and scatter gradients, to all-reduce
    them (`both`), and of the optimizer. `trained` is 0 where weights have no gradients (adapters).
    """

    gather: float
    scatter: float
    both: float
    trained: float
    n_layers: int
    optimizer: float

    def exposed(self, work: Work, n_micro: float, run: Run, eff: Efficiency) -> float:
        """Seconds that the exchange adds to `n_micro` micro-batches it runs beside."""
        forward = sum(f for f, _ in work.stage.values())
        if run.shard in ("zero2", "zero3"):
            gathers = 2 if run.shard == "zero3" else 1
            each = gathers * self.gather + self.scatter
            first = self.gather / max(1, self.n_layers)  # nothing to hide the first layer's weights behind
            return n_micro * (hidden(each, work.turn, eff) + first if run.overlap_dp else each)
        windows: tuple[tuple[float, float], ...]
        if run.shard == "zero1":
            windows = ((self.gather * self.trained, forward), (self.scatter, work.turn - forward))
        else:
            windows = ((self.both, work.turn - forward),)
        return sum(hidden(s, window, eff) if run.overlap_dp else s for s, window in windows)


def hidden(communication: float, work: float, eff: Efficiency) -> float:
    """Seconds that communication adds to `work` it runs beside: it takes processors, and may outlast it."""
    return (1 - eff.overlap) * communication + max(0.0, eff.overlap * communication - work)


def waiting_share(world: int, machine: Machine) -> float:
    """How much longer a step of `world` devices takes because the slowest of them sets the pace."""
    return machine.efficiency.jitter * math.log2(world) if world > 1 else 0.0


def micro_batch_work(
    shape: Any,
    layout: Layout,
    *,
    micro_batch: float,
    seq_len: int,
    machine: Machine,
    links: Links,
    run: Run = Run(),
) -> Work:
    """What one micro-batch takes, for many steps that differ in the number of replicas or micro-batches."""
    return _Step(Dims.of(shape), layout, micro_batch, 1, seq_len, machine, links, run).work()


def data_exchange(shape: Any, layout: Layout, *, machine: Machine, links: Links, run: Run) -> Exchange:
    """What data-parallel ranks exchange in a step, whatever the micro-batches."""
    return _Step(Dims.of(shape), layout, 1, 1, 1, machine, links, run).exchange()


def training_total(
    work: Work, exchange: Exchange, n_micro: float, world: int, machine: Machine, run: Run
) -> float:
    """`training_seconds(...).total`, from its parts."""
    seconds = n_micro * work.turn + work.bubble + exchange.optimizer + machine.efficiency.step_fixed
    seconds += exchange.exposed(work, n_micro, run, machine.efficiency)
    return seconds * (1 + waiting_share(world, machine))


def inference_total(work: Work, n_micro: float, world: int, machine: Machine) -> float:
    """`inference_seconds(...).total`, from its part."""
    seconds = n_micro * work.forward_turn + work.forward_bubble + machine.efficiency.step_fixed
    return seconds * (1 + waiting_share(world, machine))


def training_seconds(
    shape: Any,
    layout: Layout,
    *,
    micro_batch: float,
    n_micro_batches: int,
    seq_len: int,
    machine: Machine,
    links: Links,
    run: Run = Run(),
) -> TimeItems:
    """Seconds of one optimizer step: `n_micro_batches` of `micro_batch` sequences on each replica."""
    step = _Step(Dims.of(shape), layout, micro_batch, n_micro_batches, seq_len, machine, links, run)
    return step.train()


def inference_seconds(
    shape: Any,
    layout: Layout,
    *,
    micro_batch: float,
    n_micro_batches: int,
    seq_len: int,
    machine: Machine,
    links: Links,
    run: Run = Run(),
) -> TimeItems:
    """Seconds of one forward pass (log-probabilities, values) over the replica's micro-batches."""
    step = _Step(Dims.of(shape), layout, micro_batch, n_micro_batches, seq_len, machine, links, run)
    return step.infer()


@dataclass(frozen=True)
class _Step:
    dims: Dims
    layout: Layout
    micro_batch: float
    n_micro: int
    seq_len: int
    machine: Machine
    links: Links
    run: Run

    # -- one micro-batch on one stage ------------------------------------------------------------------------

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq_len / self.layout.cp

    def _layer(self, moe: bool) -> dict[str, tuple[float, float]]:
        """kind -> (forward, backward with recompute) seconds of one layer, communication included."""
        return _layer_times(replace(self, layout=_inside(self.layout), n_micro=1), moe)

    def layer_times(self, moe: bool) -> dict[str, tuple[float, float]]:
        """The same, reckoned now."""
        run, layout = self.run, self.layout
        work = decoder_layer(
            self.dims,
            layout,
            sequences=self.micro_batch,
            seq_len=self.seq_len,
            moe=moe,
            machine=self.machine,
            how=run.how,
        )
        comm = self._layer_communication(moe)
        forward = dict(work.forward) | {kind: seconds for kind, (seconds, _) in comm.items()}
        backward = dict(work.backward) | {kind: seconds for kind, (_, seconds) in comm.items()}
        again = self._recomputed(work, forward, moe)
        for kind, seconds in again.items():
            backward[kind] = backward.get(kind, 0.0) + seconds
        return {kind: self._exposed(kind, forward, backward) for kind in forward}

    def _recomputed(self, work: Pass, forward: Mapping[str, float], moe: bool) -> Mapping[str, float]:
        """Seconds of the forward pass that the backward pass repeats."""
        mode, _, modules = self.run.recompute.partition(":")
        if mode == "full":
            return forward
        if mode != "selective":
            return {}
        chosen = modules.split(",")
        if "half" in chosen:
            return {kind: 0.5 * seconds for kind, seconds in work.forward.items() if kind != "attention"}
        again: dict[str, float] = {}
        for module in chosen if modules else ["attn"]:
            for kind, share in RECOMPUTED[module].items():
                if (module, moe) not in (("mlp", True), ("moe", False)):
                    again[kind] = again.get(kind, 0.0) + share * forward.get(kind, 0.0)
        if "attn" in (chosen if modules else ["attn"]) and self.run.how.attention == "unfused":
            again["memory_bound"] = again.get("memory_bound", 0.0) + 0.5 * work.forward["memory_bound"]
        return again

    def _layer_communication(self, moe: bool) -> dict[str, tuple[float, float]]:
        layout, dims, links, eff = self.layout, self.dims, self.links, self.machine.efficiency
        comm: dict[str, tuple[float, float]] = {}
        if layout.tp > 1:
            group = net.Group.of(layout.tp, 1, links)
            each = net.all_reduce(2.0 * self.tokens * dims.hidden, group, links, eff)
            # An expert layer under etp = 1 needs none for its experts, but the shared and dense parts do.
            count = 1 if moe and layout.etp == 1 and layout.ep > 1 else 2
            comm["tp"] = (count * each, count * each)
        if layout.cp > 1:
            group = net.Group.of(layout.cp, layout.tp, links)
            keys = 2.0 * dims.n_kv_heads * dims.head_dim / min(layout.tp, dims.n_kv_heads)
            size = 2.0 * self.micro_batch * self.seq_len * keys
            each = net.all_gather(size, group, links, eff)
            comm["cp"] = (each, 2 * each)
        if moe and layout.ep > 1:
            group = net.Group.of(layout.ep, layout.etp, links)
            tokens = self.tokens / layout.tp
            each = net.all_to_all(tokens, 2.0 * dims.hidden, dims.top_k, group, links, eff)
            comm["ep"] = (2 * each, 2 * each)
        return comm

    def _exposed(
        self, kind: str, forward: Mapping[str, float], backward: Mapping[str, float]
    ) -> tuple[float, float]:
        """Communication that hides behind this layer's work counts for what sticks out."""
        pair = (forward.get(kind, 0.0), backward.get(kind, 0.0))
        behind = {
            "tp": ("gemm",) if self.run.overlap_tp else (),
            "cp": ("attention",),
            "ep": ("gemm", "experts", "attention") if self.run.overlap_ep else (),
        }.get(kind, ())
        if not behind:
            return pair
        covers = (sum(forward.get(k, 0.0) for k in behind), sum(backward.get(k, 0.0) for k in behind))
        eff = self.machine.efficiency
        return hidden(pair[0], covers[0], eff), hidden(pair[1], covers[1], eff)

    # -- stages ----------------------------------------------------------------------------------------------

    def stages(self) -> list[dict[str, tuple[float, float]]]:
        """For each stage, kind -> (forward, backward) seconds of one micro-batch."""
        dims, layout = self.dims, self.layout
        dense = self._layer(False) if dims.n_layers > dims.n_moe_layers else {}
        experts = self._layer(True) if dims.n_moe_layers else {}
        out, first = [], 0
        counts = stage_layers(dims.n_layers, layout.pp, layout.vpp, layout.pp_layers)
        n_dense = dims.n_layers - dims.n_moe_layers
        alike: dict[tuple[int, int, bool], dict[str, tuple[float, float]]] = {}
        for stage, count in enumerate(counts):
            here = max(0, min(n_dense - first, count))
            kind = here, count, stage == layout.pp - 1
            if kind not in alike:
                total: dict[str, tuple[float, float]] = {}
                for work, times in ((dense, here), (experts, count - here)):
                    _add(total, work, times)
                if stage == layout.pp - 1:
                    _add(total, self._head(), 1)
                if layout.pp > 1:
                    _add(total, {"pp": self._sends()}, 1)
                alike[kind] = total
            out.append(alike[kind])
            first += count
        return out

    def _head(self) -> dict[str, tuple[float, float]]:
        run = self.run
        work = head(
            self.dims,
            self.layout,
            tokens=self.tokens,
            machine=self.machine,
            how=run.how,
            chunked=run.chunked_head,
        )
        return {kind: (work.forward[kind], work.backward[kind]) for kind in work.forward}

    def _sends(self) -> tuple[float, float]:
        """Activations to the next stage and gradients back, once for each virtual stage."""
        layout, links, eff = self.layout, self.links, self.machine.efficiency
        stride = layout.tp * layout.cp * layout.dp
        crosses = stride * layout.pp > links.per_node
        whole = 2.0 * self.tokens * self.dims.hidden
        cut = layout.sequence_parallel or self.run.scatter_pp
        each = net.send(whole / (layout.tp if cut else 1), crosses, links, eff) * layout.vpp
        if self.run.scatter_pp and not layout.sequence_parallel and layout.tp > 1:
            each += net.all_gather(whole, net.Group.of(layout.tp, 1, links), links, eff) * layout.vpp
        if layout.vpp > 1:
            each *= 1 - eff.overlap  # the interleaved schedule sends beside the next chunk's work
        return each, each

    # -- the step --------------------------------------------------------------------------------------------

    def work(self) -> Work:
        """What one micro-batch takes; of the data-parallel size only where sends cross nodes depends."""
        stages = self.stages()
        turns = [sum(f + b for f, b in stage.values()) for stage in stages]
        forwards = [sum(f for f, _ in stage.values()) for stage in stages]
        slowest = max(range(len(turns)), key=turns.__getitem__)
        scoring = max(range(len(turns)), key=forwards.__getitem__)
        return Work(
            stages[slowest],
            turns[slowest],
            (sum(turns) - turns[slowest]) / self.layout.vpp,
            {kind: f for kind, (f, _) in stages[scoring].items()},
            forwards[scoring],
            sum(forwards) - forwards[scoring],
        )

    def train(self) -> TimeItems:
        work = self.work()
        items = {kind: self.n_micro * (f + b) for kind, (f, b) in work.stage.items()}
        items["bubble"] = work.bubble
        items["dp"] = self.exchange().exposed(work, self.n_micro, self.run, self.machine.efficiency)
        items["optimizer"] = self._optimizer()
        items["fixed"] = self.machine.efficiency.step_fixed
        return self._with_jitter(items)

    def infer(self) -> TimeItems:
        work = self.work()
        items = {kind: self.n_micro * f for kind, f in work.forward.items()}
        items["bubble"] = work.forward_bubble
        items["fixed"] = self.machine.efficiency.step_fixed
        return self._with_jitter(items)

    def _with_jitter(self, items: dict[str, float]) -> TimeItems:
        """What the slowest of many devices adds is an item of its own."""
        items["jitter"] = waiting_share(self.layout.world, self.machine) * sum(items.values())
        return TimeItems(tuple(items.items()))

    def _rank_params(self) -> tuple[float, float]:
        """(parameters outside experts, expert parameters) of the fullest stage's rank."""
        dims, layout = self.dims, self.layout
        share = max(stage_layers(dims.n_layers, layout.pp, layout.vpp, layout.pp_layers)) / dims.n_layers
        whole = 2 if layout.pp == 1 and not dims.tied else 1
        dense = (dims.dense_params() * share + whole * dims.vocab * dims.hidden) / layout.tp
        return dense, dims.expert_params() * share / (layout.ep * layout.etp)

    def _groups(self) -> tuple[net.Group, net.Group]:
        """Data-parallel groups of the parameters outside experts and of the experts'."""
        layout = self.layout
        ranks = layout.dp * layout.cp
        experts = max(1, ranks * layout.tp // (layout.ep * layout.etp))
        return (
            net.Group.of(ranks, layout.tp, self.links),
            net.Group.of(experts, layout.ep * layout.etp, self.links),
        )

    def exchange(self) -> Exchange:
        """Seconds of gradients and weights on their way, and of the optimizer; no micro-batch matters."""
        run, links, eff = self.run, self.links, self.machine.efficiency
        gather = scatter = both = 0.0
        trained = 0.0 if run.how.lora else 1.0
        pieces = max(1, self.dims.n_layers * run.gathers) if run.shard in ("zero2", "zero3") else 1
        for params, group in zip(self._rank_params(), self._groups(), strict=True):
            gather += pieces * net.all_gather(2.0 * params / pieces, group, links, eff)
            scatter += (
                trained * pieces * net.reduce_scatter(run.grad_bytes * params / pieces, group, links, eff)
            )
            both += trained * net.all_reduce(run.grad_bytes * params, group, links, eff)
        return Exchange(gather, scatter, both, trained, self.dims.n_layers, self._optimizer())

    def _optimizer(self) -> float:
        """Adam: reads gradient, master, two moments; writes master, moments, weights; the norm."""
        run, machine = self.run, self.machine
        if run.how.lora:
            return 0.0
        seconds = 0.0
        for params, group in zip(self._rank_params(), self._groups(), strict=True):
            own = params / (1 if run.shard == "none" else group.size)
            seconds += (4 + 12 + 12 + 2 + 4) * own / machine.memory_rate
        return seconds


@lru_cache(maxsize=4096)
def _inside(layout: Layout) -> Layout:
    """What of a layout matters inside a layer: neither replicas nor stages."""
    return replace(layout, dp=1, pp=1, vpp=1, pp_layers=())


@lru_cache(maxsize=65_536)
def _layer_times(step: _Step, moe: bool) -> dict[str, tuple[float, float]]:
    return step.layer_times(moe)


def _add(
    total: dict[str, tuple[float, float]], work: Mapping[str, tuple[float, float]], times: float
) -> None:
    for kind, (forward, backward) in work.items():
        before = total.get(kind, (0.0, 0.0))
        total[kind] = (before[0] + times * forward, before[1] + times * backward)


__all__ = [
    "Exchange",
    "How",
    "Run",
    "TimeItems",
    "Work",
    "data_exchange",
    "inference_seconds",
    "inference_total",
    "micro_batch_work",
    "stage_layers",
    "training_seconds",
    "training_total",
    "wide",
]
