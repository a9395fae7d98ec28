"""The quickstart's true reward: the fraction of right characters.

A recipe names it `reward: ./quickstart/reward.py:compute_score`. Validation uses it too, to report how
right the answers are whatever model the training asked for its reward.
"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """Characters right at their position, over the length of the longer of answer and truth: 0 to 1."""
    answer = solution_str.strip()
    right = sum(got == want for got, want in zip(answer, ground_truth, strict=False))
    return right / max(len(answer), len(ground_truth), 1)


def only_digits(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """1 for an answer that consists of digits, else 0."""
    return float(solution_str.strip().isdigit())
