"""Seconds of a role's operations on a set of devices, option by option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rolemesh.placement.costs import DeviceSet, Recompute
from rolemesh.placement.graph import Operation
from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Fixed, Lengths, Like
from rolemesh.placement.roles.bytes import Cut, cut_of
from rolemesh.placement.roles.request import PlanRequest, RoleRequest
from rolemesh.placement.timing.decode import EXPERT_KERNELS, KERNELS, Engine, decode_seconds
from rolemesh.placement.timing.dims import Dims
from rolemesh.placement.timing.efficiency import Machine
from rolemesh.placement.timing.layer import How
from rolemesh.placement.timing.links import Links
from rolemesh.placement.timing.training import (
    Exchange,
    Run,
    Work,
    data_exchange,
    inference_total,
    micro_batch_work,
    training_total,
)

BOOKKEEPING = (
    64.0  # bytes that advantages and returns read and write for each token, some sixteen fp32 columns
)


class Later(Mapping[str, float]):
    """A mapping that is made when it is first looked into."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Mapping[str, float]]) -> None:
        self._make = make
        self._made: Mapping[str, float] | None = None

    def _now(self) -> Mapping[str, float]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, name: str) -> float:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class Batch:
    """What a replica has of each of the step's parts; `updates` as (number, rows of one)."""

    rows: int
    updates: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: PlanRequest, dp: int) -> Batch:
        """The fullest replica of `dp`."""
        load = plan.workload
        whole, rest = divmod(load.samples, load.mini_batch)
        updates = [(load.epochs * whole, math.ceil(load.mini_batch / dp))]
        updates += [(load.epochs, math.ceil(rest / dp))] if rest else []
        return cls(math.ceil(load.samples / dp), tuple(updates))


@dataclass(frozen=True)
class _With(Like):
    """The lengths of a replica that has the longest sequence of all."""

    last: float

    def longest(self, n: int) -> float:
        return self.last


