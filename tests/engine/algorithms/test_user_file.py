"""A user's own estimators and losses."""

import re
from pathlib import Path

import pytest
import torch

from rolemesh.engine.algorithms import (
    advantage_estimator,
    get_policy_loss_fn,
    load_algorithm_file,
)
from rolemesh.engine.user_file import UserFileError
from rolemesh.kernels import LossDenominators
from rolemesh.placement.steps import step_graph

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"

FILE = """
from rolemesh.engine.algorithms import Advantages, register_estimator, register_policy_loss
from rolemesh.kernels import aggregate

@register_estimator("test_user_file_rewards")
def rewards(*, token_level_rewards, response_mask, **_):
    return Advantages(token_level_rewards * response_mask, token_level_rewards)

@register_policy_loss("test_user_file_reinforce")
def reinforce(*, log_prob, advantages, mask, denominators, loss_agg, **_):
    return aggregate(-log_prob * advantages, mask, loss_agg, denominators), {}
"""


def test_a_file_registers_its_names_once(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    for _ in range(2):  # a worker loads it for every operation
        load_algorithm_file(str(file))
    load_algorithm_file(None)
    assert advantage_estimator("test_user_file_rewards").__name__ == "rewards"
    assert get_policy_loss_fn("test_user_file_reinforce").__name__ == "reinforce"


def test_a_file_that_cannot_be_loaded_is_named_with_the_reason(tmp_path: Path):
    with pytest.raises(UserFileError, match=r"no file .*none\.py"):
        load_algorithm_file(str(tmp_path / "none.py"))
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(UserFileError, match="is not a Python file"):
        load_algorithm_file(str(tmp_path / "text.txt"))
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserFileError, match=r"broken\.py failed: ZeroDivisionError"):
        load_algorithm_file(str(tmp_path / "broken.py"))


def test_the_documents_example_runs(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for name in ("plain_rewards", "reinforce", "above_greedy"):  # each is registered once in a process
        example = re.sub(rf"\b{name}\b", f"guide_{name}", example)
    (tmp_path / "my_algo.py").write_text(example)
    load_algorithm_file(str(tmp_path / "my_algo.py"))
    rewards, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])
    result = advantage_estimator("guide_plain_rewards")(
        token_level_rewards=rewards, response_mask=mask, gamma=1.0
    )
    loss, _ = get_policy_loss_fn("guide_reinforce")(
        log_prob=torch.tensor([[-3.0, -5.0]]),
        advantages=result.advantages,
        mask=mask,
        denominators=LossDenominators(1.0, 1.0),
        loss_agg="token-mean",
        clip_low=0.2,
    )
    assert loss.item() == 3.0
    assert (
        "reward_baselines" in step_graph("guide_above_greedy", reward="model", kl_in=None)["advantage"].reads
    )
