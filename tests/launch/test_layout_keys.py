"""Keys of a role's layout, memory and adapters: what they become, and what is refused."""

from pathlib import Path

import pytest
import yaml

from rolemesh.launch import assemble
from rolemesh.launch.config import parse_recipe, to_yaml
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.request import graph_of
from rolemesh.launch.schema import Recipe
from rolemesh.parallel.lora import LoraConfig
from rolemesh.placement.layout import Layout

DOCUMENT = Path(__file__).parents[2] / "docs/layouts.md"
REST = """
data: {train_files: [train.parquet], prompt_key: prompt}
algorithm: {name: ppo, kl: {in: reward}}
reward: {path: "reward.py:score"}
"""


def recipe(text: str) -> Recipe:
    return parse_recipe(REST + text, Path("/models"))


def test_the_documents_example_cuts_recomputes_offloads_and_adapts():
    example = DOCUMENT.read_text().partition("```yaml part\n")[2].partition("```")[0]
    read = recipe(example)
    assert Layout(**read.actor.layout.pins) == Layout(
        tp=2, pp=2, vpp=2, sequence_parallel=True, pp_layers=(7, 8, 8, 9)
    )
    actor, critic = (assemble.role_spec(read, role, 10) for role in ("actor", "critic"))
    assert (actor.recompute, actor.offload, actor.lora) == ("selective", False, None)
    assert (critic.recompute, critic.offload, critic.lora) == ("none", True, LoraConfig(32, 64.0))
    assert recipe(yaml.safe_dump(yaml.safe_load(to_yaml(read)))) == read


def test_the_reference_of_an_actor_with_adapters_is_the_actor():
    models = "critic: {path: rm}\nactor: {path: sft, lora: 8}\n"
    read = recipe(models)
    assert "ref" not in read.roles
    assert read.ref.kind == "actor"
    operation = graph_of(read)["ref_log_prob"]
    assert (operation.role, operation.method) == ("actor", "compute_ref_log_prob")
    other = recipe(models + "ref: {path: older}\n")
    assert "ref" in other.roles
    assert graph_of(other)["ref_log_prob"].role == "ref"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {path: sft}\nref: {kind: actor}", r"ref.kind is actor, .* \(actor.lora\)"),
        ("actor: {path: sft, recompute: true}", "actor.recompute is True, but must be none or selective"),
        ("actor: {path: sft}\nrollout: {layout: {pp_layers: [1, 1]}}", "an engine shares out its layers"),
        ("actor: {path: sft, lora: {alpha: 0}}", "actor.lora.alpha"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str):
    with pytest.raises(RecipeError, match=message):
        recipe(f"critic: {{path: rm}}\n{text}\n")
