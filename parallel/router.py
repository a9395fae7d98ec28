"""The router of a mixture of experts, with transformers' arithmetic, and the loss that balances its load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolemesh.placement.model import Experts


class TopKRouter(nn.Module):
    """Sends each token to its experts; it stands in the place of megatron-core's class of this name.

    That one chooses among groups of experts otherwise than some families do, and keeps its losses in a
    process-wide table. Scores are fp32 whatever the model's dtype.

    In training the micro-batch's load-balancing loss (Switch Transformer, arXiv 2101.03961; 1 where the load
    is even) is added to the loss, times `loss_weight`: n experts x sum over experts of (share of the choices)
    x (mean score), over the micro-batch's tokens without padding, whichever ranks have them.

    Attributes:
        weight: [n, h], the same on every rank; its gradient is summed over tp.
        expert_bias: [n] fp32, where the family has one; never trained.
        loss_weight: per token of a micro-batch; set it before a training pass.
        loss_sum: this rank's part of sum over micro-batches of tokens x loss, for the passes since it was set
            to None.
    """

    def __init__(
        self, experts: Experts, *, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.experts, self.group = experts, pg_collection.tp_cp
        self.weight = nn.Parameter(torch.empty(experts.n, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if experts.router.bias:
            self.register_buffer("expert_bias", torch.zeros(experts.n, dtype=torch.float32))
        self.loss_weight = 0.0
        self.loss_sum: Tensor | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Called by megatron-core's layer."""

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden [s, b, h] of this rank's tokens to weights [s * b, n] fp32 and choices [s * b, n] bool.

        `padding_mask` [s, b] is True where no token stands.
        """
        rule, n = self.experts.router, self.experts.n
        outputs = F.linear(hidden.float(), self.weight.float()).view(-1, n)
        scores = outputs.softmax(dim=-1) if rule.score == "softmax" else outputs.sigmoid()
        choice = self._choose(scores.detach())
        weights = scores.gather(1, choice)
        if rule.norm:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, choice, True)
        weights = torch.zeros_like(scores).scatter(1, choice, weights * rule.scale)
        if self.training and self.loss_weight and torch.is_grad_enabled():
            real = None if padding_mask is None else ~padding_mask.reshape(-1, 1)
            weights = self._balanced(weights, scores, chosen, real)
        return weights, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """Each token's experts [tokens, k], by scores [tokens, n]."""
        rule = self.experts.router
        if rule.bias:
            scores = scores + self.get_buffer("expert_bias")
        if rule.n_groups > 1:
            grouped = scores.unflatten(-1, (rule.n_groups, -1))
            worth = grouped.topk(rule.group_best, dim=-1)[0].sum(dim=-1)
            best = worth.topk(rule.top_groups, dim=-1, sorted=False)[1]
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(self.experts.top_k, dim=-1, sorted=False)[1]

    def _balanced(self, weights: Tensor, scores: Tensor, chosen: Tensor, real: Tensor | None) -> Tensor:
        """The weights, which carry the loss: tokens x loss of the micro-batch x `loss_weight`."""
        if self.experts.router.score == "sigmoid":
            scores = scores / scores.sum(dim=-1, keepdim=True)
        if real is not None:
            scores, chosen = scores * real, chosen & real
        n_tokens = scores.new_tensor([len(scores)]) if real is None else real.sum()[None].float()
        counts = torch.cat([chosen.sum(dim=0).float(), n_tokens])
        dist.all_reduce(counts, group=self.group)
        scale = self.experts.n / (self.experts.top_k * counts[-1].clamp(min=1))
        loss = scale * (counts[:-1] * scores.sum(dim=0)).sum()  # x tokens; of this rank's tokens
        self.loss_sum = loss.detach() + (0 if self.loss_sum is None else self.loss_sum)
        return _WithLoss.apply(weights, loss * self.loss_weight)


class _WithLoss(torch.autograd.Function):
    """The first tensor as it is; backward also goes into the second, a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def routers(module: nn.Module) -> Iterator[TopKRouter]:
    """The routers inside of a module."""
    return (part for part in module.modules() if isinstance(part, TopKRouter))
