"""The commands of docs/launch.md: each is started, with stand-ins for what needs a cluster."""

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rolemesh.launch.config import build, load_recipe
from rolemesh.launch.fields import declared
from rolemesh.launch.site import Site

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/launch.md").read_text()
LAUNCHERS = ("rolemesh", "ray", "torchrun", "sbatch", "kubectl", "python")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_modules_files_and_keys_that_exist(command, tmp_path):
    for name in LAUNCHERS:
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%q " {name} "$@" > {tmp_path}/started\n')
        path.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", command], cwd=ROOT, env={"PATH": path}, check=True, timeout=20)
    words = shlex.split((tmp_path / "started").read_text())
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    assert all(importlib.util.find_spec(module) for module in modules)
    assert all((ROOT / word).is_file() for word in words if word.endswith((".yaml", ".sbatch")))
    overrides = [word for word in words if re.fullmatch(r"[a-z_.]+=\S+", word)]
    assert load_recipe(ROOT / "examples/quickstart.yaml", overrides)


def test_the_site_file_shows_every_key():
    (text,) = re.findall(r"```yaml site\n(.*?)```", TEXT, re.DOTALL)
    tree = yaml.safe_load(text)
    site = build(Site, tree)
    shown = {*tree, *(f"{part}.{key}" for part in ("slurm", "k8s") for key in tree[part])}
    assert shown == {key.path for key in declared(Site)}
    assert site.slurm.runtime == "pyxis"


def test_every_way_to_start_is_there():
    started = " ".join(COMMANDS)
    for way in ("rolemesh train", "ray job submit", "rolemesh.launch.torchrun", "torchrun.sh", "train.sbatch",
                "rayjob.yaml", "rolemesh.launch.spmd", "rolemesh launch slurm", "rolemesh launch k8s",
                "rolemesh launch torchrun"):  # fmt: skip
        assert way in started
