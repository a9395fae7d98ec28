"""`rolemesh launch`: what it hands to Slurm, Kubernetes and torchrun, with stand-ins for their commands."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from rolemesh.launch.cli import main
from rolemesh.launch.environment import passage

ROOT = Path(__file__).parents[2]
RECIPE = """
run: {device: cuda}
data: {train_files: train.jsonl}
algorithm: grpo
batch: {prompts: 4, samples_per_prompt: 2}
actor: policy
reward: reward.py:compute_score
"""
SECRET = "s3cret-value-of-a-token"
SITE = """
python: python
interface: ib0
env: {NCCL_IB_HCA: mlx5}
forward: ["AWS_*"]
slurm: {account: team, partition: gpu, time: "12:00:00", options: [--reservation=mine]}
k8s: {namespace: ml, claim: disk, here: HERE, shm: 8Gi}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a recipe and a site file; a shell with a launcher's variables, settings and a secret."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "site.yaml").write_text(SITE.replace("HERE", str(tmp_path)))
    (tmp_path / "bin").mkdir()
    for name in list(os.environ):
        if name not in ("HOME", "TMPDIR"):
            monkeypatch.delenv(name)
    settings = {"RANK": "3", "MASTER_ADDR": "old", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    settings |= {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "HF_TOKEN": SECRET, "AWS_REGION": "eu"}
    settings |= {"UCX_TLS": "rc", "GLOO_X": "1", "https_proxy": "http://me:password@proxy:80", "OTHER": "1"}
    settings |= {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "ROLEMESH_SITE": str(tmp_path / "site.yaml")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words: str, check: bool = False) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["launch", *words, *([] if check else ["--no-check"])])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def tool(folder: Path, name: str, code: int = 0) -> None:
    """A command that notes what it gets: arguments, input and environment."""
    path = folder / "bin" / name
    note = f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment; cat > {folder}/input'
    path.write_text(f"#!/bin/bash\n{note}\nexit {code}\n")
    path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in (folder / "environment").read_text().splitlines() if "=" in line
    )


def test_slurm_gets_the_template_with_the_jobs_options_and_no_launchers_variable(folder):
    tool(folder, "sbatch")
    code, _, said = launch("slurm", "recipe.yaml", "--nodes", "16", "run.steps=3", "run.resume=auto")
    assert code == 0, said
    script = (folder / "input").read_text()
    assert (folder / "arguments").read_text().strip() == ""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    options = dict(
        line[8:].split("=", 1) for line in script.splitlines() if line.startswith("#SBATCH") and "=" in line
    )
    assert options | {"--signal": "", "--output": ""} == {
        "--job-name": "rolemesh-recipe", "--nodes": "16", "--ntasks-per-node": "1", "--gpus-per-node": "8",
        "--time": "12:00:00", "--export": "ALL", "--account": "team", "--partition": "gpu",
        "--reservation": "mine", "--signal": "", "--output": "",
    }  # fmt: skip
    assert f"set -- {folder}/recipe.yaml run.steps=3 run.resume=auto run.dir={folder}/runs/recipe\n" in script
    assert "export ROLEMESH_INTERFACE=ib0\nexport NCCL_IB_HCA=mlx5\nunset OMP_NUM_THREADS\n" in script
    got = environment(folder)
    assert not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"} & set(got)
    assert (got["HF_TOKEN"], got["NCCL_DEBUG"], got["AWS_REGION"]) == (SECRET, "INFO", "eu")
    assert SECRET not in script + said
    assert "forwarded: AWS_REGION, GLOO_X, HF_TOKEN, NCCL_DEBUG, NCCL_IB_HCA, PYTHON" in said
    assert "blocked: LOCAL_RANK, MASTER_ADDR, OMP_NUM_THREADS, RANK, TORCHELASTIC_RUN_ID (" in said


