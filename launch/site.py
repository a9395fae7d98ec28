"""The user's file of what all launches at a site share: account, partition, container, mounts, interface.

It is $ROLEMESH_SITE, else ~/.config/rolemesh/site.yaml. Options of the command line win over it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from rolemesh.engine.loggers.secrets import is_secret
from rolemesh.launch.config import build
from rolemesh.launch.environment import BLOCKED, matches
from rolemesh.launch.fields import RecipeError, Section, key

VARIABLE = "ROLEMESH_SITE"
DEFAULT = Path("~/.config/rolemesh/site.yaml")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}|UNLIMITED", re.IGNORECASE)
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGT]i|[kMGT])")
_OURS = {
    **dict.fromkeys(("-N", "--nodes"), "give --nodes"),
    **dict.fromkeys(("--export", "--ntasks-per-node"), "leave it out"),
    **dict.fromkeys(("-t", "--time"), "give slurm.time"),
}


@dataclass(frozen=True, kw_only=True)
class SlurmSite(Section):
    """How jobs are asked for."""

    account: str | None = key(None, "Account that is charged.", shown="Slurm's default")
    partition: str | None = key(None, "Partition.", shown="Slurm's default")
    qos: str | None = key(None, "Quality of service.", shown="Slurm's default")
    constraint: str | None = key(None, "Features that nodes must have.", shown="none")
    time: str | None = key(None, "Wall time, as Slurm writes it.", shown="24:00:00")
    options: tuple[str, ...] = key((), "More `#SBATCH` options, such as `--reservation=x`.")
    runtime: Literal["pyxis", "apptainer"] = key("pyxis", "What starts a container.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise RecipeError(f"slurm.time is {self.time!r}: write minutes, HH:MM:SS, or DAYS-HH:MM:SS")
        for option in self.options:
            name = re.split(r"[=\s]", option)[0]
            if name in _OURS:
                raise RecipeError(f"slurm.options has {option!r}, which launch sets itself: {_OURS[name]}")
            if not name.startswith("-"):
                raise RecipeError(
                    f"slurm.options has {option!r}: write it as `#SBATCH` does, --reservation=x"
                )
        for text in (self.account, self.partition, self.qos, self.constraint, *self.options):
            if "\n" in (text or ""):
                raise RecipeError(f"slurm: {text!r} has more than one line")


@dataclass(frozen=True, kw_only=True)
class K8sSite(Section):
    """Where pods run, and what they get."""

    namespace: str | None = key(None, "Namespace.", shown="kubectl's default")
    claim: str = key("rolemesh", "Volume claim that all pods share: recipe, models, data, run folder.")
    mount: str = key("/shared", "Where the pods see the volume.")
    here: str | None = key(None, "Where this machine sees the volume.", shown="where the pods do")
    head_cpus: int = key(8, "CPUs of the head, which has the driver.", at_least=1)
    head_memory: str = key("64Gi", "Memory of the head.")
    worker_cpus: int = key(32, "CPUs of a worker.", at_least=1)
    worker_memory: str = key("512Gi", "Memory of a worker.")
    shm: str = key("32Gi", "Shared memory of a pod.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("head_memory", "worker_memory", "shm"):
            if not _QUANTITY.fullmatch(getattr(self, name)):
                raise RecipeError(
                    f"k8s.{name} is {getattr(self, name)!r}: write it with its unit, such as 64Gi"
                )


@dataclass(frozen=True, kw_only=True)
class Site(Section):
    """The whole file; every key may be left out."""

    container: str | None = key(None, "Image that the run is in.", shown="none; on k8s rolemesh:latest")
    mounts: tuple[str, ...] = key((), "Folders that the container sees, as FROM:TO.")
    interface: str | None = key(None, "Network interface of Ray and the ranks.", shown="that of the route")
    gpus_per_node: int = key(8, "GPUs of a node, where the recipe has no cluster.per_node.", at_least=1)
    python: str | None = key(
        None, "The Python that rolemesh is installed for.", shown="that of the launch; in a container python"
    )
    env: dict[str, str] = key({}, "Variables to set. Secrets stand in your shell, named by `forward`.")
    forward: tuple[str, ...] = key((), "More variables of your shell to take along: names or patterns.")
    slurm: SlurmSite = key(SlurmSite, "For `launch slurm`.")
    k8s: K8sSite = key(K8sSite, "For `launch k8s`.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.env:
            if not name.isidentifier():
                raise RecipeError(f"env has {name!r}, which is no name of a variable")
            if matches(name, BLOCKED):
                raise RecipeError(
                    f"env.{name} is a launcher's variable, which never reaches a run: leave it out"
                )
            if is_secret(name):
                raise RecipeError(
                    f"env.{name} holds a secret, which no file should; keep it in your shell, and list it in "
                    "forward"
                )
        for mount in self.mounts:
            if not all(part.startswith("/") for part in mount.split(":")[:2]) or ":" not in mount:
                raise RecipeError(f"mounts has {mount!r}: write FROM:TO, two absolute paths")


def load_site(environ: Mapping[str, str] = os.environ) -> Site:
    """The site's file, or defaults where there is none.

    Raises RecipeError for keys and values that are wrong, and where $ROLEMESH_SITE names no file.
    """
    named = environ.get(VARIABLE)
    path = Path(named) if named else DEFAULT.expanduser()
    if not path.is_file():
        if named:
            raise RecipeError(f"{VARIABLE} is {named}, where no file is")
        return Site()
    try:
        keys = yaml.load(path.read_text(), _Loader) or {}
        if not isinstance(keys, dict):
            raise RecipeError("a site file is a mapping of keys, such as `interface: ib0`")
        return build(Site, keys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not readable as YAML: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but `12:00:00` is text: not a number to the base of 60. Keys read other numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":int", ":float"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
