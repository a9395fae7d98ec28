import math

import pytest
import torch
from gloo import run_ranks
from golden import match
from measure import peak_tensor_bytes
from ops import each_form
from torch import Tensor

from rolemesh.kernels import linear, linear_log_prob_and_entropy, log_prob_and_entropy


def case(n: int, v: int, h: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + v)
    hidden = torch.randn(n, h, generator=generator)
    weight = torch.randn(v, h, generator=generator) * 3 / math.sqrt(h)
    labels = torch.randint(v, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def results(outputs: tuple[Tensor, Tensor | None], hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """log_prob, entropy and the gradients of a loss that differs by row."""
    log_prob, entropy = outputs
    row = torch.arange(len(log_prob)) + 1.0
    loss = (log_prob * row).sum() + (0 if entropy is None else (entropy / row).sum())
    found = torch.autograd.grad(loss, (hidden, weight))
    return [log_prob.detach(), *([] if entropy is None else [entropy.detach()]), *found]


def truth(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, entropy: bool) -> list[Tensor]:
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    log_prob = log_p.gather(-1, labels[:, None])[:, 0]
    outputs = log_prob, -(log_p.exp() * log_p).sum(-1) if entropy else None
    return results(outputs, hidden, weight)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs of rows, several of columns, the last of each shorter."""
    monkeypatch.setattr(linear, "_CPU_ROWS", 16)
    monkeypatch.setattr(linear, "_SMALL_TILE", 16 * 45)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.usefixtures("form", "small_tiles")
def test_values_and_gradients_equal_float64(temperature: float, entropy: bool):
    hidden, weight, labels = case(50, 301, 24)
    outputs = linear_log_prob_and_entropy(hidden, weight, labels, temperature=temperature, entropy=entropy)
    assert (outputs[1] is None) == (not entropy)
    expected = truth(hidden, weight, labels, temperature, entropy)
    for output, right in zip(results(outputs, hidden, weight), expected, strict=True):
        match(output, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("n", "v"), [(0, 11), (1, 1), (4097, 1000), (3, 32001), (2, 151936)])
def test_any_size(n: int, v: int):
    hidden, weight, labels = case(n, v, 8)
    outputs = linear_log_prob_and_entropy(hidden, weight, labels)
    assert (outputs[0] <= 0).all()
    for output, right in zip(
        results(outputs, hidden, weight), truth(hidden, weight, labels, 1.0, True), strict=True
    ):
        match(output, right, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("form", "small_tiles")
def test_inputs_of_any_strides_give_the_same():
    hidden, weight, labels = case(50, 301, 24)
    expected = results(linear_log_prob_and_entropy(hidden, weight, labels), hidden, weight)
    hidden, weight = (x.detach().T.contiguous().T.requires_grad_() for x in (hidden, weight))
    labels = torch.stack([labels, labels], dim=1)[:, 1]
    assert not any(x.is_contiguous() for x in (hidden, weight, labels))
    found = results(linear_log_prob_and_entropy(hidden, weight, labels), hidden, weight)
    for output, right in zip(found, expected, strict=True):
        match(output, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("form", "small_tiles")
def test_nan_and_forbidden_tokens_are_as_in_whole_logits():
    hidden, weight, labels = case(40, 60, 4)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 1.0, 0.0
        weight[3], hidden[7, 2] = torch.tensor([-math.inf, 0, 0, 0]), math.nan
    labels[labels == 3] = 4
    log_prob, entropy = linear_log_prob_and_entropy(hidden, weight, labels)
    assert log_prob.isnan().tolist() == entropy.isnan().tolist() == [row == 7 for row in range(40)]
    plain = log_prob_and_entropy(hidden @ weight.T, labels)
    for output, right in zip((log_prob, entropy), plain, strict=True):
        match(output, right.detach(), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(log_prob.sum(), weight)
    assert grad[3].isnan().any()
    assert grad[0].isnan().any()


@pytest.mark.usefixtures("form", "small_tiles")
def test_gradients_pass_gradcheck():
    hidden, weight, labels = case(18, 50, 3, torch.float64)

    def call(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_log_prob_and_entropy(hidden, weight, labels % 48, temperature=1.3, vocab_size=48)

    assert torch.autograd.gradcheck(call, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *inputs: call(*inputs)[1], (hidden, weight))


@pytest.mark.usefixtures("form", "small_tiles")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_logits_themselves_give_the_same(dtype: torch.dtype, tolerance: float):
    hidden, weight, labels = case(40, 1000, 64, dtype)
    plain = log_prob_and_entropy(hidden @ weight.T, labels)
    tiled = linear_log_prob_and_entropy(hidden, weight, labels)
    for output, right in zip(results(tiled, hidden, weight), results(plain, hidden, weight), strict=True):
        assert output.dtype == right.dtype
        scale = right.abs().max().clamp(min=1).item()
        match(output / scale, right / scale, rtol=0, atol=tolerance)


def test_bf16_gradients_are_as_near_to_the_truth_as_those_of_whole_logits(small_tiles: None):
    """Sums over many tiles would lose bits if they were kept in bf16."""
    hidden, weight, labels = case(300, 2000, 32, torch.bfloat16)
    expected = truth(hidden, weight, labels, 1.0, True)[2:]

    def errors(outputs: tuple[Tensor, Tensor | None]) -> list[float]:
        found = results(outputs, hidden, weight)[2:]
        return [(g.double() - t).norm().item() for g, t in zip(found, expected, strict=True)]

    tiled = errors(linear_log_prob_and_entropy(hidden, weight, labels))
    plain = errors(log_prob_and_entropy(hidden @ weight.T, labels))
    assert all(a <= 1.1 * b for a, b in zip(tiled, plain, strict=True)), (tiled, plain)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str):
    hidden, weight, labels = case(5, 7, 3)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_log_prob_and_entropy(hidden, weight, labels)[0].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_a_tied_weight_collects_both_of_its_gradients():
    _, weight, labels = case(6, 9, 4)
    ids = torch.tensor([1, 2, 3, 4, 5, 1])

    def grad(tied: bool) -> Tensor:
        log_prob, _ = (
            linear_log_prob_and_entropy(weight[ids], weight, labels)
            if tied
            else log_prob_and_entropy(weight[ids] @ weight.T, labels)
        )
        return torch.autograd.grad(log_prob.sum(), weight)[0]

    match(grad(True), grad(False), rtol=1e-5, atol=1e-5)


def test_padded_rows_of_the_weight_count_for_nothing():
    hidden, weight, labels = case(20, 64, 8)
    with torch.no_grad():
        weight[50:] = 1e3
    padded = results(linear_log_prob_and_entropy(hidden, weight, labels % 50, vocab_size=50), hidden, weight)
    assert not padded[3][50:].any()
    whole = weight.detach()[:50].requires_grad_()
    expected = results(linear_log_prob_and_entropy(hidden, whole, labels % 50), hidden, whole)
    for output, right in zip([*padded[:3], padded[3][:50]], expected, strict=True):
        match(output, right, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_it_compiles_and_has_meta_outputs():
    hidden, weight, labels = case(5, 9, 3)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        log_prob, entropy = linear_log_prob_and_entropy(hidden * 2, weight, labels)
        return log_prob.sum() + entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, right in zip(
        torch.autograd.grad(compiled(hidden, weight), (hidden, weight)),
        torch.autograd.grad(loss(hidden, weight), (hidden, weight)),
        strict=True,
    ):
        match(got, right, rtol=1e-5, atol=1e-6)
    log_prob, entropy = linear_log_prob_and_entropy(*(x.to("meta") for x in (hidden, weight, labels)))
    assert log_prob.device.type == entropy.device.type == "meta"
    assert log_prob.shape == entropy.shape == (5,)
    torch.library.opcheck(
        torch.ops.rolemesh.linear_log_prob_and_entropy, (hidden, weight, labels, 1.0, True, None, 9)
    )


def test_memory_is_a_small_share_of_the_logits():
    hidden, weight, labels = case(2048, 64000, 16)

    def call() -> tuple[Tensor, Tensor]:
        log_prob, entropy = linear_log_prob_and_entropy(hidden, weight, labels)
        return torch.autograd.grad(log_prob.sum() + entropy.sum(), (hidden, weight))

    gradients = 4 * (hidden.numel() + weight.numel())
    assert gradients < peak_tensor_bytes(call) < gradients + 0.05 * 4 * 2048 * 64000


def test_arguments_that_do_not_fit_are_named():
    hidden, weight, labels = case(3, 5, 2)
    with pytest.raises(ValueError, match=r"\[3, 2\], \[5, 1\], \[3\]"):
        linear_log_prob_and_entropy(hidden, weight[:, :1], labels)
    with pytest.raises(ValueError, match=r"float32, weight is torch.bfloat16"):
        linear_log_prob_and_entropy(hidden, weight.bfloat16(), labels)
    with pytest.raises(ValueError, match=r"got torch\.float32 and torch\.int32"):
        linear_log_prob_and_entropy(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="on one device, not on cpu, meta"):
        linear_log_prob_and_entropy(hidden, weight, labels.to("meta"))
    with pytest.raises(ValueError, match=r"such as 5, lie outside of the vocabulary \[0, 5\)"):
        linear_log_prob_and_entropy(hidden, weight, labels.fill_(5))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "width", "vocab_size"),
    [(2, 150, 300), (3, 100, 290), (4, 2, 5)],
    ids=["two ranks", "three ranks, padding", "a shard of padding only"],
)
@pytest.mark.usefixtures("small_tiles")
def test_vocabulary_shards_equal_the_whole(world: int, width: int, vocab_size: int):
    hidden, weight, labels = case(50, world * width, 12)
    labels = labels % vocab_size

    def call(rank: int) -> list[Tensor]:
        mine = hidden.detach().clone().requires_grad_()
        shard = weight.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
        outputs = linear_log_prob_and_entropy(
            mine, shard, labels, temperature=0.8, group=torch.distributed.group.WORLD, vocab_size=vocab_size
        )
        return results(outputs, mine, shard)

    outputs = linear_log_prob_and_entropy(hidden, weight, labels, temperature=0.8, vocab_size=vocab_size)
    whole = results(outputs, hidden, weight)
    by_rank = run_ranks(lambda rank, world: [call(rank) for _ in each_form()], world)
    for ranks in zip(*by_rank, strict=True):
        for rank in ranks:
            for output, right in zip(rank[:3], whole[:3], strict=True):
                match(output, right, rtol=1e-5, atol=1e-4)
            assert all(torch.equal(a, b) for a, b in zip(rank[:3], ranks[0][:3], strict=True))
        match(torch.cat([rank[3] for rank in ranks]), whole[3], rtol=1e-5, atol=1e-4)


@pytest.mark.full
def test_a_process_group_goes_through_the_compiler():
    hidden, weight, labels = case(6, 10, 3)

    def on_rank(rank: int, world: int) -> list[tuple[Tensor, ...]]:
        mine = hidden.detach().clone().requires_grad_()
        shard = weight.detach()[rank * 5 : rank * 5 + 5].clone().requires_grad_()

        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            log_prob, entropy = linear_log_prob_and_entropy(
                hidden * 2, weight, labels % 9, group=torch.distributed.group.WORLD, vocab_size=9
            )
            return (log_prob * 2 + entropy).sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        return [torch.autograd.grad(call(mine, shard, labels), (mine, shard)) for call in (compiled, loss)]

    for compiled, eager in run_ranks(on_rank, 2):
        for got, right in zip(compiled, eager, strict=True):
            match(got, right, rtol=1e-5, atol=1e-6)
