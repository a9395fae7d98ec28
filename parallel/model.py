"""One role's model over the ranks of its layout: forward passes, and training when it has an optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from rolemesh.parallel.config import transformer_config
from rolemesh.parallel.micro_batches import MicroBatch
from rolemesh.parallel.optim import OptimConfig, Optimizer
from rolemesh.parallel.process_state import prepare_process
from rolemesh.parallel.stage import build_stage
from rolemesh.parallel.weights import Head, load_hf
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

InferFn = Callable[[Tensor, MicroBatch], dict[str, Tensor]]
LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class TrainResult:
    """One update.

    Attributes:
        grad_norm: over the whole model, before clipping.
        lr: learning rate of this update.
        skipped: the gradient was not finite, weights stayed as they were.
        stats: what the loss function told of each micro-batch; empty except on the last stage.
    """

    grad_norm: float
    lr: float
    skipped: bool
    stats: list[dict[str, Tensor]]


class ParallelModel:
    """A decoder cut over ranks by `layout`; every rank of it makes the same calls in the same order.

    Nothing but this object and its groups says how the model is cut, so models of different layouts can
    live in one process.

    Attributes:
        shape, layout, groups, head, dtype, device: as constructed.
        coords: this rank's place in the layout.
        module: megatron-core's GPTModel of this rank's stage, for weights in and out.
        optimizer: None for a role that only infers; such a role has no gradient buffers either.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout,
        groups: ProcessGroupCollection,
        *,
        head: Head = "lm",
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        optim: OptimConfig | None = None,
        recompute: bool = False,
        new_head: bool = False,
    ) -> None:
        """Build the model that the Hugging Face folder `path` holds; each rank reads only its own weights.

        `optim` makes it trainable; `recompute` trades time for memory in training; `new_head` lets a value
        model start from a checkpoint without a value head.

        Raises LayoutError for a layout that cannot cut the model, ModelError for an unsupported one,
        CheckpointError for missing or unknown weights, ValueError for training in fp16.
        """
        if optim is not None and dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"train in bfloat16 or float32, not {dtype}: fp16 is for roles that only infer")
        self.shape = ModelShape.from_config(json.loads((Path(path) / "config.json").read_text()))
        self.layout, self.groups, self.head, self.dtype = layout, groups, head, dtype
        self.device = torch.device(device)
        self.coords = layout.coords(dist.get_rank())
        prepare_process(self.device, self.coords.tp)
        self._config = transformer_config(
            self.shape, layout, self.coords.pp, dtype=dtype, recompute=recompute
        )
        self.module = build_stage(self.shape, self._config, groups, head=head, device=self.device)
        self.optimizer: Optimizer | None = None
        self.load(path, new_head=new_head)
        if optim is None:
            self.module.requires_grad_(False)
        else:
            self._prepare_training(optim)

    def _prepare_training(self, optim: OptimConfig) -> None:
        self._config.finalize_model_grads_func = _sum_gradients
        self._trained = DistributedDataParallel(
            self._config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            self.module,
            pg_collection=self.groups,
        )
        self.optimizer = Optimizer(optim, self._trained, self.groups, self.dtype)

    def load(self, path: str | Path, *, new_head: bool = False) -> None:
        """Take the weights of a Hugging Face folder, also into the optimizer's fp32 copies."""
        load_hf(
            self.module, self.shape, self.layout, self.coords, path, head=self.head, allow_new_head=new_head
        )
        if self.optimizer is not None:
            self.optimizer.megatron.reload_model_params()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by megatron-core's names (layers counted from the stage's first)."""
        return self.module.named_parameters()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank sees the model's output."""
        return self.coords.pp == self.layout.pp - 1

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's rows of the lm head [v / tp, h], padded vocabulary; of a tied model the embedding's.

        Of the last stage's ranks of an "lm" model.
        """
        own = self.module.output_layer.weight
        return self.module.shared_embedding_or_output_weight() if own is None else own

    @property
    def width_multiple(self) -> int:
        """What the width of a micro-batch must be a multiple of."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    def infer(self, micro_batches: Sequence[MicroBatch], fn: InferFn) -> list[dict[str, Tensor]] | None:
        """Forward passes without gradients: `fn(output, micro_batch)` of each, None before the last stage.

        output is hidden states [m, L, h] after the final norm, the same on every tp rank, or values [m, L]
        fp32; the output at a position belongs to the token after it. Logits are what hidden states and
        `output_weight` give: `linear_log_prob_and_entropy` never holds them whole. The ranks of a replica
        pass the same micro-batches; replicas may differ in their number, also zero.
        """
        if not micro_batches:
            return [] if self.is_last_stage else None

        def step(batches: Iterator[MicroBatch], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches).to(self.device)
            return self._forward(module, micro_batch), lambda output, non_loss_data: fn(output, micro_batch)

        self.module.eval()
        with torch.no_grad():
            results = self._run(
                step, self.module, micro_batches, forward_only=True, collect_non_loss_data=True
            )
        return results if self.is_last_stage else None

    def train(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> TrainResult:
        """One update with the gradients summed over these micro-batches and over data parallel ranks.

        `loss_fn(output, micro_batch)` gives a scalar that is already divided by the *global* number of
        tokens (or rows), so that the sum over all micro-batches of all replicas is the loss, and detached
        numbers to report. A replica without micro-batches takes part in the update with a loss of 0.

        Raises RuntimeError for a model without an optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError("this model was built without an optimizer: it can only infer")
        idle = not micro_batches

        def step(batches: Iterator[MicroBatch], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches).to(self.device)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, stats = (output[:0].sum(), {}) if idle else loss_fn(output, micro_batch)
                return value, torch.zeros((), dtype=torch.int), stats

            return self._forward(module, micro_batch), loss

        self.module.train()
        self._trained.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        batches = [_idle_micro_batch(self.width_multiple)] if idle else micro_batches
        stats = self._run(step, self._trained, batches, forward_only=False)
        update = self.optimizer.step()
        return TrainResult(update.grad_norm, update.lr, update.skipped, [] if idle else stats)

    def _forward(self, module: nn.Module, micro_batch: MicroBatch) -> Tensor:
        width = micro_batch.tokens.shape[1]
        if width % self.width_multiple:
            raise ValueError(
                f"a micro-batch of width {width} cannot be cut over tp={self.layout.tp}: "
                f"pack it with multiple={self.width_multiple}"
            )
        output = module(
            micro_batch.tokens, None, None
        )  # rows start at position 0 and need no mask: padding is last
        return output.squeeze(-1) if self.is_last_stage and self.head == "value" else output

    def _run(
        self, step: Callable[..., Any], module: nn.Module, micro_batches: Sequence[MicroBatch], **mode: bool
    ) -> list[Any]:
        schedule = get_forward_backward_func(pp_size=self.layout.pp, vp_size=None)
        rows, width = micro_batches[0].tokens.shape
        return schedule(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=module,
            num_microbatches=len(micro_batches),
            seq_length=width,
            micro_batch_size=rows,
            pg_collection=self.groups,
            p2p_communicator=P2PCommunicator(pp_group=self.groups.pp, config=self._config),
            **mode,
        )


def _sum_gradients(model: list[nn.Module], num_tokens: Tensor, **kwargs: Any) -> None:
    """megatron-core's reductions without its division by a token count: losses come divided already."""
    finalize_model_grads(model, None, **kwargs)


def _idle_micro_batch(width: int) -> MicroBatch:
    """One row of padding, for a replica that has no rows but must take part in the update."""
    tokens = torch.zeros((1, width), dtype=torch.int64)
    return MicroBatch(
        torch.zeros(1, dtype=torch.int64), tokens, torch.zeros(1, dtype=torch.int64), tokens, {}
    )
