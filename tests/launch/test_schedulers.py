"""The scripts for schedulers: started with stand-ins for Slurm's commands, and the manifest's fields."""

import copy
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import Result
from tiny import tiny_checkpoint
from typer.testing import CliRunner

from rolemesh.launch import engine_check
from rolemesh.launch.check import check_recipe
from rolemesh.launch.cli import main
from rolemesh.launch.config import load_recipe

ROOT = Path(__file__).parents[2]
SBATCH, TORCHRUN = ROOT / "launch/slurm/train.sbatch", ROOT / "launch/scripts/torchrun.sh"
MODELS = ROOT / "examples/bench/models"

LAUNCHED = """
run: {save_every: 1}
data: {train_files: train.jsonl, max_prompt_tokens: 8}
lengths: {max_response_tokens: 8}
algorithm: grpo
batch: {prompts: 16, samples_per_prompt: 2}
actor: policy
reward: reward.py:compute_score
placement: {pools: {one: {roles: [actor, rollout], nodes: 2, per_node: 8}}}
"""


@pytest.mark.parametrize("script", [SBATCH, TORCHRUN], ids=lambda path: path.name)
def test_a_script_is_bash_and_says_what_it_wants(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    assert "RECIPE [KEY=VALUE]..." in done.stderr


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes; `srun` runs its command once for each, and `python` notes its
    command line instead of starting torchrun.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_in(tools, "scontrol", '[[ "$*" == "show hostnames n[3-4]" ]] && printf "n3\\nn4\\n"')
    each = 'shift; for i in 0 1; do SLURM_NODEID=$i "$@" || exit $?; done'
    stand_in(tools, "srun", f'echo "$1" > {tmp_path}/srun; {each}')
    note = f'printf "%q " "$@" >> {tmp_path}/started; echo >> {tmp_path}/started; exit ${{ENDS:-0}}'
    answer = f'case "$2" in *socket*) echo 41234;; *) echo {ROOT}/launch;; esac'
    stand_in(tools, "python", f'if [[ "$1" == -c ]]; then {answer}; else {note}; fi')
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_ID": "77"}
    return {"PATH": f"{tools}:{os.environ['PATH']}", **job}


def test_slurm_starts_torchrun_once_on_each_node(slurm, tmp_path):
    arguments = ["a recipe.yaml", "run.steps=1", 'run.name="x y"']
    subprocess.run(["bash", SBATCH, *arguments], env=slurm, check=True, timeout=20)
    started = [shlex.split(line) for line in (tmp_path / "started").read_text().splitlines()]
    assert [line[line.index("--node-rank") + 1] for line in started] == ["0", "1"]
    for line in started:
        assert line[:2] == ["-m", "rolemesh.launch.elastic"]
        options = dict(zip(line[2:-5:2], line[3:-5:2], strict=True))
        assert options | {"--node-rank": ""} == {
            "--nnodes": "2",
            "--node-rank": "",
            "--nproc-per-node": "1",
            "--master-addr": "n3",
            "--master-port": "41234",
            "--rdzv-id": "77",
        }
        assert line[-5:] == ["-m", "rolemesh.launch.torchrun", *arguments]
    assert (tmp_path / "srun").read_text().strip() == "--kill-on-bad-exit=1"


def test_a_job_ends_with_the_runs_exit_code(slurm):
    done = subprocess.run(["bash", SBATCH, "recipe.yaml"], env={**slurm, "ENDS": "143"}, timeout=20)
    assert done.returncode == 143


@pytest.fixture(scope="module")
def manifest() -> dict:
    return yaml.safe_load((ROOT / "launch/k8s/rayjob.yaml").read_text())


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads((ROOT / "tests/data/kuberay/rayjob.schema.json").read_text())


def test_the_manifest_has_kuberays_fields(manifest, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(entryPoint=spec.pop("entrypoint")),
        lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(minReplicas="2"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
    ],
)
def test_the_schema_finds_what_kubernetes_would_refuse(manifest, schema, spoil):
    spoiled = copy.deepcopy(manifest)
    spoil(spoiled["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoiled, schema)


def test_the_manifests_command_names_its_own_workers(manifest):
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert words[:2] == ["rolemesh", "train"]
    assert f"cluster.nodes={workers['replicas']}" in words
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]


@pytest.mark.parametrize(
    ("example", "model", "config"),
    [
        ("llama70b", "Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("qwen235b", "Qwen3-235B-A22B", "qwen3-235b-a22b"),
    ],
)
def test_a_large_example_passes_the_offline_check_with_the_nodes_it_states(
    tmp_path, monkeypatch, example: str, model: str, config: str
):
    """A folder with the configuration of such a model stands for its weights."""
    monkeypatch.setattr(engine_check, "find_spec", lambda package: True)  # vLLM is where it runs
    examples, folder = tmp_path / "examples", tmp_path / "models" / model
    examples.mkdir()
    for name in (f"{example}.yaml", "math_reward.py"):
        (examples / name).write_text((ROOT / "examples" / name).read_text())
    tiny_checkpoint(folder)
    (folder / "config.json").write_text((MODELS / f"{config}.json").read_text())
    data = tmp_path / "data/math"
    data.mkdir(parents=True)
    rows = {"prompt": ["1+1"] * 256, "reward_model": [{"ground_truth": "2"}] * 256}
    for name in ("train", "test"):
        pq.write_table(pa.table(rows), data / f"{name}.parquet")
    recipe = load_recipe(examples / f"{example}.yaml")
    report = check_recipe(recipe, offline=True)
    assert not report.problems, report.text()
    assert report.plan.n_devices == recipe.cluster.nodes * recipe.cluster.per_node
    assert not report.plan.idle
    assert f"NNODES={recipe.cluster.nodes}" in (ROOT / f"examples/{example}.yaml").read_text()
    fitting = [row.text for row in report.rows if row.area == "memory"]
    assert len(fitting) == len(report.plan.pools)
    assert all(re.fullmatch(r"pool \w+: [\d.]+ of [\d.]+ GiB at most on a device", text) for text in fitting)


def test_the_70b_examples_reward_compares_numbers():
    scope: dict = {}
    exec((ROOT / "examples/math_reward.py").read_text(), scope)
    score = scope["compute_score"]
    assert score("", "so it is 1,000.0", "1000", None) == 1.0
    assert score("", "1000, or 7", "1000", None) == 0.0
    assert score("", "none", "1000", None) == 0.0


def test_a_launch_is_checked_first_and_counts_its_nodes(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path / "policy")
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps({"prompt": "abc"})] * 8))
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    (tmp_path / "recipe.yaml").write_text(LAUNCHED)
    monkeypatch.setenv("ROLEMESH_SITE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def launch(nodes: int) -> Result:
        return CliRunner().invoke(main, ["launch", "slurm", "recipe.yaml", f"--nodes={nodes}", "--dry-run"])

    too_few = launch(1)
    assert too_few.exit_code == 2
    assert "1 problem of the check: nothing was started" in too_few.stderr
    assert "pool 'one'" in too_few.stderr
    assert not too_few.stdout
    enough = launch(3)
    assert enough.exit_code == 0, enough.stderr
    assert "1 of 3 nodes stay idle: --nodes 2 is enough" in enough.stderr
    assert re.search(r"disk .* GiB free\); one writer takes .* s for one at .* MB/s", enough.stderr)
    assert "#SBATCH --nodes=3\n" in enough.stdout
