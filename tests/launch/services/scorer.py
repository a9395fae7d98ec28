"""Scoring functions that the tests serve."""

import os
import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Length of the response and what was passed; a first word of `sleep`, `loop`, `die`, `fail` or `nan`
    does what it says. `touch FILE` is done before it sleeps 2 s, and `loop FILE` before it loops."""
    word, _, rest = solution_str.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "touch":
        Path(rest).touch()
        time.sleep(2)
    elif word == "loop":
        if rest:
            Path(rest).touch()
        while True:
            pass
    elif word == "die":
        os._exit(3)
    elif word == "fail":
        raise ValueError("this sample is bad")
    elif word == "nan":
        return float("nan")
    return {"score": len(solution_str), "truth": ground_truth, "prompt": extra_info["prompt_str"]}
