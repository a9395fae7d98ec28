"""`rolemesh import`: a script in, a recipe and a table out."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from rolemesh.launch.cli import main
from rolemesh.launch.config import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples" / "imports"


def rolemesh(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_a_script_of_verl_becomes_a_recipe_with_a_table(tmp_path: Path):
    out = tmp_path / "recipe.yaml"
    code, said = rolemesh("import", "verl", EXAMPLES / "verl_dapo.sh", "-o", out, "--var", "NNODES=4")
    assert code == 0, said
    recipe = load_recipe(out)
    assert recipe.algorithm.name == "dapo"
    assert (recipe.algorithm.clip_high, recipe.algorithm.overlong.buffer_tokens) == (0.28, 4096)
    assert (recipe.batch.prompts, recipe.batch.mini_batch) == (512, 32 * 16)
    assert (recipe.cluster.nodes, recipe.lengths.max_response_tokens) == (4, 20480)
    assert recipe.actor.layout.pins == {"tp": 8, "pp": 2, "sequence_parallel": True}
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith("  ")}
    assert rows["actor_rollout_ref.actor.ppo_mini_batch_size"][1:4] == [
        "32",
        "batch.mini_batch_samples",
        "512",
    ]
    changes, harmless = said.index("ignored, changes results:"), said.index("ignored, harmless:")
    assert changes < said.index("trainer.rollout_data_dir") < harmless < said.index("trainer.logger")
    code, said = rolemesh("check", "--offline", out)
    assert "problem: data.train_files" in said  # it is a recipe; its files are elsewhere


def test_without_a_file_the_recipe_is_printed_and_a_bad_script_is_named(tmp_path: Path):
    code, said = rolemesh("import", "openrlhf", EXAMPLES / "openrlhf_ppo.sh")
    assert code == 0, said
    assert yaml.safe_load(said[: said.index("in the recipe:")])["rollout"]["layout"] == {"tp": 2}
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo data.seed=$(date +%s)")
    code, said = rolemesh("import", "verl", script)
    assert (code, "run.sh: data.seed: $(date +%s), which only running" in said) == (2, True)
    assert rolemesh("import", "trl", script)[0] == 2
    assert rolemesh("import", "verl", script, "--var", "1x")[0] == 2
