"""What every Megatron role does on one rank: build its model, and run forward passes over a shard's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.fingerprint import checkpoint_revision
from rolemesh.engine.workers.checkpointed import CheckpointedWorker
from rolemesh.kernels import linear_log_prob_and_entropy, raise_bad_labels
from rolemesh.parallel.config import Recompute
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.lora import LoraConfig
from rolemesh.parallel.micro_batches import MicroBatch, micro_batches, response_index, unpack
from rolemesh.parallel.model import ParallelModel, TrainResult
from rolemesh.parallel.optim import OptimConfig
from rolemesh.parallel.weights import save_hf


@dataclass(frozen=True)
class RoleSpec:
    """What one Megatron role loads and how it runs.

    `optim` is None for a role that only scores. `micro_batch_tokens` bounds the tokens of one forward pass;
    a longer row goes alone. With `offload` weights and optimizer wait in host memory between operations. With
    `random_weights` only the configuration is read.
    """

    path: str
    head: Literal["lm", "value"]
    dtype: str = "float32"
    optim: OptimConfig | None = None
    micro_batch_tokens: int = 16384
    new_head: bool = False
    recompute: Recompute = "none"
    offload: bool = False
    lora: LoraConfig | None = None
    router_loss: float = 0.0
    temperature: float = 1.0
    random_weights: bool = False


class MegatronWorker(CheckpointedWorker):
    """One rank of one Megatron role. Construction is cheap; `init_model` loads the weights (a collective
    call).
    """

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> int:
        """Build the model on this rank and read its weights. Returns this rank's number of parameters."""
        self.context.phase("loading weights")
        self.model = ParallelModel(
            self.spec.path,
            self.layout,
            make_groups(self.layout, timeout_s=self.context.collective_timeout_s),
            head=self.spec.head,
            dtype=getattr(torch, self.spec.dtype),
            device=self.device,
            optim=self.spec.optim,
            new_head=self.spec.new_head,
            recompute=self.spec.recompute,
            offload=self.spec.offload,
            lora=self.spec.lora,
            router_loss=self.spec.router_loss,
            random_weights=self.spec.random_weights,
        )
        return sum(parameter.numel() for _, parameter in self.model.named_parameters())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, out_dir: str) -> None:
        """Write the weights as a Hugging Face folder on a disk that the ranks share, each stage its own
        shards.
        """
        model = self.model
        with model.use("weights"):
            save_hf(
                model.weights(),
                *(model.shape, model.layout, model.groups, self.spec.path, out_dir),
                head=model.head,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint(self) -> str:
        """The folder that was loaded and its revision, for messages."""
        return f"{self.spec.path}, revision {checkpoint_revision(Path(self.spec.path))}"

    def cut(self, data: DataProto, columns: Sequence[str] = ()) -> list[MicroBatch]:
        """The shard's rows, with `responses` and `columns`, packed within the token budget, on the device."""
        parts = micro_batches(
            data.batch["input_ids"],
            data.batch["attention_mask"],
            {name: data.batch[name] for name in ("responses", *columns)},
            budget_tokens=self.spec.micro_batch_tokens,
            padding=self.model.padding,
        )
        return [part.to(self.device) for part in parts]

    def infer(
        self, data: DataProto, fn: Callable[[Tensor, MicroBatch], dict[str, Tensor]]
    ) -> DataProto | None:
        """Run `fn(output, micro_batch)` on every row; its `[m, ...]` outputs come back in the shard's row
        order.

        None on ranks that hold no result: all but the last pipeline stage, and a replica whose shard is
        empty. Raises ValueError for a token outside of the vocabulary among those scored.
        """
        if len(data) == 0:
            self.model.infer([], fn)  # replicas that share experts make every forward pass together
            return None
        parts = self.cut(data)
        outputs = self.model.infer(parts, fn)
        raise_bad_labels(self.device)
        return None if outputs is None else DataProto.from_dict(tensors=unpack(parts, outputs))

    def train_mini_batches(
        self,
        data: DataProto,
        sizes: Sequence[Sequence[int]] | None,
        epochs: int,
        columns: Sequence[str],
        make_loss: Callable[[DataProto], Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]],
    ) -> list[TrainResult]:
        """One optimizer step per mini-batch and epoch; `sizes[dp_rank][k]` rows of this shard belong to
        mini-batch k.

        Without `sizes` the batch is one mini-batch. `make_loss(mini_batch)` is called on every rank first,
        so it may all-reduce denominators over dp. A rank without rows in a mini-batch takes part with no
        loss. Raises ValueError for a token outside of the vocabulary among those scored.
        """
        mine = [len(data)] if sizes is None else sizes[self.dp_rank]
        if sum(mine) != len(data):
            raise ValueError(
                f"the shard has {len(data)} rows, the mini-batch sizes {list(mine)} need {sum(mine)}"
            )
        results = []
        with self.model.use("training"):
            for _ in range(epochs):
                start = 0
                for size in mine:
                    mini_batch = data.slice(start, start + size)
                    start += size
                    results.append(self.model.train(self.cut(mini_batch, columns), make_loss(mini_batch)))
                    raise_bad_labels(self.device)  # on a GPU: the log-probability was NaN, no weight moved
        return results

    def log_probs(
        self, hidden: Tensor, micro_batch: MicroBatch, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the responses, fp32 `[m, R]`, 0 outside them.

        `hidden` is the model's output `[1, T, h]`: only the positions that predict a response token are read,
        and their logits exist a tile at a time. Without `entropy` the second result is 0 throughout.
        """
        index = response_index(micro_batch, micro_batch.columns["responses"].shape[1])

        def score(hidden: Tensor, position: Tensor) -> tuple[Tensor | None, ...]:
            return linear_log_prob_and_entropy(
                hidden,
                self.model.output_weight,
                micro_batch.tokens[0, position + 1],
                temperature=self.spec.temperature,
                entropy=entropy,
                group=self.model.groups.tp if self.layout.tp > 1 else None,
                vocab_size=self.model.shape.vocab,
            )

        log_prob, token_entropy = self.model.at(hidden, micro_batch, index.previous, score)
        assert log_prob is not None
        none = torch.zeros_like(log_prob) if token_entropy is None else token_entropy
        return index.scatter(log_prob), index.scatter(none)

    def values_at(self, output: Tensor, micro_batch: MicroBatch, position: Tensor) -> Tensor:
        """Values, fp32 `[n]`, at packed positions `[n]`; `output` `[1, T]` is the value model's."""
        (values,) = self.model.at(output, micro_batch, position, lambda found, _: (found.float(),))
        assert values is not None
        return values

    def response_values(self, output: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Values at the token before each response token, fp32 `[m, R]`, 0 outside the response."""
        index = response_index(micro_batch, micro_batch.columns["responses"].shape[1])
        return index.scatter(self.values_at(output, micro_batch, index.previous))

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.layout.coords(self.rank).dp
