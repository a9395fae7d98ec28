from threading import Thread

import pytest
import torch

from rolemesh.kernels import gae, log_prob_and_entropy
from rolemesh.kernels.forms import form_of, record_kernels

CPU = torch.device("cpu")


def call() -> set[str]:
    with record_kernels() as names:
        gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), 0.9, 0.9)
    return names


def test_the_device_chooses_a_compiled_form():
    assert call() <= {"gae/avx2", "gae/portable"}
    assert len(call()) == 1


@pytest.mark.parametrize("form", ["reference", "portable"])
def test_the_environment_forces_a_form(form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", form)
    assert call() == {f"gae/{form}"}


def test_an_unknown_form_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", "plain")
    with pytest.raises(ValueError, match=r"'plain'.*reference, portable, triton"):
        form_of(CPU)


def test_a_gpu_has_no_portable_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLEMESH_KERNELS", "portable")
    with pytest.raises(ValueError, match=r"not on cuda:0"):
        form_of(torch.device("cuda:0"))


def test_records_nest_and_end():
    with record_kernels() as outer:
        assert call()
    assert outer == set()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_backward_pass_on_a_thread_of_autograd_is_recorded(inplace: bool):
    """A GPU's backward pass runs on such a thread."""
    logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 4])
    with record_kernels() as names:
        log_prob, _ = log_prob_and_entropy(logits * 1, labels, inplace_backward=inplace)
        thread = Thread(target=log_prob.sum().backward)
        thread.start()
        thread.join()
    assert f"log_prob_backward/{form_of(CPU)}" in names


def test_a_backward_pass_inside_of_another_record_belongs_to_it():
    logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 4])
    with record_kernels() as forward:
        log_prob, _ = log_prob_and_entropy(logits, labels)
    with record_kernels() as backward:
        log_prob.sum().backward()
    assert backward == {f"log_prob_backward/{form_of(CPU)}"}
    assert not forward & backward
