"""The optimizer of a trained role: AdamW with fp32 state cut over data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate over the steps of a run.

    The rate rises linearly over `warmup_steps`, then stays (`constant`) or falls to `min_lr` at
    `total_steps`. Vectors (norms, biases) take no weight decay. `clip_grad` bounds the global gradient
    norm; None leaves gradients as they are.

    Raises ValueError naming the value that is out of bounds.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float | None = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"need 0 <= min_lr <= lr, got min_lr={self.min_lr}, lr={self.lr}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}, must be constant, linear or cosine")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, must be at least 0")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"a {self.schedule} schedule needs total_steps above warmup_steps={self.warmup_steps}, "
                f"got {self.total_steps}"
            )
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise ValueError(f"clip_grad is {self.clip_grad}, must be above 0 (None does not clip)")


def lr_at(config: OptimConfig, step: int) -> float:
    """Learning rate of update `step` (0 is the first, which already moves: it has 1 / warmup_steps of it)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    done = min((step - config.warmup_steps) / (config.total_steps - config.warmup_steps), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: gradient norm before clipping, learning rate, whether it was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class Shard:
    """What this rank keeps of a parameter: numbers `low` to `high` of it laid end to end.

    `states` are flat fp32 tensors [high - low], the optimizer's own memory: "param" (the weight), "exp_avg",
    "exp_avg_sq".
    """

    low: int
    high: int
    states: Mapping[str, Tensor]


class Optimizer:
    """megatron-core's distributed optimizer with a learning-rate schedule; `step_count` is the next step."""

    def __init__(
        self,
        config: OptimConfig,
        parts: list[DistributedDataParallel],
        groups: ProcessGroupCollection,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.step_count = 0
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=0.0,  # `step` clips, because it looks at the norm first
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            parts,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )

    @torch.no_grad()
    def step(self) -> Update:
        """Clip and apply the gradients in the model's buffers.

        With a gradient norm that is not finite the weights and the schedule stay as they are.
        """
        lr = lr_at(self.config, self.step_count)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return Update(norm, lr, skipped=True)
        if self.config.clip_grad is not None:
            # Routed experts have an optimizer of their own.
            parameters = [parameter for part in self._parts for parameter in part.get_parameters()]
            clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        self.step_count += 1
        return Update(norm, lr, skipped=False)

    def tensors(self) -> Iterator[Tensor]:
        """What there is now of fp32 weights and moments on this rank, in flat parts."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state.get(parameter, {})
                    yield from (parameter.data, *(x for x in state.values() if torch.is_tensor(x) and x.ndim))

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """This rank's part of a parameter; None where the data parallel ranks beside it have all of it.

        Before the first update the moments are zero.
        """
        for part in self._parts:
            if parameter in part.model_param_group_index_map:
                _make_state(part)
                at = part._get_model_param_range_map(parameter)["param"]
                states = part._get_main_param_and_optimizer_states(parameter)
                flat = {name: states[name].detach().view(-1) for name in ("param", "exp_avg", "exp_avg_sq")}
                return Shard(at.start, at.end, flat)
        return None

    def set_step(self, step_count: int) -> None:
        """Go on as after `step_count` updates: the schedule's place and Adam's bias correction."""
        self.step_count = step_count
        for part in self._parts:
            _make_state(part)
            for group in part.optimizer.param_groups:
                if not _is_torchs(part) and step_count:
                    group["step"] = step_count
                for parameter in group["params"] if _is_torchs(part) else ():
                    part.optimizer.state[parameter]["step"].fill_(step_count)

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Round the fp32 weights into the model and share them over data parallel ranks, as updates do."""
        for part in self._parts:
            part._copy_main_params_to_model_params()
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)

    @property
    def _parts(self) -> list[Any]:
        """The distributed optimizers that megatron-core has chained."""
        return getattr(self.megatron, "chained_optimizers", [self.megatron])


def _is_torchs(part: Any) -> bool:
    """Whether torch's own AdamW updates, which counts steps per parameter; the fused ones do per group."""
    return isinstance(part.optimizer, torch.optim.AdamW)


def _make_state(part: Any) -> None:
    """Adam's state as it is before the first update, where there is none yet."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            if not state:
                if _is_torchs(part):
                    state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)
