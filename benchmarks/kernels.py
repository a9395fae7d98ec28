"""How fast are the kernels, and how much memory do they take?

Each beside torch in eager mode, the usual composition, and torch.compile, all in the same run, taking turns;
times are medians. `x` is how many times longer an alternative takes than the kernel. The limit of the memory
is a plain sum (on a GPU a copy) of the same tensor, in the same run. Memory is the peak beyond the inputs,
results included.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from measure import medians, peak_bytes
from torch import Tensor

from rolemesh.kernels import (
    gae,
    kl,
    linear_log_prob_and_entropy,
    log_prob_and_entropy,
    loss_denominators,
    masked_whiten,
    policy_loss,
)
from rolemesh.kernels.forms import form_of

LIMIT = "memory limit"


@dataclass(frozen=True)
class Case:
    """`calls["kernel"]` and its alternatives. `unit` is what memory is shown as a share of."""

    name: str
    calls: Mapping[str, Callable[[], object]]
    unit_bytes: int
    notes: str = ""


def log_softmax_form(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As one writes it down."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def usual_form(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp + gather, and the entropy from a softmax."""
    log_sum = logits.logsumexp(-1)
    log_prob = logits.gather(-1, labels[:, None])[:, 0] - log_sum
    return log_prob, log_sum - (logits.softmax(-1) * logits).sum(-1)


def log_softmax_only(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def usual_only(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)


def limit(tensor: Tensor) -> Callable[[], object]:
    return tensor.sum if tensor.device.type == "cpu" else tensor.clone


def log_prob_cases(n: int, v: int, dtype: torch.dtype, device: str) -> list[Case]:
    logits = (torch.randn(n, v, device=device) * 3).to(dtype)
    labels = torch.randint(v, (n,), device=device)
    leaf, spent = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.randn(2, n, device=device)

    def backward(
        form: Callable[..., tuple[Tensor, Tensor | None]], leaf: Tensor = leaf, **keywords: bool
    ) -> Callable[[], object]:
        def call() -> object:
            log_prob, entropy = form(leaf, labels, **keywords)
            return torch.autograd.grad((log_prob * weights[0]).sum() + (entropy * weights[1]).sum(), leaf)

        return call

    shape = f"{n} x {v} {str(dtype).removeprefix('torch.')}"
    nbytes = logits.numel() * logits.element_size()
    compiled, compiled_only = torch.compile(log_softmax_form), torch.compile(log_softmax_only)
    return [
        Case(
            f"log_prob_and_entropy, {shape}",
            {
                "kernel": lambda: log_prob_and_entropy(logits, labels),
                "log_softmax + gather + entropy": lambda: log_softmax_form(logits, labels),
                "logsumexp + gather + softmax entropy": lambda: usual_form(logits, labels),
                "torch.compile": lambda: compiled(logits, labels),
                LIMIT: limit(logits),
            },
            nbytes,
        ),
        Case(
            f"log_prob alone, {shape}",
            {
                "kernel": lambda: log_prob_and_entropy(logits, labels, entropy=False),
                "log_softmax + gather": lambda: log_softmax_only(logits, labels),
                "logsumexp + gather": lambda: usual_only(logits, labels),
                "torch.compile": lambda: compiled_only(logits, labels),
                LIMIT: limit(logits),
            },
            nbytes,
        ),
        Case(
            f"log_prob_and_entropy forward + backward, {shape}",
            {
                "kernel": backward(log_prob_and_entropy),
                # What it overwrites from the second call on is a gradient: as many numbers, all finite.
                "kernel, gradient in place": backward(log_prob_and_entropy, spent, inplace_backward=True),
                "log_softmax + gather + entropy": backward(log_softmax_form),
                "logsumexp + gather + softmax entropy": backward(usual_form),
                "torch.compile": backward(compiled),
                LIMIT: limit(logits),
            },
            nbytes,
        ),
    ]


def linear_case(n: int, h: int, v: int, dtype: torch.dtype, device: str) -> Case:
    hidden = torch.randn(n, h, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device=device) * 3 / math.sqrt(h)).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,), device=device)
    weights = torch.randn(2, n, device=device)

    def step(form: Callable[[], tuple[Tensor, Tensor | None]]) -> Callable[[], object]:
        def call() -> object:
            log_prob, entropy = form()
            loss = (log_prob * weights[0]).sum() + (entropy * weights[1]).sum()
            return torch.autograd.grad(loss, (hidden, weight))

        return call

    @torch.no_grad()
    def products(again: int) -> object:
        """What a linear layer multiplies: forward (and again in the backward pass), both gradients."""
        for _ in range(1 + again):
            logits = hidden @ weight.T
        return logits @ weight, logits.T @ hidden

    compiled = torch.compile(lambda: log_softmax_form(hidden @ weight.T, labels))
    nbytes = n * v * hidden.element_size()
    gradients = n * h + v * h
    shape = f"{n} x {h} x {v} {str(dtype).removeprefix('torch.')}"
    return Case(
        f"linear_log_prob_and_entropy forward + backward, {shape}",
        {
            "kernel": step(lambda: linear_log_prob_and_entropy(hidden, weight, labels)),
            "its four matrix products alone": lambda: products(1),
            "three matrix products alone": lambda: products(0),
            "whole logits + log_prob_and_entropy": step(
                lambda: log_prob_and_entropy(hidden @ weight.T, labels)
            ),
            "whole logits + log_softmax": step(lambda: log_softmax_form(hidden @ weight.T, labels)),
            "torch.compile": step(compiled),
        },
        nbytes,
        f"the gradients of hidden and weight are {gradients / (n * v):.1%} of the logits in every form",
    )