def test_the_filled_script_starts_torchrun_with_every_rendezvous_flag(folder):
    code, script, _ = launch("slurm", "recipe.yaml", "--nodes", "2", "--dry-run", "run.name=null")
    assert code == 0
    assert not (folder / "input").exists()
    each = 'shift; for i in 0 1; do SLURM_NODEID=$i "$@" || exit $?; done'
    stand_ins = {
        "srun": each,
        "scontrol": 'printf "n3\\nn4\\n"',
        "python": 'if [[ "$1" == -c ]]; then\n'
        f'case "$2" in *socket*) echo 41234;; *) echo {ROOT}/launch;; esac\n'
        f'else printf "%q " "$@" >> {folder}/started; echo >> {folder}/started\n'
        f'echo "${{RANK:-none}} ${{MASTER_ADDR}} $ROLEMESH_INTERFACE" >> {folder}/saw; fi',
    }
    for name, body in stand_ins.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_ID": "77"}
    subprocess.run(["bash"], input=script, text=True, env={**os.environ, **job}, check=True, timeout=20)
    started = [shlex.split(line) for line in (folder / "started").read_text().splitlines()]
    for rank, words in enumerate(started):
        given = dict(zip(words[2:-5:2], words[3:-5:2], strict=True))
        assert given == {
            "--nnodes": "2", "--node-rank": str(rank), "--nproc-per-node": "1", "--master-addr": "n3",
            "--master-port": "41234", "--rdzv-id": "77",
        }  # fmt: skip
        assert words[-3:] == [f"{folder}/recipe.yaml", "run.name=null", f"run.dir={folder}/runs/recipe"]
    assert (folder / "saw").read_text() == "none n3 ib0\n" * 2


@pytest.mark.parametrize(
    ("runtime", "found"),
    [
        (
            "pyxis",
            "--container-image=img:1 --container-mounts=HERE:/work,/data:/data --container-env=PYTHON,",
        ),
        ("apptainer", "WITHIN=(apptainer exec --nv --bind HERE:/work --bind /data:/data img:1)\n"),
    ],
)
def test_a_container_sees_the_recipe_where_its_folder_is_mounted(folder, runtime, found):
    (folder / "site.yaml").write_text(
        f"slurm: {{runtime: {runtime}}}\nmounts: ['{folder}:/work', '/data:/data']"
    )
    code, script, said = launch("slurm", "recipe.yaml", "--container", "img:1", "--dry-run")
    assert code == 0, said
    assert found.replace("HERE", str(folder)) in script
    assert "set -- /work/recipe.yaml run.dir=/work/runs/recipe\n" in script
    (folder / "site.yaml").write_text("mounts: ['/data:/data']")
    code, _, said = launch("slurm", "recipe.yaml", "--container", "img:1", "--dry-run")
    assert code == 2
    assert f"{folder}/recipe.yaml would not be there in the run, which sees /data" in said


def test_a_job_runs_with_the_python_that_launched_it_and_a_container_with_its_own(folder):
    (folder / "site.yaml").write_text(f"mounts: ['{folder}:/work']")
    _, script, _ = launch("slurm", "recipe.yaml", "--dry-run")
    assert f"\nexport PYTHON={sys.executable}\n" in script
    _, script, _ = launch("slurm", "recipe.yaml", "--container", "img:1", "--dry-run")
    assert "\nexport PYTHON=python\n" in script


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("- a", "a site file is a mapping of keys"),
        ("slurm: {time: soon}", "slurm.time is 'soon': write minutes, HH:MM:SS"),
        (
            "slurm: {options: [--nodes=3]}",
            "slurm.options has '--nodes=3', which launch sets itself: give --nodes",
        ),
        ("slurm: {options: [exclusive]}", "write it as `#SBATCH` does"),
        ('slurm: {account: "a\\n#SBATCH --wrap=x"}', "has more than one line"),
        ("k8s: {shm: 32}", "k8s.shm is '32': write it with its unit"),
        ("env: {A B: x}", "env has 'A B', which is no name of a variable"),
    ],
)
def test_a_site_file_that_would_make_a_broken_job_is_refused(folder, site, said):
    (folder / "site.yaml").write_text(site)
    code, _, told = launch("slurm", "recipe.yaml", "--dry-run")
    assert (code, said in told) == (2, True), told


