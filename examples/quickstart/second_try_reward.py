"""The reward of agent.yaml: how right the last answer is, less a little for a second one."""

from reward import compute_score as right


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """`solution_str` is the whole response: answers, and between them the question; "516" "407>" "518"."""
    last = solution_str.rpartition(">")[2]
    return right(data_source, last, ground_truth) - 0.1 * (extra_info["num_turns"] - 1)
