"""The rollout role with vLLM: the first rank of each replica drives an engine on the replica's devices."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.engines import EngineDied, EngineProcess
from rolemesh.engine.rollout.agent import AgentSpec, Conversations, Tokenizers, fields_of, side_by_side
from rolemesh.engine.rollout.kept_weights import KeptWeights, WeightKeeper
from rolemesh.engine.rollout.requests import Rows
from rolemesh.engine.rollout.running import Running
from rolemesh.engine.rollout.sampling import RolloutError
from rolemesh.engine.rollout.vllm import EngineSpec
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.baseline import as_baseline, as_prompts, prompts_once
from rolemesh.engine.workers.weights import take, takes_weights
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import EngineSide
from rolemesh.placement.model import ModelShape
from rolemesh.placement.steps.operations import SEQUENCES

MOST_PARTS = 16  # of one call on one replica: finished samples wait for so many of them
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VLLMRolloutSpec:
    """The engine, how often one call may replace a replica's by a new one, and who answers, if any does."""

    engine: EngineSpec
    restarts: int = 3
    agent: AgentSpec | None = None


def replica_places(worker: Worker) -> list[str]:
    """Every rank's visible devices. Raises RolloutError where the worker's replica is on several nodes."""
    mine = (worker.context.node, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    places = [mine] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(places, mine)
    ranks = worker.layout.replica(worker.layout.coords(worker.rank).dp)
    if len(nodes := sorted({places[rank][0] for rank in ranks})) > 1:
        role, tp = worker.context.role, worker.layout.tp
        raise RolloutError(
            f"a vLLM engine stays on one node; that of {role} ranks {ranks} would be on {', '.join(nodes)}: "
            f"use a smaller {role}.layout.tp than {tp}, or a pool with a multiple of it on each"
        )
    return [devices for _, devices in places]


class VLLMRolloutWorker(Worker):
    """One rank of the rollout role. The first of a replica has the engine; the others hold devices for it.

    The weights come from the actor, by `load_weights`, before the first use: to each rank its tensor-parallel
    part. It keeps that, for its engine to read and for one that has to take the engine's place.
    """

    def __init__(self, spec: VLLMRolloutSpec) -> None:
        self.spec = spec
        self.version = -1
        self.n_restarts = 0
        self._engine: EngineProcess | None = None
        self._weights: tuple[KeptWeights, ...] = ()  # of the replica's ranks; none before the first transfer
        self._devices: list[str] = []

    @property
    def leads(self) -> bool:
        """Whether this rank drives its replica's engine."""
        return self.rank == self.layout.collect_rank(self.layout.coords(self.rank).dp)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engines, without weights. Raises RolloutError for a replica on several nodes, or where
        there is no memory to keep the weights in.
        """
        places = replica_places(self)
        engine = self.spec.engine
        shape = ModelShape.from_config(json.loads((Path(engine.path) / "config.json").read_text()))
        self._side = EngineSide(shape, getattr(torch, engine.dtype), self.layout.tp, self.layout.dp)
        self._keeper = WeightKeeper(self._side, self.layout.coords(self.rank).tp)
        if self.leads:
            if self.spec.agent is not None:
                self.spec.agent.load()
                self._tokenizers = Tokenizers.load(self.spec.agent.tokenizer)
            if self.device.type == "cuda":
                ranks = self.layout.replica(self.layout.coords(self.rank).dp)
                self._devices = [places[rank] for rank in ranks]
            self.context.phase("starting the engine")
            self._start()

    @takes_weights
    def load_weights(self, meeting: Meeting, version: int | None = None) -> None:
        """Take the actor's weights, all of them. `version` numbers them; without, each is one more than the
        last. While they come, and after a failure, there are none.
        """
        self.version, self._weights = self.version + 1 if version is None else version, ()
        for _ in take(self, meeting, self._side, self._keeper.place):
            pass
        self.context.notes["kept_bytes"] = self._keeper.n_bytes
        of_ranks = [self._keeper.weights] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(of_ranks, self._keeper.weights)  # all have their part, too
        own = self.layout.replica(self.layout.coords(self.rank).dp)
        self._weights = tuple(of_ranks[rank] for rank in own)
        if self.leads:
            self.n_restarts = 0
            self._surely(lambda engine: engine.load_weights(self._weights, self.version))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, parts=True, materialize_futures=False)
    def generate_sequences(self, prompts: BatchRef, greedy: bool = False) -> Iterator[Part]:
        """One response per row: the columns of `Rows.columns`, finished rows first. `greedy` takes the
        likeliest token. Rows of an earlier result that are not finished are continued. With an agent a
        response is a conversation, see `Conversations.columns`.
        """
        if self.leads:
            yield from self._generate(self.context.fetch(prompts), greedy)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_baseline(self, samples: DataProto) -> DataProto | None:
        """The likeliest answer to each sample's prompt: `baseline_responses`, `baseline_input_ids`, ..."""
        if not self.leads:
            return None
        once, own = prompts_once(samples)
        parts = list(self._generate(as_prompts(once), greedy=True))
        rows = torch.tensor([row for part in parts for row in part.rows])
        answers = DataProto.concat([part.data.select(list(SEQUENCES)) for part in parts])
        return as_baseline(answers.select_idxs(rows.argsort()), own)

    def abort(self) -> None:
        """Stop the responses that are being written: the running call returns them as they are."""
        if not self.spec.engine.partial:
            raise RolloutError("responses are not stopped halfway: rollout.partial is off")
        if self._engine is not None:
            with contextlib.suppress(EngineDied):  # the running call sees that too, and has another write
                self._engine.abort()

    def engine_pid(self) -> int | None:
        """The process of this rank's engine."""
        return None if self._engine is None else self._engine.pid

    def _generate(self, batch: DataProto, greedy: bool) -> Iterator[Part]:
        if not self._weights:
            raise RolloutError(f"{self.name} has no weights: load_weights has not been called, or has failed")
        rows = Rows(batch, replace(self.spec.engine.sampling, do_sample=not greedy))
        done = [row for row, finished in enumerate(rows.finished) if finished]
        enough = max(1, len(batch) // MOST_PARTS)
        running = Running(len(batch) - len(done))
        self.context.notes["running"] = running.points
        self.n_restarts = 0
        with self._conversations(batch, rows) as talks:
            for over in self._written(rows) if talks is None else self._talked(talks):
                done += over
                running.ended(len(over))
                if len(done) >= enough:
                    yield self._part(rows, talks, done)
                    done = []
            if self.spec.engine.sleeps:
                self._surely(EngineProcess.sleep)
            last = self._part(rows, talks, done)
        last.data.meta_info["metrics"] = {
            "rollout/prefix_cached_share": rows.n_cached / max(1, rows.n_prompt),
            "rollout/engine_restarts": float(self.n_restarts),
        }
        yield last

    def _part(self, rows: Rows, talks: Conversations | None, done: list[int]) -> Part:
        if talks is not None:
            return Part(tuple(done), talks.columns(done))
        return Part(tuple(done), rows.columns(done, partial=self.spec.engine.partial))

    def _conversations(self, batch: DataProto, rows: Rows) -> AbstractContextManager[Conversations | None]:
        if self.spec.agent is None:
            return contextlib.nullcontext()
        return Conversations(self.spec.agent, rows, fields_of(batch), self._tokenizers)

    def _written(self, rows: Rows) -> Iterator[list[int]]:
        """Rows as they end; where the engine dies another one writes what is missing."""
        open_ = {request.row for request in rows.requests()}
        while open_:
            try:
                for samples in self._live.generate([r for r in rows.requests() if r.row in open_]):
                    for sample in samples:
                        rows.add(sample)
                        open_.discard(sample.row)
                    yield [sample.row for sample in samples]
            except EngineDied as error:
                self._replace(error)

    def _talked(self, talks: Conversations) -> Iterator[list[int]]:
        """Rows as their conversations end; another engine takes up those of one that dies."""
        while talks.open:
            try:
                yield from side_by_side(talks, self._live)
            except EngineDied as error:
                self._replace(error)

    def _start(self) -> None:
        context = self.context
        log = None if context.logs is None else f"{context.logs}/{context.role}_engine_rank_{self.rank}.log"
        self._engine = EngineProcess(
            f"the vLLM engine of {context.role} rank {self.rank} on node {context.node}",
            self.spec.engine,
            bundle=self.rank,
            devices=self._devices,
            threads=torch.get_num_threads(),
            timeout_s=context.collective_timeout_s,
            log=log,
        )
        self._engine.start()

    def _surely(self, do: Callable[[EngineProcess], None]) -> None:
        """Do something with the engine, or with the one that takes its place."""
        while True:
            try:
                return do(self._live)
            except EngineDied as error:
                self._replace(error)

    def _replace(self, error: EngineDied) -> None:
        """A new engine with the current weights, in the place of one that failed. Raises RolloutError when
        the call has done this too often.
        """
        while True:
            self._live.kill()
            if self.n_restarts == self.spec.restarts:
                raise RolloutError(
                    f"{error}\nafter {self.n_restarts} restarts; rollout.engine_restarts allows no more"
                ) from error
            self.n_restarts += 1
            _log.warning("%s; starting another (%d of %d)", error, self.n_restarts, self.spec.restarts)
            try:
                self._start()
                if self._weights:
                    self._live.load_weights(self._weights, self.version)
                return
            except EngineDied as again:
                error = again

    @property
    def _live(self) -> EngineProcess:
        if self._engine is None:
            raise RolloutError("the engine is not started: init_model comes first")
        return self._engine
