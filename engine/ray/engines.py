"""A generation engine as a Ray actor of its own, beside the worker that drives it.

It stands on the worker's bundle and takes no share of it: the worker holds the device, the engine uses it. It
ends with the worker, whatever ends that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.rollout.kept_weights import KeptWeights
from rolemesh.engine.rollout.requests import Request, Sample
from rolemesh.engine.rollout.sampling import RolloutError
from rolemesh.engine.rollout.vllm import EngineSpec, VLLMEngine, VLLMSpec
from rolemesh.engine.rollout.vllm_chat import ChatRefused
from rolemesh.engine.worker_log import WorkerLog

START_S = 900.0  # on a GPU vLLM compiles and captures graphs


class EngineDied(RuntimeError):
    """The engine's process is gone, or vLLM failed in it; another one may do what this one was asked."""


def settle(devices: Sequence[str], threads: int, log: str | None) -> None:
    """Let this process, that of an engine, write to `log` and see these devices: Ray shows none to an actor
    that takes no share.
    """
    if log is not None:
        with contextlib.suppress(OSError):
            WorkerLog(Path(log), Path(log).stem.replace("_", " "))
    faulthandler.enable()
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


class EngineHost:
    """Body of the actor; one thread runs the engine, another may abort meanwhile."""

    def __init__(self, spec: EngineSpec, devices: Sequence[str], threads: int, log: str | None) -> None:
        settle(devices, threads, log)
        self._spec = spec
        self._engine: VLLMEngine | None = None

    def start(self) -> int:
        """Make the engine; the process id."""
        self._engine = VLLMEngine(self._spec)
        return os.getpid()

    def load_weights(self, of_ranks: Sequence[KeptWeights], version: int) -> None:
        self._started.load_weights(of_ranks, version)

    def generate(self, requests: Sequence[Request], stays: bool) -> Iterator[list[Sample]]:
        yield from self._started.generate(requests, stays)

    def add(self, requests: Sequence[Request]) -> None:
        self._started.add(requests)

    def close(self) -> None:
        self._started.close()

    def sleep(self) -> None:
        self._started.sleep()

    def abort(self) -> None:
        self._started.abort()

    @property
    def _started(self) -> VLLMEngine:
        assert self._engine is not None
        return self._engine


class EngineProcess:
    """The handle of a worker on its engine; `start` makes the process.

    Every method raises EngineDied where the process or vLLM in it failed, and RolloutError where it was asked
    for what no engine would do.

    Args:
        name: in messages.
        bundle: of the worker's placement group.
        devices: those of all ranks that the engine is cut over; empty on a CPU.
        timeout_s: limit of each call but a generation, which has that of the operation it is part of.
        log: the file for what it prints; None: where Ray puts it.
    """

    def __init__(
        self,
        name: str,
        spec: VLLMSpec,
        bundle: int,
        devices: Sequence[str],
        threads: int,
        timeout_s: float,
        log: str | None = None,
    ) -> None:
        self.name, self._timeout_s, self._log = name, timeout_s, log
        actor = self._actor_class()
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if (group := ray.util.get_current_placement_group()) is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            )
        self._actor = actor.options(**options).remote(spec, tuple(devices), threads, log)
        self.pid: int | None = None

    @staticmethod
    def _actor_class() -> Any:
        return ray.remote(concurrency_groups={"compute": 1, "control": 1})(EngineHost)  # type: ignore[call-overload]

    def start(self) -> None:
        """Wait for the engine to be ready."""
        self.pid = self._call("start", limit_s=START_S)

    def load_weights(self, of_ranks: Sequence[KeptWeights], version: int) -> None:
        """Replace the engine's weights; its processes read them where they are kept."""
        self._call("load_weights", tuple(of_ranks), version)

    def sleep(self) -> None:
        """Give the devices' memory back until the next call."""
        self._call("sleep")

    def generate(self, requests: Sequence[Request], stays: bool = False) -> Iterator[list[Sample]]:
        """Samples as they end; where it `stays`, until `close`."""
        method = self._actor.generate.options(num_returns="streaming", concurrency_group="compute")
        stream = method.remote(list(requests), stays)
        while True:
            with self._failures():
                try:
                    samples = ray.get(next(stream))
                except StopIteration:
                    return
            yield samples

    def add(self, requests: Sequence[Request]) -> None:
        """Let the running `generate`, which stays, write more."""
        self._call("add", list(requests), thread="control")

    def close(self) -> None:
        """Let it end when all is written; does not wait for that."""
        self._call("close", thread="control")

    def abort(self) -> None:
        """Let the running `generate` end; does not wait for that."""
        self._call("abort", thread="control")

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _call(self, method: str, *args: Any, limit_s: float | None = None, thread: str = "compute") -> Any:
        limit_s = self._timeout_s if limit_s is None else limit_s
        ref = getattr(self._actor, method).options(concurrency_group=thread).remote(*args)
        with self._failures():
            try:
                return ray.get(ref, timeout=limit_s)
            except GetTimeoutError:
                raise CallTimeout(f"{self.name}: {method} not done within {limit_s:g} s") from None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Ray's errors as ours."""
        try:
            yield
        except RayActorError as error:
            log = f"; its log is {self._log}" if self._log else ""
            raise EngineDied(f"{self.name} died: {' '.join(str(error).split())}{log}") from error
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RolloutError | ChatRefused):
                raise cause from None
            raise EngineDied(f"{self.name} failed: {error}") from error
