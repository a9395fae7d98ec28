"""Tokens of services in files: read, refused, told of where others may read them, and printed nowhere."""

import os
from pathlib import Path

import pytest

from rolemesh.engine.loggers.secrets import MORE, hide, without_secrets
from rolemesh.launch import tokens
from rolemesh.launch.config import parse_recipe, to_yaml
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.reward_keys import Reward

SECRET = "q1w2e3r4t5z6"
RECIPE = """
data: train.jsonl
algorithm: {name: grpo, kl: {in: loss}}
batch: {samples_per_prompt: 2}
actor: policy
ref: {kind: remote, endpoints: "http://ref:1", token_file: ref.token}
reward: {kind: remote, endpoints: "http://rm:1", token_file: rm.token, on_failure: raise}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rm.token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_a_recipe_names_files_and_its_stored_copy_holds_their_paths_alone(file):
    file.with_name("ref.token").write_text("another-token")
    recipe = parse_recipe(RECIPE, file.parent)
    assert tokens.token_of("reward", recipe.reward) == SECRET
    assert tokens.token_of("ref", recipe.ref) == "another-token"
    stored = to_yaml(recipe)
    assert str(file) in stored
    assert SECRET not in stored


def test_a_token_that_is_not_there_or_in_two_places_is_refused_with_its_key(file, tmp_path, monkeypatch):
    def said(**place: str) -> str:
        return "\n".join(tokens.token_problems([("reward", Reward(kind="remote", **place))]))

    assert said(token_file=str(file)) == ""
    assert "reward.token_file: [Errno 2]" in said(token_file=str(tmp_path / "none"))
    file.write_text("two words")
    assert f"reward.token_file: the file {file} holds no token" in said(token_file=str(file))
    monkeypatch.setenv("EMPTY", " ")
    assert "reward.token_env: the environment variable EMPTY holds no token" in said(token_env="EMPTY")
    with pytest.raises(RecipeError, match=r"reward\.token_env and token_file are both given"):
        parse_recipe(RECIPE, tmp_path, ["reward.token_env=EMPTY"])


def test_a_file_that_others_may_read_is_told_of(file):
    sections = [("reward", Reward(kind="remote", token_file=str(file)))]
    assert list(tokens.token_notes(sections)) == []
    file.chmod(0o640)
    (told,) = tokens.token_notes(sections)
    assert told == f"reward.token_file: others than its owner may read {file} (mode 640): chmod 600 {file}"
    assert list(tokens.token_notes([("reward", Reward(token_file=str(file.with_name("none"))))])) == []


def test_tokens_are_hidden_whatever_their_variables_name_is(file):
    environ = {"MY_JUDGE": "m9n8b7v6c5", "HOME": "/home/someone"}
    sections = [
        ("reward", Reward(kind="remote", token_file=str(file))),
        ("ref", Reward(kind="remote", token_env="MY_JUDGE")),
    ]
    text = f"401: {SECRET} and m9n8b7v6c5 are unknown in /home/someone"
    assert hide(text, environ) == text
    tokens.hide_tokens(sections, environ)
    tokens.hide_tokens(sections, environ)
    assert environ[MORE].split(os.pathsep) == [str(file), "MY_JUDGE"]
    assert hide(text, environ) == "401: *** and *** are unknown in /home/someone"
    kept = without_secrets({"a": f"x {SECRET}", "b": "m9n8b7v6c5"}, environ)
    assert kept == {"a": "x ***", "b": "${oc.env:MY_JUDGE}"}
    file.unlink()
    assert hide("step 1/2", environ) == "step 1/2"
