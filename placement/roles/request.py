"""What is to be planned: the step, each role's model and what is fixed of it, the workload, the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import Recompute, RoleOption
from rolemesh.placement.graph import Operation, StepGraph
from rolemesh.placement.layout import Layout
from rolemesh.placement.lengths import Fixed, Longer
from rolemesh.placement.model import ModelShape
from rolemesh.placement.timing.transfer import Remote
from rolemesh.placement.workload import Workload

Engine = Literal["hf", "paged"]
REFERENCES = ("ref",)
SCALAR_HEADS = ("critic", "reward")


class RequestError(ValueError):
    """Roles that do not match the step; the message names them."""


@dataclass(frozen=True)
class Questions:
    """What a role is asked that judges samples in words: it reads and generates, as a rollout does.

    Attributes:
        answer_tokens: of the longest answer; answers count as long as that.
        frame_tokens: of a question, beside the samples in it.
        per_sample: questions for each sample of the step.
        samples: that a question shows.
    """

    answer_tokens: int
    frame_tokens: int
    per_sample: float = 1.0
    samples: int = 1


@dataclass(frozen=True)
class RoleRequest:
    """One role's model and what the user fixed of how it runs; None leaves it to the planner.

    Attributes:
        shape: of its model; a rollout has the actor's.
        dtype: of weights and activations.
        pins: sizes of the layout that are fixed.
        engine: of a role that generates: `hf`, a whole copy of the model in each process and batches that run
            until their longest response ends; `paged`, a model cut over tp and pp that takes in a waiting
            sequence when one ends (vLLM, SGLang).
        micro_batch_tokens: that one rank puts through the model at once, a longer sequence alone; for the
            `hf` engine rows x (prompt and longest response) of a batch.
        scoring_tokens: the same where a role that trains scores, if it is not `micro_batch_tokens`.
        recompute, offload: see `RoleOption`.
        lora_rank: of adapters that are trained in place of the model; 0 without.
        questions: of a role that is asked in words (a judge); None for all others.
    """

    shape: ModelShape
    dtype: str = "bfloat16"
    pins: Mapping[str, Any] = field(default_factory=dict, hash=False)
    engine: Engine = "paged"
    micro_batch_tokens: int | None = None
    scoring_tokens: int | None = None
    recompute: Recompute | None = None
    offload: bool | None = None
    lora_rank: int = 0
    questions: Questions | None = None

    def __post_init__(self) -> None:
        Layout(**self.pins)  # its constructor checks names and values
        if self.engine not in ("hf", "paged"):
            raise RequestError(f"engine is hf or paged, got {self.engine!r}")


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        graph: the step.
        roles: those that need devices.
        remote: for operations of other roles (a reward by function or service) how fast they answer; one
            that is not named takes no time.
        runnable: only what the workers can run is planned; else also what only other software runs: fused
            operators, engines whose memory waits on the host.
        staleness: 1 for generation one step ahead, see `schedule`.
        streamed: responses go on over a change of weights (partial rollouts), so none waits for the longest;
            needs staleness 1.
        gathered: weights are handed over whole and tensor by tensor, see `timing.transfer`.
        fused_routing: see `timing.layer.How`.

    Raises RequestError when roles and step do not match, and for `streamed`, `gathered` or routing that is
    not fused where our workers are to run it.
    """

    graph: StepGraph
    roles: Mapping[str, RoleRequest]
    workload: Workload
    cluster: ClusterSpec
    remote: Mapping[str, Remote] = field(default_factory=dict)
    runnable: bool = True
    staleness: int = 0
    streamed: bool = False
    gathered: bool = False
    fused_routing: bool = True

    def __post_init__(self) -> None:
        if self.runnable and (self.streamed or self.gathered or not self.fused_routing):
            raise RequestError("streamed, gathered and fused_routing are for other software: runnable=False")
        if self.streamed and self.staleness == 0:
            raise RequestError("streamed responses outlive a step, so they need staleness 1")
        kinds = tuple(
            replace(node, device_type=self.cluster.device_type(node)) for node in self.cluster.nodes
        )
        object.__setattr__(self, "cluster", replace(self.cluster, nodes=kinds))
        object.__setattr__(self, "roles", {role: _headed(role, one) for role, one in self.roles.items()})
        there = {role for operation in self.graph.operations for role in operation.roles}
        if unknown := sorted(set(self.roles) - there):
            raise RequestError(f"step {self.graph.name!r} has no role {', '.join(unknown)} (it has: {there})")
        for operation in self.graph.operations:
            if operation.role not in self.roles and operation.kind in ("generate", "train", "transfer"):
                raise RequestError(f"{operation.name} needs role {operation.role!r}, which has no model here")

    def fixed_as(self, role: str, option: RoleOption) -> RoleRequest:
        """The role's request with everything fixed as in an option."""
        layout = option.layout
        sizes: dict[str, Any] = dict(layout.sizes())
        sizes |= {"sequence_parallel": layout.sequence_parallel, "pp_layers": layout.pp_layers}
        tokens = math.ceil(option.micro_batch * self.as_asked(role).workload.longest_tokens)
        return replace(
            self.roles[role],
            pins=sizes,
            micro_batch_tokens=tokens,
            recompute=option.recompute,
            offload=option.offload,
        )

    def trains(self, role: str) -> bool:
        """Whether the step updates this role."""
        return any(op.role == role and op.kind == "train" for op in self.graph.operations)

    def generates(self, role: str) -> bool:
        """Whether this role generates."""
        return self.roles[role].questions is not None or any(
            op.role == role and op.kind == "generate" for op in self.graph.operations
        )

    def as_asked(self, role: str) -> PlanRequest:
        """The request as `role` sees it: for a judge the sequences of a step are questions and answers."""
        if (asked := self.roles[role].questions) is None:
            return self
        load = self.workload
        others = (
            load.prompt_lengths.mean + asked.frame_tokens + (asked.samples - 1) * load.response_lengths.mean
        )
        questions = replace(
            load,
            prompts=max(1, round(load.prompts * asked.per_sample)),
            prompt_lengths=Longer(load.response_lengths, others),
            response_lengths=Fixed(float(asked.answer_tokens)),
            mini_batch_samples=None,
            micro_batch_tokens=None,
        )
        return replace(self, workload=questions)

    def times(self, operation: Operation) -> float:
        """How often an operation runs in a step, on average."""
        return self.workload.tries if operation.name in self.graph.refill else 1.0

    def rows(self, operation: Operation, samples: int) -> int:
        """Rows that an operation works on, of a batch or a share of it with `samples` rows."""
        return samples if operation.per == "sample" else -(-samples // self.workload.samples_per_prompt)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the operations whose roles have no devices."""
        none, load = Remote(0.0, math.inf), self.workload
        return {
            op.name: self.times(op) * self.remote.get(op.name, none).seconds(self.rows(op, load.samples))
            for op in self.graph.operations
            if op.role not in self.roles
        }

    def notes(self) -> list[str]:
        """What a user should know of the request, as lines."""
        said = []
        dtypes = {role: request.dtype for role, request in self.roles.items()}
        for role in REFERENCES:
            if "actor" in dtypes and dtypes.get(role, dtypes["actor"]) != dtypes["actor"]:
                said.append(
                    f"{role} runs in {dtypes[role]}, actor in {dtypes['actor']}: their log-probabilities "
                    "differ by rounding even with equal weights, so the KL starts above 0"
                )
        for name in self.seconds:
            if name not in self.remote:
                said.append(f"{name} runs on no devices and is counted as taking no time")
        return said


def _headed(role: str, request: RoleRequest) -> RoleRequest:
    """A critic's or reward model's head has one column, also where it is made from a language model."""
    if role not in SCALAR_HEADS or request.questions or request.shape.n_labels is not None:
        return request
    return replace(request, shape=replace(request.shape, n_labels=1))
