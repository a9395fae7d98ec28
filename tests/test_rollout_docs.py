"""The recipe sections of docs/rollout.md can be read; its commands run in launch/test_vllm_run.py."""

import re
from pathlib import Path

import yaml

from rolemesh.launch.config import parse_recipe

TEXT = (Path(__file__).parents[1] / "docs" / "rollout.md").read_text()
REST = {
    "data": "train.jsonl",
    "algorithm": "grpo",
    "batch": {"samples_per_prompt": 2},
    "actor": "policy",
    "reward": "reward.py:compute_score",
}


def test_the_sections_that_are_shown_can_be_read_and_name_the_defaults():
    short, full = (yaml.safe_load(text) for text in re.findall(r"```yaml rollout\n(.*?)```", TEXT, re.DOTALL))
    default, given = (parse_recipe(yaml.safe_dump(REST | section), Path("/")) for section in (short, full))
    for name in ("max_batch_tokens", "max_seqs", "eager", "engine_restarts", "partial_share"):
        assert getattr(default.rollout, name) == getattr(given.rollout, name), name
    assert default.algorithm.rollout_correction.weights == "none"
    assert given.algorithm.rollout_correction.weights == "token"


def test_the_section_with_an_agent_can_be_read():
    (text,) = re.findall(r"```yaml agent\n(.*?)```", TEXT, re.DOTALL)
    rollout = parse_recipe(yaml.safe_dump(REST | yaml.safe_load(text)), Path("/here")).rollout
    assert (rollout.agent, rollout.agent_turns) == ("/here/my_agent.py:Calculator", 4)
    default = parse_recipe(yaml.safe_dump(REST | {"rollout": {"agent": "a.py:A"}}), Path("/")).rollout
    assert default.agent_timeout_s == rollout.agent_timeout_s


def test_the_example_with_an_agent_can_be_read():
    folder = Path(__file__).parents[1] / "examples"
    recipe = parse_recipe((folder / "agent.yaml").read_text(), folder)
    assert Path(recipe.rollout.agent.rpartition(":")[0]).is_file()
