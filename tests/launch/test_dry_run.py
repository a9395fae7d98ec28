"""`rolemesh plan --dry-run` on published shapes: every distinct rank built, every tensor landed once."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.launch.cli import main

DATA = Path(__file__).parents[1] / "data"
RECIPE = """
run: {{device: cuda}}
cluster: {{nodes: {nodes}, per_node: 8}}
data: {{train_files: [train.parquet], max_prompt_tokens: 1024}}
algorithm: {{name: grpo, kl: {{in: loss}}}}
batch: {{prompts: 64, samples_per_prompt: 8, mini_batch_samples: 512}}
lengths: {{max_response_tokens: 2048}}
actor: {{path: {path}, layout: {actor}}}
rollout: {{engine: vllm, layout: {{tp: 8}}}}
ref: {{layout: {ref}}}
reward: reward.py:score
placement: colocate
"""
LLAMA = "{tp: 8, pp: 8, sequence_parallel: true}"
CASES = [
    pytest.param("llama-3.1-70b", 16, LLAMA, "{tp: 8}", 723, id="llama-70b"),
    pytest.param("llama-3.1-405b", 32, "{tp: 8, pp: 16}", "{tp: 8, pp: 4}", 1137, id="llama-405b"),
    pytest.param(
        "qwen3-235b-a22b",
        16,
        "{tp: 4, pp: 4, ep: 8, sequence_parallel: true}",
        "{tp: 4, ep: 32, etp: 4, sequence_parallel: true}",
        36_945,
        id="qwen3-235b",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "deepseek-v3",
        64,
        "{tp: 4, pp: 16, ep: 32, sequence_parallel: true}",
        "{pp: 8, ep: 64}",
        45_395,
        id="deepseek-v3",
    ),
]


def planned(tmp_path: Path, path: Path, nodes: int, actor: str, ref: str) -> tuple[int, str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(nodes=nodes, path=path, actor=actor, ref=ref))
    done = CliRunner().invoke(main, ["plan", str(recipe), "--dry-run"])
    return done.exit_code, done.output


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "nodes", "actor", "ref", "tensors"), CASES)
def test_published_models_land_whole_under_plans_for_hundreds_of_devices(
    tmp_path, name, nodes, actor, ref, tensors
):
    code, said = planned(tmp_path, DATA / name, nodes, actor, ref)
    assert code == 0, said
    for role in ("actor", "ref"):
        found = re.search(
            rf"dry run: {role}: (\d+) ranks .*; the checkpoint's ([\d,]+) tensors land once", said
        )
        assert found, said
        assert int(found[1]) == 8 * nodes
        assert int(found[2].replace(",", "")) == tensors
    print(said)  # kinds of ranks, parameters and seconds: pytest -s


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "the checkpoint lacks model.norm.weight"),
        (
            {"model.layers.{0-79}.self_attn.q_norm.weight": [128]},
            "has unknown model.layers.0.self_attn.q_norm",
        ),
        ({"lm_head.weight": [128256, 8191]}, r"lm_head.weight \(128256, 8191\) \(the model needs"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_is_told_by_tensor(tmp_path, change, message):
    source = DATA / "llama-3.1-70b"
    shapes = json.loads((source / "tensor_shapes.json").read_text()) | change
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "tensor_shapes.json").write_text(json.dumps(kept))
    code, said = planned(tmp_path, tmp_path, 16, LLAMA, "{tp: 8}")
    assert code == 2
    assert re.search(f"dry run of actor: .*{message}", said), said
