import math

import pytest
import torch
from gloo import run_ranks
from golden import golden_cases, match, run_case
from measure import peak_bytes
from ops import each_form
from torch import Tensor

from rolemesh.kernels import log_prob_and_entropy


def truth(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], torch.special.entr(log_p.exp()).sum(-1)


def case(n: int, v: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, v, generator=generator) * scale
    return logits, torch.randint(v, (n,), generator=generator)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("golden", golden_cases("logprobs_from_logits"))
def test_log_probs_equal_the_golden_cases(golden: dict):
    def call(logits: Tensor, labels: Tensor, need_grad: bool) -> dict[str, Tensor]:
        leaf = logits.requires_grad_(need_grad)
        rows, ids = leaf.reshape(-1, leaf.shape[-1]), labels.reshape(-1)
        log_prob, _ = log_prob_and_entropy(rows, ids, entropy=False)
        outputs = {"logprobs": log_prob.view(labels.shape)}
        if need_grad:
            outputs["grad"] = torch.autograd.grad(log_prob.sum(), leaf)[0]
        return outputs

    run_case("logprobs_from_logits", golden, call)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("n", "v"), [(1, 1), (5, 7), (3, 1000), (40, 32001), (2, 151936), (0, 11)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_equal_a_float64_log_softmax(n: int, v: int, temperature: float):
    logits, labels = case(n, v)
    for output, expected in zip(
        log_prob_and_entropy(logits, labels, temperature=temperature),
        truth(logits, labels, temperature),
        strict=True,
    ):
        assert output.dtype == torch.float32
        match(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("vocab_size", [9, 7])
def test_gradients_of_both_outputs_pass_gradcheck(vocab_size: int):
    logits, labels = case(4, 9, scale=1.0)
    labels = labels % vocab_size
    logits = logits.double().requires_grad_()

    def call(logits: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob_and_entropy(logits, labels, temperature=1.3, vocab_size=vocab_size)

    assert torch.autograd.gradcheck(call, (logits,))
    assert torch.autograd.gradcheck(lambda x: call(x)[0], (logits,))
    assert torch.autograd.gradcheck(lambda x: call(x)[1], (logits,))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("n", [1, 4097])
def test_a_large_offset_never_gives_a_positive_log_prob(dtype: torch.dtype, tolerance: float, n: int):
    hidden, weight = case(n, 64)[0].to(dtype), case(1000, 64, seed=1, scale=0.1)[0].to(dtype)
    logits, labels = hidden @ weight.T + 200, case(n, 1000)[1]
    log_prob, entropy = log_prob_and_entropy(logits, labels)
    assert (log_prob <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= math.log(1000) + 1e-6).all()
    for output, expected in zip((log_prob, entropy), truth(logits, labels), strict=True):
        match(output, expected, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("form")
def test_forbidden_tokens_leave_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [1.0, -math.inf, -math.inf]], requires_grad=True)
    log_prob, entropy = log_prob_and_entropy(logits, torch.tensor([0, 0]))
    match(log_prob, torch.tensor([-math.log(2), 0]), rtol=0, atol=1e-6)
    match(entropy, torch.tensor([math.log(2), 0]), rtol=0, atol=1e-6)
    (log_prob + entropy).sum().backward()
    match(logits.grad, torch.tensor([[0.5, 0, -0.5], [0, 0, 0]]), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("form")
def test_nan_stays_visible_in_its_row_only():
    for column in (0, 1, 20, 32):  # a whole vector's place and the rest's
        logits = torch.zeros(2, 33)
        logits[0, column] = math.nan
        log_prob, entropy = log_prob_and_entropy(logits.requires_grad_(), torch.tensor([0, 0]))
        assert log_prob.isnan().tolist() == entropy.isnan().tolist() == [True, False]
        grad = torch.autograd.grad(log_prob.sum(), logits)[0]
        assert grad.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_logits_of_ten_thousand_are_exact(dtype: torch.dtype):
    logits, labels = case(9, 3001)
    logits = logits.to(dtype) + 1e4 * torch.tensor([1.0, -1.0, 0.0]).repeat(3)[:, None].to(dtype)
    leaf = logits.requires_grad_()
    right = leaf.detach().double().requires_grad_()
    outputs, expected = log_prob_and_entropy(leaf, labels, temperature=0.9), truth(right, labels, 0.9)
    for output, truly in zip(outputs, expected, strict=True):
        match(output, truly, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaf)[0]
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].sum(), right)[0]
    match(got, wanted, rtol=torch.finfo(dtype).eps * 2 + 1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
def test_a_maximum_that_rises_along_the_row_is_found():
    """Sums are kept against a reference that must follow the largest logit, by whatever steps it rises."""
    step = torch.tensor([0.001, 0.1, 1.0, 40.0])[:, None]
    logits = torch.arange(5000.0) * step
    logits = torch.cat([logits, logits.flip(1)])
    labels = torch.tensor([4999] * 4 + [0] * 4)
    for output, expected in zip(log_prob_and_entropy(logits, labels), truth(logits, labels), strict=True):
        match(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
def test_a_padded_column_takes_no_probability():
    logits = torch.tensor([[-1.0, -2.0, -3.0, 0.0]], requires_grad=True)
    log_prob, _ = log_prob_and_entropy(logits, torch.tensor([0]), vocab_size=3)
    assert log_prob.item() == pytest.approx(-0.40761, abs=1e-5)
    log_prob.sum().backward()
    assert logits.grad[0, 3] == 0


@pytest.mark.usefixtures("form")
def test_rows_of_any_strides_give_the_same():
    logits, labels = case(6, 33)
    for other in (logits.T.contiguous().T, torch.stack([logits, logits], -1)[..., 1]):
        assert not other.is_contiguous()
        for output, expected in zip(
            log_prob_and_entropy(other, labels), log_prob_and_entropy(logits, labels), strict=True
        ):
            match(output, expected, rtol=0, atol=1e-6)


def test_extra_memory_is_under_one_percent_of_the_logits():
    logits, labels = case(1024, 32000)
    logits.requires_grad_()
    nbytes = 4 * logits.numel()

    def forward() -> tuple[Tensor, ...]:
        return log_prob_and_entropy(logits, labels)

    def backward() -> None:
        torch.autograd.grad(sum(output.sum() for output in forward()), logits)

    def inplace() -> None:
        outputs = log_prob_and_entropy(logits, labels, inplace_backward=True)
        torch.autograd.grad(sum(output.sum() for output in outputs), logits)

    backward()  # what libraries keep from their first call is not ours
    assert peak_bytes(forward) < 0.01 * nbytes
    assert 0.95 * nbytes < peak_bytes(backward) < 1.01 * nbytes
    assert peak_bytes(inplace) < 0.01 * nbytes


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_place_equals_one_aside(dtype: torch.dtype):
    logits, labels = case(6, 33)
    leaf = logits.to(dtype).requires_grad_()

    def grad(inplace: bool) -> Tensor:
        rows = leaf * 2
        log_prob, entropy = log_prob_and_entropy(
            rows, labels % 30, temperature=0.7, vocab_size=30, inplace_backward=inplace
        )
        loss = log_prob.sum() * 2 + entropy.sum()
        found = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        if inplace:
            match(rows, found / 2, rtol=0, atol=0)
            with pytest.raises(RuntimeError, match="second backward pass"):
                torch.autograd.grad(loss, leaf)
        return found

    match(grad(True), grad(False), rtol=0, atol=0)


def test_who_else_needs_the_overwritten_logits_is_told():
    logits, labels = case(6, 33)
    rows = logits.requires_grad_() * 1
    loss = rows.square().sum()  # its backward pass comes second and reads the rows
    log_prob, _ = log_prob_and_entropy(rows, labels, inplace_backward=True)
    torch.autograd.grad(log_prob.sum(), rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_that_share_memory_are_not_written_in_place():
    with pytest.raises(ValueError, match=r"\[4, 7\] of strides \(0, 1\)"):
        log_prob_and_entropy(
            torch.zeros(7).expand(4, 7), torch.zeros(4, dtype=torch.int64), inplace_backward=True
        )


@pytest.mark.full
def test_it_compiles_but_not_in_place():
    logits, labels = case(5, 9)
    logits.requires_grad_()

    def loss(logits: Tensor, inplace: bool) -> Tensor:
        log_prob, entropy = log_prob_and_entropy(logits * 2, labels, inplace_backward=inplace)
        return log_prob.sum() + entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, right = (torch.autograd.grad(call(logits, False), logits)[0] for call in (compiled, loss))
    match(got, right, rtol=1e-6, atol=1e-6)
    for fullgraph in (True, False):
        with pytest.raises(RuntimeError, match="inplace_backward is for eager mode"):
            torch.compile(loss, fullgraph=fullgraph, backend="aot_eager")(logits, True)


def test_it_is_a_torch_operation_with_meta_outputs():
    logits, labels = case(5, 9)
    logits.requires_grad_()
    torch.library.opcheck(torch.ops.rolemesh.log_prob_and_entropy, (logits, labels, 0.7, True, None, 8))
    log_prob, entropy = log_prob_and_entropy(logits.to("meta"), labels.to("meta"))
    assert log_prob.device.type == entropy.device.type == "meta"
    assert log_prob.shape == entropy.shape == (5,)


@pytest.mark.parametrize("label", [-1, 7, 8, -100])
def test_a_label_outside_of_the_vocabulary_is_an_error(label: int):
    with pytest.raises(ValueError, match=rf"{label}.*outside of the vocabulary \[0, 7\)"):
        log_prob_and_entropy(torch.zeros(2, 8), torch.tensor([label, label]), vocab_size=7)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\[2, 3, 8\]"):
        log_prob_and_entropy(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64))
    for temperature in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            log_prob_and_entropy(
                torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), temperature=temperature
            )
    with pytest.raises(ValueError, match="vocab_size is 9"):
        log_prob_and_entropy(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), vocab_size=9)


@pytest.mark.usefixtures("form")
def test_types_and_devices_that_do_not_fit_are_named():
    logits, labels = case(2, 8)
    for wrong in (torch.int32, torch.float32):
        with pytest.raises(ValueError, match=f"int64 labels, got torch.float32 and {wrong}"):
            log_prob_and_entropy(logits, labels.to(wrong))
    with pytest.raises(ValueError, match=r"a float type and int64 labels, got torch\.int64"):
        log_prob_and_entropy(logits.long(), labels)
    for pair in ((logits, labels.to("meta")), (logits.to("meta"), labels)):
        with pytest.raises(ValueError, match="on one device, not on cpu, meta"):
            log_prob_and_entropy(*pair)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "width", "vocab_size"),
    [(2, 500, 1000), (3, 7, 21), (2, 12, 20), (4, 2, 5)],
    ids=["two ranks", "three ranks", "padding in the last shard", "a shard of padding only"],
)
def test_vocabulary_shards_equal_the_whole(world: int, width: int, vocab_size: int):
    logits, labels = case(50, world * width)
    logits[:, vocab_size:] = 0
    logits[7, : min(width, vocab_size)] = -math.inf  # one rank may hold nothing possible of a row
    labels = labels % vocab_size
    labels[7] = width

    def compute(shard: Tensor, group: object) -> list[Tensor]:
        shard = shard.clone().requires_grad_()
        log_prob, entropy = log_prob_and_entropy(
            shard, labels, temperature=0.8, group=group, vocab_size=vocab_size
        )
        grad = torch.autograd.grad((log_prob * 2 + entropy).sum(), shard)[0]
        return [log_prob.detach(), entropy.detach(), grad]

    def on_rank(rank: int, world: int) -> list[list[Tensor]]:
        shard = logits[:, rank * width : (rank + 1) * width]
        return [compute(shard, torch.distributed.group.WORLD) for _ in each_form()]

    whole = compute(logits, None)
    for ranks in zip(*run_ranks(on_rank, world), strict=True):
        for log_prob, entropy, _ in ranks:
            match(log_prob, whole[0], rtol=1e-5, atol=1e-6)
            match(entropy, whole[1], rtol=1e-5, atol=1e-6)
            assert torch.equal(log_prob, ranks[0][0])
        match(torch.cat([grad for _, _, grad in ranks], dim=1), whole[2], rtol=1e-5, atol=1e-6)
    for output, expected in zip(whole, truth(logits[:, :vocab_size], labels, 0.8), strict=False):
        match(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_a_zero_row_call_takes_part():
    def on_rank(rank: int, world: int) -> Tensor:
        return log_prob_and_entropy(
            torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), group=torch.distributed.group.WORLD
        )[0]

    assert [len(output) for output in run_ranks(on_rank, 2)] == [0, 0]


@pytest.mark.full
def test_a_process_group_goes_through_the_compiler():
    logits, labels = case(6, 10)

    def on_rank(rank: int, world: int) -> list[Tensor]:
        shard = logits[:, rank * 5 : rank * 5 + 5].clone().requires_grad_()

        def loss(shard: Tensor, labels: Tensor) -> Tensor:
            log_prob, entropy = log_prob_and_entropy(
                shard * 2, labels % 9, group=torch.distributed.group.WORLD, vocab_size=9
            )
            return (log_prob * 2 + entropy).sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        meta = log_prob_and_entropy(shard.to("meta"), labels.to("meta"), group=torch.distributed.group.WORLD)
        assert [output.is_meta for output in meta] == [True, True]
        return [torch.autograd.grad(call(shard, labels), shard)[0] for call in (compiled, loss)]

    for got, right in run_ranks(on_rank, 2):
        match(got, right, rtol=1e-6, atol=1e-6)
