"""What one process with transformers computes for a batch: `from hf_reference import ...`."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts and right-padded responses, tokens at random: [b, P + R]; padding is not 0."""

    input_ids: Tensor
    attention_mask: Tensor
    response_width: int

    @property
    def response_mask(self) -> Tensor:  # [b, R]
        return self.attention_mask[:, -self.response_width :]

    @property
    def n_tokens(self) -> int:
        """Response tokens of the whole batch."""
        return int(self.response_mask.sum())

    def take(self, rows: list[int]) -> "Batch":
        return Batch(self.input_ids[rows], self.attention_mask[rows], self.response_width)


def random_batch(rows: int, *, prompt: int = 5, response: int = 8, vocab: int = 100, seed: int = 0) -> Batch:
    """A batch in which the first row is full and the others have any lengths from 1 token on."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocab, (rows, prompt + response), generator=generator)
    n_prompt = torch.randint(1, prompt + 1, (rows,), generator=generator)
    n_response = torch.randint(1, response + 1, (rows,), generator=generator)
    n_prompt[0], n_response[0] = prompt, response
    place = torch.arange(prompt + response)
    mask = (place >= prompt - n_prompt[:, None]) & (place < prompt + n_response[:, None])
    return Batch(input_ids, mask.long(), response)


def row_logits(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Logits [length, v] of each row, computed alone and without padding."""
    rows = zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
    return [model(input_ids=ids[mask][None], use_cache=False).logits[0] for ids, mask in rows]


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each response token [b, R], 0 where none stands."""
    out = torch.zeros(batch.response_mask.shape)
    for row, logits in enumerate(row_logits(model, batch)):
        tokens = batch.input_ids[row][batch.attention_mask[row].bool()]
        n = int(batch.response_mask[row].sum())
        of_response = logits.log_softmax(-1)[-n - 1 : -1].gather(-1, tokens[-n:, None])[:, 0]
        out[row, batch.response_mask[row].bool()] = of_response
    return out


def weights(batch: Batch) -> Tensor:
    """Fixed numbers [b, R] in place of advantages."""
    return torch.linspace(-1, 2, batch.response_mask.numel()).view(batch.response_mask.shape)


def policy_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Weighted negative log-likelihood of the response tokens, averaged over them."""
    return -(log_probs(model, batch) * weights(batch)).sum() / batch.n_tokens


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of `loss` by parameter name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def norm(gradients: dict[str, Tensor]) -> float:
    """Euclidean norm over all of them."""
    return float(torch.cat([gradient.flatten().double() for gradient in gradients.values()]).norm())


def adamw_step(
    model: nn.Module,
    gradients: dict[str, Tensor],
    *,
    lr: float,
    eps: float = 1e-8,
    clip: float | None = None,
    weight_decay: float = 0.0,
) -> nn.Module:
    """A copy of `model` after torch's AdamW has seen the clipped gradients once; vectors do not decay."""
    model = copy.deepcopy(model)
    scale = 1.0 if clip is None else min(1.0, clip / (norm(gradients) + 1e-6))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name] * scale
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=lr, eps=eps).step()
    return model
