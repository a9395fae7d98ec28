import pytest
import torch

from rolemesh.kernels import labels as module
from rolemesh.kernels.labels import check_labels, raise_bad_labels

CPU = torch.device("cpu")


def test_on_a_cpu_the_first_bad_label_is_named_at_once():
    check_labels(torch.tensor([0, 6]), 7)
    check_labels(torch.tensor([], dtype=torch.int64), 7)
    with pytest.raises(ValueError, match=r"2 labels, such as 7, lie outside of the vocabulary \[0, 7\)"):
        check_labels(torch.tensor([0, 7, -1]), 7)


def note(labels: list[int], vocab_size: int) -> None:
    """As on a GPU: nothing is read."""
    ids = torch.tensor(labels)
    module._note(ids, (ids < 0) | (ids >= vocab_size), vocab_size)


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_met", {})


def test_noted_labels_raise_once_when_they_are_looked_for():
    note([1, 2], 7)
    note([3, 9, -100], 7)
    note([10, 10], 11)
    note([5], 7)
    with pytest.raises(ValueError, match=r"2 labels, such as 9, .* \[0, 7\)"):
        raise_bad_labels(CPU)
    raise_bad_labels(CPU)


def test_good_labels_raise_nothing():
    note([1, 2], 7)
    raise_bad_labels(CPU)


def test_noting_labels_waits_for_nothing():
    """A meta tensor has no values: to look at one, as waiting for a GPU does, is an error."""
    labels = torch.zeros(5, dtype=torch.int64, device="meta")
    check_labels(labels, 7)
    check_labels(labels, 7)


@pytest.mark.gpu
def test_on_a_gpu_the_log_prob_is_nan_and_the_look_raises():
    from rolemesh.kernels import log_prob_and_entropy

    log_prob, _ = log_prob_and_entropy(torch.zeros(2, 8, device="cuda"), torch.tensor([3, 8], device="cuda"))
    assert log_prob.isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="1 labels, such as 8"):
        raise_bad_labels(torch.device("cuda"))