def test_a_wall_time_is_read_as_it_stands(folder):
    (folder / "site.yaml").write_text("slurm: {time: 12:00:00}\ngpus_per_node: 4\nenv: {A: 1}")
    code, script, told = launch("slurm", "recipe.yaml", "--dry-run")
    assert code == 0, told
    assert "#SBATCH --time=12:00:00\n" in script
    assert "#SBATCH --signal=TERM@600\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "\nexport A=1\n" in script


@pytest.mark.parametrize(
    ("time", "before_s"),
    [("10", 150), ("10:30", 157), ("0:20:00", 300), ("0-1", 600), ("1-0:10:00", 600), ("UNLIMITED", 600)],
)
def test_a_short_job_gets_its_sigterm_in_its_last_quarter(folder, time, before_s):
    (folder / "site.yaml").write_text(f"slurm: {{time: '{time}'}}")
    _, script, _ = launch("slurm", "recipe.yaml", "--dry-run")
    assert f"#SBATCH --signal=TERM@{before_s}\n" in script


def test_a_job_that_starts_again_says_so_to_slurm(folder):
    keys = ["run.stop_before_walltime=600", "run.requeue=true", "run.resume=auto", "run.device=cpu"]
    _, script, _ = launch("slurm", "recipe.yaml", *keys, "--dry-run")
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --open-mode=append\n" in script
    assert "gpus-per-node" not in script


