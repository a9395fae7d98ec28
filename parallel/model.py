"""One role's model over the ranks of its layout: forward passes, and training when it has an optimizer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from rolemesh.parallel.config import Recompute, transformer_config
from rolemesh.parallel.context import Packed, tokens_of
from rolemesh.parallel.lora import (
    LoraConfig,
    adapter_plans,
    adapters_off,
    add_adapters,
    is_adapters,
    merged,
    start,
)
from rolemesh.parallel.micro_batches import MicroBatch, Padding, pack
from rolemesh.parallel.offload import Kind, Offload, Use
from rolemesh.parallel.optim import OptimConfig, Optimizer
from rolemesh.parallel.pipeline import StageLinks, group_size
from rolemesh.parallel.process_state import prepare_process
from rolemesh.parallel.router import TopKRouter, routers
from rolemesh.parallel.stage import build_stage
from rolemesh.parallel.weights import Head, load_hf, stored_tensors
from rolemesh.parallel.weights.plan import ParameterPlan, rank_plan
from rolemesh.parallel.weights.random import fill_random
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

InferFn = Callable[[Tensor, MicroBatch], dict[str, Tensor]]
AtFn = Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]
LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]

_LAYER = re.compile(r"(\bdecoder\.layers\.)(\d+)")


@dataclass(frozen=True)
class TrainResult:
    """One update.

    Attributes:
        grad_norm: over the whole model, before clipping.
        lr: learning rate of this update.
        skipped: the gradient was not finite, weights stayed as they were.
        stats: what the loss function told of each micro-batch; empty except on the last stage.
        router_loss: load-balancing loss of the routers, mean over layers and tokens; None without one.
    """

    grad_norm: float
    lr: float
    skipped: bool
    stats: list[dict[str, Tensor]]
    router_loss: float | None = None


class ParallelModel:
    """A decoder cut over ranks by `layout`; every rank of it makes the same calls in the same order.

    Nothing but this object and its groups says how the model is cut, so models of different layouts can
    live in one process.

    Attributes:
        shape, layout, groups, head, dtype, device: as constructed.
        coords: this rank's place in the layout.
        parts: megatron-core's GPTModels of this rank's stage; one, unless layers are interleaved.
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
        recompute: Recompute = "none",
        new_head: bool = False,
        router_loss: float = 0.0,
        offload: bool = False,
        lora: LoraConfig | None = None,
        random_weights: bool = False,
    ) -> None:
        """Build the model that the Hugging Face folder `path` holds; each rank reads only its own weights.

        `optim` makes it trainable; `recompute` trades time for memory in training, see `transformer_config`;
        `new_head` lets a value model start from a checkpoint without a value head; `offload` keeps weights
        and optimizer state in host memory but inside of `use`; `lora` trains adapters and value heads only;
        `random_weights` reads the configuration alone.

        Raises LayoutError for a layout that cannot cut the model, ModelError for an unsupported one,
        CheckpointError for missing or unknown weights, ValueError for training in fp16.
        """
        if optim is not None and dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"train in bfloat16 or float32, not {dtype}: fp16 is for roles that only infer")
        self.shape = ModelShape.from_config(json.loads((Path(path) / "config.json").read_text()))
        self.layout, self.groups, self.head, self.dtype = layout, groups, head, dtype
        self.lora = lora
        self._router_loss_coef = router_loss if self.shape.moe else 0.0
        self.device = torch.device(device)
        self.coords = layout.coords(dist.get_rank())
        prepare_process(self.device, self.coords.tp)
        self._config = transformer_config(
            self.shape, layout, self.coords.pp, dtype=dtype, recompute=recompute
        )
        self.parts = [
            build_stage(
                self.shape, self._config, groups, layout=layout, head=head, device=self.device, part=part
            )
            for part in range(layout.vpp)
        ]
        self.optimizer: Optimizer | None = None
        self._trained: list[DistributedDataParallel] = []
        self._offload: Offload | None = None
        if random_weights:
            fill_random(dict(self.named_parameters()))
        else:
            self.load(path, new_head=new_head)
        if optim is None:
            for part in self.parts:
                part.requires_grad_(False)
        else:
            self._add_adapters()
            self._prepare_training(optim)
        if offload:
            self._offload = Offload(self.device, self._held)
            self._offload.rest()

    def _add_adapters(self) -> None:
        if self.lora is None:
            return
        plans = rank_plan(self.shape, self.layout, self.layout.rank(self.coords), self.head)
        add_adapters(self.parts, self.lora, self.groups.tp, self.layout.sequence_parallel)
        start(dict(self.trained_parameters()), self.adapter_plans(plans), self.coords.tp)

    def adapter_plans(self, plans: tuple[ParameterPlan, ...]) -> tuple[ParameterPlan, ...]:
        """How the adapters beside the parameters of `plans` are cut; none without LoRA."""
        return () if self.lora is None else adapter_plans(plans, self.lora, self.layout.tp)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside, the model is the one that LoRA started from."""
        return adapters_off(self.parts)

    def use(self, what: Use) -> AbstractContextManager[None]:
        """Inside, what `what` needs is on the device; without offload it always is.

        Each method brings what it needs. A use around several of them saves the ways between, and one is
        needed by whoever reads `named_parameters` or the optimizer.
        """
        return nullcontext() if self._offload is None else self._offload.use(what)

    def _held(self) -> dict[Kind, Iterable[Tensor]]:
        buffers = [
            buffer
            for trained in self._trained
            for buffer in trained.buffers + trained.expert_parallel_buffers
        ]
        return {
            "weights": [parameter for _, parameter in stage_parameters(self.parts)],
            "optimizer": self.optimizer.tensors() if self.optimizer else (),
            "gradients": [buffer.grad_data for buffer in buffers],
        }

    def _prepare_training(self, optim: OptimConfig) -> None:
        self._config.finalize_model_grads_func = _sum_gradients
        self._trained = [
            DistributedDataParallel(
                self._config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                part,
                pg_collection=self.groups,
            )
            for part in self.parts
        ]
        self.optimizer = Optimizer(optim, self._trained, self.groups, self.dtype)

    def load(self, path: str | Path, *, new_head: bool = False) -> None:
        """Take the weights of a Hugging Face folder, also into the optimizer's fp32 copies."""
        with self.use("training"):
            load_hf(
                dict(self.named_parameters()),
                *(self.shape, self.layout, self.coords, path),
                head=self.head,
                allow_new_head=new_head,
            )
            if self.optimizer is not None:
                self.optimizer.megatron.reload_model_params()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters, and routers' buffers that checkpoints hold, by megatron-core's names.

        Layers are counted over all parts of the stage. Adapters are left out.
        """
        return (item for item in stage_parameters(self.parts) if not is_adapters(item[0]))

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The same of all that an update may change, adapters too."""
        return (item for item in stage_parameters(self.parts) if item[1].requires_grad)

    def weights(self) -> dict[str, Tensor]:
        """What this rank has of the weights as they act: with adapters in them."""
        named = dict(stage_parameters(self.parts))
        return named if self.lora is None else merged(named, self.lora.scale)

    @property
    def module(self) -> GPTModel:
        """The stage's first part: its only one, unless layers are interleaved."""
        return self.parts[0]

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank sees the model's output."""
        return self.coords.pp == self.layout.pp - 1

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's rows of the lm head [v / tp, h], padded vocabulary; of a tied model the embedding's.

        Of the last stage's ranks of an "lm" model.
        """
        last = self.parts[-1]
        own = last.output_layer.weight
        return last.shared_embedding_or_output_weight() if own is None else own

    @property
    def padding(self) -> Padding:
        """What the lengths of a micro-batch must be multiples of."""
        row = 2 * self.layout.cp if self.layout.cp > 1 else 1
        of_rank = self.layout.tp if self.layout.sequence_parallel else 1
        return Padding(row, math.lcm(row, self.layout.cp * of_rank))

    def infer(self, micro_batches: Sequence[MicroBatch], fn: InferFn) -> list[dict[str, Tensor]] | None:
        """Forward passes without gradients: `fn(output, micro_batch)` of each, None before the last stage.

        output is hidden states [1, T / cp, h] after the final norm, the same on every tp rank, or values
        [1, T / cp] fp32, of this context parallel rank's tokens (see `at`); the output at a position belongs
        to the token after it. Logits are what hidden states and `output_weight` give:
        `linear_log_prob_and_entropy` never holds them whole. The ranks of a replica pass the same
        micro-batches; replicas may differ in their number, also zero.
        """
        if not micro_batches and not self._spread_experts:
            return [] if self.is_last_stage else None

        def step(batches: Iterator[MicroBatch], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches).to(self.device)

            def result(output: Tensor, non_loss_data: bool) -> dict[str, Tensor]:
                return fn(output, micro_batch) if len(micro_batch.rows) else {}

            return self._forward(module, micro_batch), result

        for part in self.parts:
            part.eval()
        with torch.no_grad(), self.use("weights"):
            results = self._run(
                step, self.parts, micro_batches, forward_only=True, collect_non_loss_data=True
            )
        return results[: len(micro_batches)] if self.is_last_stage else None

    def train(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> TrainResult:
        """One update with the gradients summed over these micro-batches and over data parallel ranks.

        `loss_fn(output, micro_batch)` gives a scalar that is already divided by the *global* number of
        tokens (or rows), so that the sum over all micro-batches of all replicas is the loss, and detached
        numbers to report. A replica without micro-batches takes part in the update with a loss of 0.

        Raises RuntimeError for a model without an optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError("this model was built without an optimizer: it can only infer")
        for part in self.parts:
            part.train()
        step = partial(self._train_step, loss_fn)
        with self.use("training"):
            for trained in self._trained:
                trained.zero_grad_buffer()
            self.optimizer.megatron.zero_grad()
            n_tokens = self._weigh_router_loss(micro_batches)
            stats = self._run(step, self._trained, micro_batches, forward_only=False)
            update = self.optimizer.step()
        return TrainResult(
            *(update.grad_norm, update.lr, update.skipped),
            stats=stats[: len(micro_batches)],
            router_loss=self._router_loss(n_tokens) if self._router_loss_coef else None,
        )

    def _weigh_router_loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Give each token's router loss its share of the whole batch; the tokens of the whole batch."""
        if not self._router_loss_coef:
            return 0.0
        count = torch.tensor([float(sum(int(part.lengths.sum()) for part in micro_batches))])
        n_tokens = count.to(self.device)
        dist.all_reduce(n_tokens, group=self.groups.dp)
        for router in self._routers:
            router.loss_weight, router.loss_sum = self._router_loss_coef / float(n_tokens), None
        return float(n_tokens)

    def _router_loss(self, n_tokens: float) -> float:
        mine = [router.loss_sum for router in self._routers if router.loss_sum is not None]
        total = sum(mine, torch.zeros((), device=self.device))
        dist.all_reduce(total, group=self.groups.intra_dist_opt)
        return float(total) / n_tokens / len(self.shape.moe_layers)

    @property
    def _routers(self) -> list[TopKRouter]:
        return [router for part in self.parts for router in routers(part)]

    @property
    def _spread_experts(self) -> bool:
        """Whether replicas share experts: they then make every forward pass together."""
        return self.layout.ep * self.layout.etp > self.layout.tp * self.layout.cp

    def _train_step(
        self, loss_fn: LossFn, batches: Iterator[MicroBatch], module: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(batches).to(self.device)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            nothing = len(micro_batch.rows) == 0
            value, stats = (output[:0].sum(), {}) if nothing else loss_fn(output, micro_batch)
            return value, torch.zeros((), dtype=torch.int), stats

        return self._forward(module, micro_batch), loss

    def at(
        self, output: Tensor, micro_batch: MicroBatch, position: Tensor, fn: AtFn
    ) -> tuple[Tensor | None, ...]:
        """What `fn` makes of the output at packed positions [n]: tensors [n], the same on every cp rank.

        `fn(output, position)` gets the outputs [k, ...] and positions [k] that this cp rank has, maybe none,
        and gives a tuple of tensors [k] or None. Every cp rank goes on to compute the same loss: backward
        takes the rank's own part of the gradient.
        """
        if self.layout.cp == 1:
            return fn(output[0, position], position)
        mine = tokens_of(micro_batch.bounds, self.layout.cp, self.coords.cp).to(output.device)
        place = torch.full_like(micro_batch.tokens[0], -1)
        place[mine] = torch.arange(len(mine), device=output.device)
        here = torch.nonzero(place[position] >= 0).flatten()
        found = fn(output[0, place[position[here]]], position[here])
        return tuple(None if x is None else self._of_all_cp(x, here, len(position)) for x in found)

    def _of_all_cp(self, x: Tensor, here: Tensor, n: int) -> Tensor:
        whole = x.new_zeros(n).index_put((here,), x)
        return reduce_from_tensor_model_parallel_region(whole, group=self.groups.cp)

    def _forward(self, module: nn.Module, micro_batch: MicroBatch) -> Tensor:
        tokens, cp = micro_batch.tokens, self.layout.cp
        if tokens.shape[1] % self.padding.whole:
            raise ValueError(
                f"a micro-batch of {tokens.shape[1]} tokens cannot be cut over {self.layout}: "
                f"pack it with padding={self.padding}"
            )
        packed = Packed.of(micro_batch.bounds, cp, self.coords.cp, self.device)
        if cp > 1:
            tokens = tokens[:, tokens_of(micro_batch.bounds, cp, self.coords.cp).to(self.device)]
        masks = {"padding_mask": self._padding(micro_batch)} if self.shape.moe else {}
        output = module(tokens, None, None, packed_seq_params=packed, **masks)
        is_end = get_attr_wrapped_model(module, "post_process")
        return output.squeeze(-1) if is_end and self.head == "value" else output

    def _padding(self, micro_batch: MicroBatch) -> Tensor:
        """Where this rank's own tokens [1, t] are padding."""
        mask = micro_batch.padding
        if self.layout.cp > 1:
            mask = mask[tokens_of(micro_batch.bounds, self.layout.cp, self.coords.cp).to(mask.device)]
        if self.layout.sequence_parallel:
            mask = mask.chunk(self.layout.tp)[self.coords.tp]
        return mask[None]

    def _run(
        self, step: Callable[..., Any], parts: list[Any], micro_batches: Sequence[MicroBatch], **mode: bool
    ) -> list[Any]:
        """What `step`'s second result gives for each micro-batch, then for those without rows.

        There is one at least, interleaved stages need as many micro-batches as there are stages, and replicas
        that share experts as many as each other.
        """
        pp, interleaved = self.layout.pp, self.layout.vpp > 1
        wanted = max(pp if interleaved else 1, len(micro_batches))
        if self._spread_experts:
            most = torch.tensor([wanted], device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.groups.ep)
            wanted = int(most)
        missing = wanted - len(micro_batches)
        batches = [*micro_batches, *[_without_rows(self.padding)] * missing]
        if interleaved:
            self._config.microbatch_group_size_per_vp_stage = group_size(len(batches), pp)
        schedule = get_forward_backward_func(pp_size=pp, vp_size=self.layout.vpp if interleaved else None)
        return schedule(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in parts] if interleaved else iter(batches),
            model=parts if interleaved else parts[0],
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=1,
            pg_collection=self.groups,
            p2p_communicator=StageLinks(self.groups.pp, self._config, self.device),
            **mode,
        )


def _sum_gradients(model: list[nn.Module], num_tokens: Tensor, **kwargs: Any) -> None:
    """megatron-core's reductions without its division by a token count: losses come divided already."""
    finalize_model_grads(model, None, **kwargs)


def _without_rows(padding: Padding) -> MicroBatch:
    """Only padding: for a replica without rows that must take part in an update."""
    none = torch.zeros((0, 1), dtype=torch.int64)
    return pack(none, none, {}, [], padding=padding)


def stage_parameters(parts: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints hold of a stage, by megatron-core's names, layers counted over all its parts."""
    before = 0
    for part in parts:
        for name, parameter in stored_tensors(part):
            yield _LAYER.sub(partial(_counted_on, before), name), parameter
        before += len(part.decoder.layers)


def _counted_on(before: int, found: re.Match[str]) -> str:
    return f"{found[1]}{int(found[2]) + before}"
