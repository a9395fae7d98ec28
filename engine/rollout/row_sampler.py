"""A sampler for transformers' `generate` whose draws belong to the row, not to the batch."""

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from rolemesh.engine.rollout.sampling import SamplingOptions


class RowSampler(LogitsProcessor):
    """Chooses each row's next token and leaves only it to `generate`, run greedily.

    `generate` itself draws all rows from one generator, so a row's response would depend on its neighbours.
    Here row i puts `uniforms[i, step]` through its inverse cumulative distribution. `log_probs` collects, per
    step, the chosen token's log-probability [b] under the policy at `temperature`, before top-k and top-p
    take tokens away: that is what the trainer recomputes.
    """

    def __init__(self, options: SamplingOptions, uniforms: Tensor | None) -> None:
        self.temperature = options.temperature
        self.uniforms = uniforms  # [b, max_response_tokens]; None: greedy
        self.truncate = LogitsProcessorList()
        if options.top_k:
            self.truncate.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            self.truncate.append(TopPLogitsWarper(options.top_p))
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [b, v] fp32 logits in; out: 0 at the chosen token and -inf elsewhere."""
        log_probs = (scores / self.temperature).log_softmax(-1)
        if self.uniforms is None:
            chosen = scores.argmax(-1, keepdim=True)
        else:
            kept = self.truncate(input_ids, log_probs)  # type: ignore[arg-type]  # asks for torch.LongTensor
            cumulative = kept.double().softmax(-1).cumsum(-1)
            step = len(self.log_probs)
            threshold = self.uniforms[:, step : step + 1] * cumulative[:, -1:]
            # right=True: the first token whose sum exceeds the threshold, so never one of probability 0.
            chosen = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
