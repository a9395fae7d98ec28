"""Responses near the longest length, and those cut at it."""

import pytest
import torch

from rolemesh.engine.algorithms import SoftOverlong, at_last_token, overlong_penalty, truncated_rows


def test_the_penalty_grows_over_the_buffer():
    """DAPO's equation 13 with a longest length of 10, of which the last 4 are the buffer."""
    found = overlong_penalty(torch.tensor([0, 6, 7, 8, 10]), SoftOverlong(10, 4, penalty=2.0))
    assert found.tolist() == [0, 0, 0.5, 1, 2]


def test_a_buffer_that_does_not_fit_is_an_error():
    for buffer, penalty in ((0, 1.0), (11, 1.0), (4, -1.0)):
        with pytest.raises(ValueError, match="must lie within 1 and max_tokens"):
            SoftOverlong(10, buffer, penalty)


def test_a_rows_number_stands_at_its_last_token():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    placed = at_last_token(torch.tensor([1.0, 2, 3, 4]), mask)
    assert placed.nonzero().tolist() == [[0, 2], [1, 4], [2, 3]]
    assert placed.sum(dim=1).tolist() == [1, 2, 3, 0]


def test_a_response_is_cut_when_it_fills_the_width_without_an_end():
    responses = torch.tensor([[5, 6, 7], [5, 6, 128009], [5, 128008, 0], [5, 6, 7], [0, 0, 0]])
    attention = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]])
    found = truncated_rows(responses, attention, (128001, 128008, 128009))
    assert found.tolist() == [True, False, False, True, False]
    assert truncated_rows(responses[:, :0], attention[:, :0], (1,)).tolist() == [False] * 5
