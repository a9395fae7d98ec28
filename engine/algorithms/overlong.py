"""Responses that are too long: DAPO's soft penalty (Yu et al. 2025, eq. 13), and rows cut off at the end."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftOverlong:
    """A penalty that grows over the last `buffer_tokens` before `max_tokens`, from 0 to `penalty`.

    ValueError when the buffer is not within 1..max_tokens, or the penalty below 0.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.buffer_tokens <= self.max_tokens or self.penalty < 0:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens} and penalty {self.penalty}: the buffer must lie "
                f"within 1 and max_tokens ({self.max_tokens}), the penalty at 0 or above"
            )


def overlong_penalty(lengths: Tensor, overlong: SoftOverlong) -> Tensor:
    """What is taken from the reward of responses of `lengths` [b] tokens: fp32 [b], from 0 to `penalty`."""
    excess = lengths.float() - (overlong.max_tokens - overlong.buffer_tokens)
    return (excess / overlong.buffer_tokens).clamp(min=0.0) * overlong.penalty


def at_last_token(per_row: Tensor, response_mask: Tensor) -> Tensor:
    """Each row's number [b] at its last token under the mask, [b, R]; a row without tokens has no place."""
    mask = response_mask.bool()
    after = mask.flip(1).cumsum(dim=1).flip(1)  # how many tokens are left, this one included
    return torch.where(mask & (after == 1), per_row[:, None], 0.0)


def truncated_rows(responses: Tensor, response_attention: Tensor, end_ids: tuple[int, ...]) -> Tensor:
    """Rows [b] bool whose response fills all R columns and does not end with one of `end_ids`.

    `responses` are ids [b, R], `response_attention` [b, R] is 1 where one stands, tool turns included.
    """
    if responses.shape[1] == 0:
        return responses.new_zeros(len(responses), dtype=torch.bool)
    last = responses[:, -1]
    return response_attention[:, -1].bool() & ~torch.isin(last, last.new_tensor(end_ids))