def loop_over_time(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE as trainers write it: a Python loop over time, vectorised over rows."""
    running = next_value = torch.zeros(len(values), device=values.device)
    columns = []
    for t in reversed(range(values.shape[1])):
        next_value, running = one_step(
            rewards[:, t], values[:, t], mask[:, t], next_value, running, gamma, lam
        )
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask


def one_step(
    reward: Tensor, value: Tensor, keep: Tensor, next_value: Tensor, running: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    new = reward + gamma * next_value - value + gamma * lam * running
    return torch.where(keep, value, next_value), torch.where(keep, new, running)


def row_cases(b: int, r: int, device: str) -> list[Case]:
    """Operations on [b, r] columns."""
    old, new, ref, advantages, values, rewards = torch.randn(6, b, r, device=device) * 0.1
    mask = torch.rand(b, r, device=device) < 0.8
    leaf = new.clone().requires_grad_()
    denominators = loss_denominators(mask, "token-mean")

    def plain_loss() -> object:
        ratio = (leaf - old).exp()
        clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        bounded = torch.where(advantages < 0, torch.minimum(clipped, -advantages * 3), clipped)
        metrics = [(part * mask).sum() / mask.sum() for part in (ratio.detach() > 1.2, (old - leaf).detach())]
        return torch.autograd.grad((bounded * mask).sum() / mask.sum(), leaf), metrics

    def fused_loss() -> object:
        loss, metrics = policy_loss(old, leaf, advantages, mask, denominators=denominators)
        return torch.autograd.grad(loss, leaf), metrics

    def plain_whiten() -> Tensor:
        mean = (values * mask).sum() / mask.sum()
        var = ((values - mean).square() * mask).sum() / (mask.sum() - 1)
        return (values - mean) * torch.rsqrt(var + 1e-8) * mask

    def plain_kl() -> Tensor:
        r = (ref - old).clamp(-20, 20)
        return (r.exp() - r - 1).clamp(max=10)

    step = torch.compile(one_step)

    def compiled_loop() -> Tensor:
        running = next_value = torch.zeros(b, device=device)
        for t in reversed(range(r)):
            next_value, running = step(
                rewards[:, t], values[:, t], mask[:, t], next_value, running, 0.99, 0.95
            )
        return running

    nbytes = old.numel() * old.element_size()
    named = f"{b} x {r} float32"
    return [
        Case(
            f"gae, {named}",
            {
                "kernel": lambda: gae(rewards, values, mask, 0.99, 0.95),
                "loop over time, vectorised over rows": lambda: loop_over_time(
                    rewards, values, mask, 0.99, 0.95
                ),
                "torch.compile of the loop's body": compiled_loop,
                LIMIT: limit(values),
            },
            nbytes,
        ),
        Case(
            f"policy_loss forward + backward, {named}",
            {
                "kernel": fused_loss,
                "plain torch": plain_loss,
                "torch.compile": torch.compile(plain_loss),
                LIMIT: limit(values),
            },
            nbytes,
        ),
        Case(
            f"masked_whiten, {named}",
            {
                "kernel": lambda: masked_whiten(values, mask),
                "plain torch": plain_whiten,
                "torch.compile": torch.compile(plain_whiten),
                LIMIT: limit(values),
            },
            nbytes,
        ),
        Case(
            f"kl (k3), {named}",
            {
                "kernel": lambda: kl(old, ref, "k3"),
                "plain torch": plain_kl,
                "torch.compile": torch.compile(plain_kl),
                LIMIT: limit(values),
            },
            nbytes,
        ),
    ]


def report(case: Case, args: argparse.Namespace) -> None:
    """Print one table: milliseconds, times the kernel's, memory as a share of the case's unit."""
    device = args.device
    calls = {name: call for name, call in case.calls.items() if not (args.small and "compile" in name)}
    seconds = medians(calls, args.repeats, device)
    ours = seconds["kernel"]
    print(f"\n### {case.name}\n")
    print("| form | ms | x | memory |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        share = "" if name == LIMIT else f"{peak_bytes(case.calls[name], device) / case.unit_bytes:.1%}"
        print(f"| {name} | {taken * 1e3:.3g} | {taken / ours:.2f} | {share} |", flush=True)
    if LIMIT in seconds:
        print(f"\nThe kernel reads at {seconds[LIMIT] / ours:.2f} of the memory limit.")
    if case.notes:
        print(f"\n({case.notes}.)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: torch's choice")
    parser.add_argument("--small", action="store_true", help="small shapes, without torch.compile")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    print(f"device {args.device}, form {form_of(torch.device(args.device))}", end="")
    print(
        f", {torch.get_num_threads()} threads" if args.device == "cpu" else "", f", torch {torch.__version__}"
    )
    sizes = [(512, 32000), (256, 151936)] if args.device == "cpu" else [(4096, 32000), (4096, 151936)]
    linear, rows = (512, 1024, 32000) if args.device == "cpu" else (8192, 4096, 151936), (1024, 1024)
    if args.small:
        sizes, linear, rows = [(16, 1000)], (16, 32, 1000), (16, 32)
    for n, v in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            for case in log_prob_cases(n, v, dtype, args.device):
                report(case, args)
    linear_type = torch.float32 if args.device == "cpu" else torch.bfloat16
    report(linear_case(*linear, linear_type, args.device), args)
    for case in row_cases(*rows, args.device):
        report(case, args)


if __name__ == "__main__":
    main()
