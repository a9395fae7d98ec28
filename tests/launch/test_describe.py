"""The keys' descriptions, on the command line and in docs/recipe.md."""

import re
from pathlib import Path

import pytest

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.describe import describe, refreshed
from rolemesh.launch.fields import RecipeError, declared, section_of
from rolemesh.launch.schema import Recipe

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "README.md"])
ROOT_KEYS = "run cluster data algorithm batch lengths actor rollout critic ref reward placement schedule"


def test_the_root_keys_are_those_of_the_format():
    assert [key.path for key in declared(Recipe) if "." not in key.path] == ROOT_KEYS.split()


def test_docs_recipe_md_is_what_the_schema_says_now():
    text = (REPOSITORY / "docs/recipe.md").read_text()
    assert text == refreshed(text), "run `make docs`"


def test_every_key_says_what_it_means():
    assert [key.path for key in declared(Recipe) if not key.metadata["doc"]] == []


def test_every_default_is_within_its_own_bounds():
    parse_recipe("{data: a.jsonl, actor: a, critic: a, reward: a}", Path("/"))


def test_a_key_is_described_with_type_unit_default_and_verls_name():
    text = describe("batch.prompts")
    for part in (
        "int, prompts, at least 1 (default: 256)",
        "Prompts per step.",
        "verl: data.train_batch_size",
    ):
        assert part in text


def test_a_section_lists_its_keys_and_nothing_else():
    assert re.findall(r"^(\S+):", describe("lengths.expect"), re.M) == [
        "lengths.expect.kind", "lengths.expect.mean", "lengths.expect.p95",
    ]  # fmt: skip
    n_leaves = sum(section_of(key.type) is None for key in declared(Recipe))
    assert len(re.findall(r"^\S+:", describe(), re.M)) == n_leaves


def test_an_unknown_key_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match=r"did you mean actor\.optim\.lr\?"):
        describe("actor.optim.lrr")


OTHER_KINDS = ("bench", "imports")  # folders of examples that are no recipes


def _yaml_blocks() -> list:
    """Blocks that name no other kind, as ```yaml bench does."""
    found = []
    for document in DOCUMENTS:
        for i, block in enumerate(re.findall(r"^```ya?ml\n(.*?)^```", document.read_text(), re.S | re.M)):
            found.append(pytest.param(block, id=f"{document.name}-{i}"))
    return found


@pytest.mark.parametrize("block", _yaml_blocks())
def test_every_yaml_block_of_the_docs_is_a_recipe(block: str):
    parse_recipe(block, Path("/docs"))


OTHER_COMMANDS = ("quickstart_sft.yaml", "quickstart_rm.yaml")  # recipes of sft and train-rm
RECIPES = [
    path
    for path in sorted(REPOSITORY.glob("examples/**/*.yaml"))
    if path.parts[-2] not in OTHER_KINDS and path.name not in OTHER_COMMANDS
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_example_is_a_recipe(path: Path):
    parse_recipe(path.read_text(), path.parent)