class RoleSeconds:
    """Seconds of one role on one type of device with given links."""

    def __init__(self, plan: PlanRequest, role: str, machine: Machine, links: Links) -> None:
        self.plan, self.role, self.machine, self.links = plan, role, machine, links
        self.request: RoleRequest = plan.roles[role]
        self.dims = Dims.of(self.request.shape)
        self.how = How(
            self.request.dtype,
            fused=not plan.runnable,
            lora=self.request.lora_rank > 0,
            fused_routing=plan.fused_routing,
        )
        load = plan.workload
        prompt, response = load.prompt_lengths, load.response_lengths
        square = prompt.mean_square + 2 * prompt.mean * response.mean + response.mean_square
        # Attention grows with the square: sequences of this length have the batch's mean of it per token.
        self.seq_len = round(square / load.sequence_tokens)
        self._work: dict[tuple[Cut, float, Recompute, bool], Work] = {}
        self._exchange: dict[Layout, Exchange] = {}
        self._decode: dict[tuple[Cut, int, int], float] = {}

    def train(self, layout: Layout, micro_batch: int, recompute: Recompute, batch: Batch) -> float:
        """All updates of a step."""
        run = self._run(recompute)
        if layout not in self._exchange:
            self._exchange[layout] = data_exchange(
                self.dims, layout, machine=self.machine, links=self.links, run=run
            )
        work = self._micro(layout, micro_batch, recompute, batch.updates[0][1])
        return self.machine.factor("train") * sum(
            times
            * training_total(
                work,
                self._exchange[layout],
                self.n_micro(rows, micro_batch),
                layout.world,
                self.machine,
                run,
            )
            for times, rows in batch.updates
        )

    def infer(self, layout: Layout, micro_batch: int, batch: Batch) -> float:
        """A forward pass over the batch."""
        work = self._micro(layout, micro_batch, "none", batch.rows)
        seconds = inference_total(work, self.n_micro(batch.rows, micro_batch), layout.world, self.machine)
        return self.machine.factor("infer") * seconds

    def n_micro(self, rows: int, micro_batch: int) -> float:
        """Micro-batches that `rows` sequences fill; the last one may be filled in part."""
        return max(1.0, rows / self._packed(micro_batch))

    def _packed(self, micro_batch: int) -> float:
        """Sequences of mean length in a micro-batch that has room for `micro_batch` of the longest.

        No packing is tighter than the tokens, and two sequences of over half the room never share it.
        """
        load = self.plan.workload
        room = micro_batch * load.longest_tokens
        alone = float(load.response_lengths.active(room / 2 - load.prompt_lengths.mean))
        return min(room / load.sequence_tokens, 1 / alone if alone else math.inf)

    def generate(self, layout: Layout, at_once: int, batch: Batch, response: Lengths | None = None) -> float:
        """All responses of a replica; `response`: other lengths than those expected."""
        lengths = response or self.plan.workload.response_lengths
        factor = self.machine.factor("generate")
        if response is not None:
            return factor * self._generate(layout, at_once, batch.rows, lengths)
        key = cut_of(layout), at_once, batch.rows
        if key not in self._decode:
            self._decode[key] = factor * self._generate(layout, at_once, batch.rows, lengths)
        return self._decode[key]

    def _generate(self, layout: Layout, at_once: int, rows: int, response: Lengths) -> float:
        def decode(n: int, lengths: Lengths, engine: Engine) -> float:
            return decode_seconds(
                self.dims,
                layout,
                prompt_tokens=self.plan.workload.prompt_lengths.mean,
                response=lengths,
                n_sequences=n,
                capacity_tokens=math.inf,
                max_running=at_once,
                machine=self.machine,
                links=self.links,
                engine=engine,
                streamed=self.plan.streamed,
            ).total

        dtype = self.request.dtype
        last = response.longest(self.plan.workload.samples)  # the step waits for the replica that has it
        if self.request.engine == "paged":
            return decode(rows, _With(response, last), Engine(dtype, dtype))
        # A batch keeps its rows until the last one ends, and each batch waits for the one before.
        engine = Engine(dtype, dtype, eager=True, python=False)
        seconds = decode(min(rows, at_once), Fixed(last), engine)
        whole, rest = divmod(max(0, rows - at_once), at_once)
        if whole:
            seconds += whole * decode(at_once, Fixed(response.longest(at_once)), engine)
        return seconds + (decode(rest, Fixed(response.longest(rest)), engine) if rest else 0.0)

    def bookkeeping(self, layout: Layout) -> float:
        """Advantages and returns: columns are read and written, no model runs."""
        return BOOKKEEPING * self.plan.workload.tokens / layout.dp / self.machine.memory_rate

    def floor(self, operation: Operation, devices: DeviceSet) -> float:
        """Seconds that no option is below: products at the rate of a large one, on all devices at once."""
        load, dims, world = self.plan.workload, self.dims, devices.world
        eff, dtype = self.machine.efficiency, self.request.dtype
        sure = 0.99 * self.machine.factor(operation.kind) * self.plan.times(operation)
        samples = self.plan.rows(operation, load.samples)
        if operation.kind == "transfer" or not operation.state_reads:
            return 0.0
        if operation.kind == "generate":
            lengths = load.response_lengths
            tokens = lengths.mean if self.plan.streamed else lengths.longest(samples)
            return sure * tokens * self._least_turn(devices)
        active = dims.dense_params() + dims.n_moe_layers * dims.top_k * dims.ffn_params(dims.expert_ffn)
        passes = 3 * load.epochs if operation.kind == "train" else 1
        rate = self.machine.peak(dtype) * eff.gemm(dtype) * world
        return sure * passes * 2.0 * active * samples * load.sequence_tokens / rate

    def _least_turn(self, devices: DeviceSet) -> float:
        """Seconds of a decode step with one sequence: scheduling, kernels, and a part of the weights."""
        dims, eff = self.dims, self.machine.efficiency
        if self.request.engine == "hf":
            return dims.n_layers * eff.host_clock * min(eff.host, eff.moe_host)
        kernels = (dims.n_layers * KERNELS + dims.n_moe_layers * EXPERT_KERNELS) * eff.decode_kernel
        cut = max(self.request.pins.get("tp", 1), 2 * max(devices.counts))
        read = dims.dense_params() * self.machine.bytes_of(self.request.dtype) / cut
        return (
            eff.host_clock * eff.serving_python
            + kernels
            + read / (self.machine.memory_bandwidth * eff.decode_memory)
        )

    def _micro(self, layout: Layout, micro_batch: int, recompute: Recompute, rows: int) -> Work:
        """One full one, or all rows; of the replicas only matters whether stages are on several nodes."""
        crosses = layout.pp > 1 and layout.world > self.links.per_node
        each = min(float(rows), self._packed(micro_batch))
        key = cut_of(layout), each, recompute, crosses
        if key not in self._work:
            tokens = each * self.plan.workload.sequence_tokens
            self._work[key] = micro_batch_work(
                self.dims,
                layout,
                micro_batch=tokens / self.seq_len,
                seq_len=self.seq_len,
                machine=self.machine,
                links=self.links,
                run=self._run(recompute),
            )
        return self._work[key]

    def _run(self, recompute: Recompute) -> Run:
        return Run(self.how, recompute, chunked_head=True)
