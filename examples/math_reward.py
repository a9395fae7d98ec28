"""The reward of llama70b.yaml: 1 where the last number of a response is the expected one, else 0."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Numbers are compared as numbers: 1,000.0 is 1000."""
    found = _NUMBER.findall(solution_str)
    wanted = _NUMBER.findall(ground_truth)
    return float(bool(found and wanted) and _value(found[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
