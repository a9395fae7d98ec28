"""An agent for the quickstart's task: after a wrong answer it puts the question once more.

rollout: {agent: quickstart/second_try.py:SecondTry}
"""

from collections.abc import Mapping
from typing import Any


class SecondTry:
    """One conversation: it begins with a question such as "4079>"."""

    def __init__(self, row: Mapping[str, Any], tokenizer: Any) -> None:
        self.question = row["raw_prompt"]
        self.truth = row["reward_model"]["ground_truth"]

    def step(self, token_ids: list[int], text: str) -> str | None:
        """What the model reads after its answer `text`; None: the conversation is over."""
        return None if text == self.truth else self.question
