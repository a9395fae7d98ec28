"""What docs/remote.md says of judges."""

import re
from pathlib import Path

import pytest
import yaml

from rolemesh.engine.rewards.judge_answer import AnswerError, Scale, read_scores
from rolemesh.launch.config import parse_recipe

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "remote.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("### How an answer is read") : DOCUMENT.index("### Cache")]


def rows() -> list[tuple[list[str], str]]:
    """The texts in the first column, and the second, of the table of answers."""
    table = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]
    start = table.index(["answer", "score"])
    found = [(re.findall(r"`([^`]+)`", texts), outcome) for texts, outcome in table[start + 1 :]]
    return [(texts, outcome) for texts, outcome in found if outcome.startswith(("0.", "failure"))]


@pytest.mark.parametrize(("texts", "outcome"), rows(), ids=lambda value: str(value)[:30])
def test_answers_are_read_as_the_table_says(texts, outcome):
    for text in texts:
        if outcome.startswith("failure"):
            with pytest.raises(AnswerError):
                read_scores(text, ("score",), Scale(0, 1))
        else:
            expected = float(re.match(r"[\d.]+", outcome)[0])
            assert read_scores(text, ("score",), Scale(0, 1)) == {"score": expected}


def test_the_table_is_there():
    assert sum(len(texts) for texts, _ in rows()) > 15


@pytest.mark.parametrize("block", re.findall(r"```yaml reward\n(.*?)```", DOCUMENT, re.DOTALL))
def test_reward_sections_are_recipes(block):
    recipe = yaml.safe_load((ROOT / "examples" / "judge.yaml").read_text()) | yaml.safe_load(block)
    parse_recipe(yaml.safe_dump(recipe), ROOT / "examples")
