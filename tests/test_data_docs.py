"""The recipe in docs/data.md is one, and its tables name every logger."""

import re
from pathlib import Path

from rolemesh.engine.loggers import LOGGERS
from rolemesh.launch.config import parse_recipe

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


def test_the_documents_recipe_is_read():
    (block,) = re.findall(r"```yaml data\n(.*?)```", TEXT, re.DOTALL)
    rest = "algorithm: grpo\nbatch: {samples_per_prompt: 2}\nactor: policy\nreward: reward.py:compute_score\n"
    recipe = parse_recipe(block + rest, Path("/x"))
    assert recipe.data.train_files[1] == "/x/data/math/train-*.parquet"
    assert recipe.data.weights == {"math": 2.0, "deepscaler": 0.5}


def test_every_logger_has_its_line():
    assert re.findall(r"^\| `(\w+)` \| ", TEXT, re.MULTILINE) == list(LOGGERS)