def test_kubectl_gets_a_job_of_the_schema_and_secrets_apart(folder):
    tool(folder, "kubectl")
    code, _, said = launch("k8s", "recipe.yaml", "--nodes", "16", "--container", "img:1", "run.steps=3")
    assert code == 0, said
    assert (folder / "arguments").read_text().split() == ["apply", "-f", "-"]
    secret, job = yaml.safe_load_all((folder / "input").read_text())
    jsonschema.validate(job, json.loads((ROOT / "tests/data/kuberay/rayjob.schema.json").read_text()))
    assert secret["stringData"] == {"HF_TOKEN": SECRET, "https_proxy": "http://me:password@proxy:80"}
    assert SECRET not in yaml.safe_dump(job) + said
    assert job["metadata"] == {"name": "rolemesh-recipe", "namespace": "ml"}
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {16}
    assert shlex.split(job["spec"]["entrypoint"]) == [
        "rolemesh", "train", "/shared/recipe.yaml", "run.address=auto", "cluster.nodes=16", "run.resume=auto",
        "run.steps=3", "run.dir=/shared/runs/recipe",
    ]  # fmt: skip
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["NCCL_DEBUG"]["value"] == "INFO"
        assert env["GLOO_SOCKET_IFNAME"]["value"] == env["NCCL_SOCKET_IFNAME"]["value"] == "ib0"
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "rolemesh-recipe-env",
            "key": "HF_TOKEN",
        }
        assert not {"RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "OTHER"} & set(env)
        assert container["image"] == "img:1"
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    _, shown, _ = launch("k8s", "recipe.yaml", "--dry-run")
    assert "HF_TOKEN: '***'" in shown
    assert SECRET not in shown


def test_pods_without_gpus_have_worker_slots(folder):
    code, _, said = launch("k8s", "recipe.yaml", "run.device=cpu", "--dry-run")
    assert (code, "cluster.per_node is missing: how many worker slots" in said) == (2, True)
    _, shown, _ = launch("k8s", "recipe.yaml", "run.device=cpu", "cluster.per_node=4", "--dry-run")
    *_, job = yaml.safe_load_all(shown)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {"rolemesh_slot": 4}
    assert "nvidia.com/gpu" not in shown


def test_torchrun_runs_on_this_node_with_its_rank_and_no_secret_on_a_command_line(folder, monkeypatch):
    tool(folder, "python")
    words = ["torchrun", "recipe.yaml", "--nodes", "2", "--node-rank", "1", "--endpoint", "10.0.0.1:29501",
             "--id", "mine"]  # fmt: skip
    became: list = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    launch(*words)
    ((program, command, variables),) = became
    assert SECRET not in " ".join(command)
    subprocess.run([program, *command[1:]], env=variables, check=True, timeout=20)
    words = (folder / "arguments").read_text().splitlines()
    assert words == [
        "-m", "rolemesh.launch.elastic", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1",
        "--master-addr", "10.0.0.1", "--master-port", "29501", "--rdzv-id", "mine",
        "-m", "rolemesh.launch.torchrun", f"{folder}/recipe.yaml", f"run.dir={folder}/runs/recipe",
    ]  # fmt: skip
    got = environment(folder)
    assert (got["ROLEMESH_INTERFACE"], got["MASTER_ADDR"], got["HF_TOKEN"]) == ("ib0", "10.0.0.1", SECRET)
    assert not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"} & set(got)


def test_a_dry_run_prints_the_command_of_every_node(folder):
    words = ["torchrun", "recipe.yaml", "--nodes", "2", "--endpoint", "n0:29500", "--dry-run"]
    _, shown, _ = launch(*words)
    assert [f"NODE_RANK={rank}" in line for rank, line in enumerate(shown.splitlines())] == [True, True]
    (folder / "site.yaml").write_text(f"mounts: ['{folder}:/work']")
    _, shown, _ = launch(*words, "--node-rank", "1", "--container", "img:1")
    assert " docker run --rm --init --network=host --ipc=host " in shown
    assert " -e HF_TOKEN " in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "recipe.yaml"], "sbatch is not on this machine's PATH"),
        (["k8s", "recipe.yaml"], "kubectl is not on this machine's PATH"),
        (["pbs", "recipe.yaml"], "launch pbs: there are slurm, torchrun, k8s"),
        (["torchrun", "recipe.yaml", "--nodes", "2"], "--endpoint is missing"),
        (["torchrun", "recipe.yaml", "--nodes", "2", "--endpoint", "h:1"], "--node-rank is missing"),
        (["torchrun", "recipe.yaml", "--endpoint", "host", "--dry-run"], "write HOST:PORT"),
        (["torchrun", "recipe.yaml", "--endpoint", "host:99999", "--dry-run"], "write HOST:PORT"),
        (["slurm", "recipe.yaml", "run.address=auto"], "run.address: a launch starts a cluster of its own"),
        (["slurm", "recipe.yaml", "--nodes", "16", "cluster.nodes=2"], "cluster.nodes is 2, --nodes says 16"),
        (["slurm", "recipe.yaml", "run.env.RANK=1"], "env.RANK is set by launchers"),
        (["k8s", "recipe.yaml", "run.stop_before_walltime=60"], "launch k8s knows no end of it"),
        (
            [
                "k8s",
                "recipe.yaml",
                "run.stop_before_walltime=60",
                "run.walltime=600",
                "run.requeue=true",
                "run.resume=auto",
            ],
            "run.requeue asks Slurm, and this is launch k8s",
        ),
    ],
)
def test_what_cannot_start_is_told(folder, monkeypatch, words, said):
    monkeypatch.setenv("PATH", f"{folder}/bin")
    code, _, told = launch(*words)
    assert code == 2
    assert said in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: x", "unknown key acount"),
        ("slurm: {partitoin: x}", "unknown key slurm.partitoin; did you mean slurm.partition?"),
        (
            "env: {HF_TOKEN: x}",
            "env.HF_TOKEN holds a secret, which no file should; keep it in your shell",
        ),
        ("env: {MASTER_PORT: 1}", "env.MASTER_PORT is a launcher's variable"),
        ("mounts: [data]", "mounts has 'data': write FROM:TO"),
    ],
)
def test_a_site_file_with_a_wrong_key_is_refused_by_name(folder, text, said):
    (folder / "site.yaml").write_text(text)
    code, _, told = launch("slurm", "recipe.yaml", "--dry-run")
    assert code == 2
    assert said in told
    assert "site.yaml" in told


def test_the_schedulers_exit_code_is_ours(folder):
    tool(folder, "sbatch", code=5)
    assert launch("slurm", "recipe.yaml")[0] == 5


def test_threads_of_the_user_go_along_and_those_of_a_launcher_do_not():
    assert passage({"OMP_NUM_THREADS": "4", "X": "1"}).values == {"OMP_NUM_THREADS": "4"}
    assert passage({"OMP_NUM_THREADS": "4", "LOCAL_RANK": "0"}).blocked == ("LOCAL_RANK", "OMP_NUM_THREADS")
