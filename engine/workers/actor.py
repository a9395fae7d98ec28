"""The actor: the policy that learns. Scores its own samples, and takes clipped policy-gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rolemesh.engine.algorithms import get_policy_loss_fn, load_algorithm_file
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.workers.advantage import AdvantageWorker, without_truncated
from rolemesh.engine.workers.megatron import MegatronWorker, RoleSpec
from rolemesh.engine.workers.metrics import combine_steps
from rolemesh.engine.workers.weights import give, gives_weights
from rolemesh.kernels import aggregate, kl, loss_denominators
from rolemesh.parallel.micro_batches import MicroBatch
from rolemesh.parallel.weights.plan import canonical_name
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import MegatronSide


@dataclass(frozen=True)
class PolicyLoss:
    """The actor's objective: a policy loss by name, an entropy bonus, a KL term, and how tokens are summed.

    `norm_tokens` is the constant of `seq-mean-token-sum-norm`; None: the width of the responses. `end_ids`
    and `file` as in `AdvantageSpec`.
    """

    name: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    loss_agg: str = "token-mean"
    norm_tokens: int | None = None
    epochs: int = 1
    end_ids: tuple[int, ...] | None = None
    file: str | None = None


class ActorWorker(AdvantageWorker, MegatronWorker):
    """Policy on one rank. `loss` is read by `update_actor` only."""

    def __init__(self, spec: RoleSpec, loss: PolicyLoss) -> None:
        super().__init__(spec)
        self.loss = loss

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto | None:
        """Column `old_log_probs`, fp32 `[b, R]`, under the current weights; 0 outside the response."""

        def score(hidden: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            return {"old_log_probs": self.log_probs(hidden, micro_batch, entropy=False)[0]}

        return self.infer(data, score)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto | None:
        """Column `ref_log_prob`, fp32 `[b, R]`: under the weights that LoRA started from."""

        def score(hidden: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            return {"ref_log_prob": self.log_probs(hidden, micro_batch, entropy=False)[0]}

        if self.spec.lora is None:
            raise RuntimeError("an actor without LoRA is no reference: its first weights are gone")
        with self.model.adapters_off():
            return self.infer(data, score)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto, sizes: Sequence[Sequence[int]] | None = None) -> dict[str, float]:
        """`epochs` passes over the batch; `sizes[dp_rank][k]` rows of a shard belong to mini-batch k.

        Without `sizes` the whole batch is one mini-batch. Returns metrics over the whole batch, equal on
        every rank: `actor/pg_loss`, `actor/pg_clipfrac`, ...
        """
        load_algorithm_file(self.loss.file)
        data = without_truncated(data, self.loss.end_ids)
        columns = ["response_mask", "old_log_probs", "advantages"]
        columns += ["ref_log_prob"] if self.loss.kl_coef else []
        results = self.train_mini_batches(data, sizes, self.loss.epochs, columns, self._loss_of)
        metrics = combine_steps(results, self.model.groups.dp)
        return {f"actor/{name}": value for name, value in metrics.items()}

    def _loss_of(
        self, mini_batch: DataProto
    ) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
        loss, mode, policy_loss = self.loss, self.loss.loss_agg, get_policy_loss_fn(self.loss.name)
        denominators = loss_denominators(
            mini_batch.batch["response_mask"], mode, self.model.groups.dp, norm_tokens=loss.norm_tokens
        )

        def compute(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            c = micro_batch.columns
            mask = c["response_mask"]
            log_prob, entropy = self.log_probs(hidden, micro_batch, entropy=True)
            total, stats = policy_loss(
                old_log_prob=c["old_log_probs"],
                log_prob=log_prob,
                advantages=c["advantages"],
                mask=mask,
                denominators=denominators,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                dual_clip=loss.dual_clip,
                loss_agg=mode,
            )
            entropy_mean = aggregate(entropy, mask, mode, denominators)
            drift = ((log_prob.detach() - c["old_log_probs"]) * mask).abs().max()
            stats = {
                "pg_loss": total.detach(),
                "entropy": entropy_mean.detach(),
                "log_prob_diff_max": drift,
                **stats,
            }
            if loss.entropy_coef:
                total = total - loss.entropy_coef * entropy_mean
            if loss.kl_coef:
                kl_loss = aggregate(kl(log_prob, c["ref_log_prob"], loss.kl_kind), mask, mode, denominators)
                total = total + loss.kl_coef * kl_loss
                stats["kl_loss"] = kl_loss.detach()
            return total, stats

        return compute

    @gives_weights
    def export_weights(self, meeting: Meeting) -> None:
        """Give the weights, under their Hugging Face names, to the ranks that take them: to each its part."""
        model = self.model
        side = MegatronSide(model.shape, model.layout, model.dtype, model.head)
        give(self, meeting, side, self._lend_weights)

    @contextmanager
    def _lend_weights(self) -> Iterator[Mapping[str, Tensor]]:
        with self.model.use("weights"):
            yield {canonical_name(name): tensor.detach() for name, tensor in self.model.weights().items()}
