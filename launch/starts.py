"""What a launch starts, as text: the templates of `slurm/`, `k8s/` and `scripts/`, filled in."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rolemesh.engine.loggers.secrets import HIDDEN, hide, is_secret
from rolemesh.launch.environment import INTERFACE, THREADS, Passage
from rolemesh.launch.fields import RecipeError
from rolemesh.launch.site import Site

FOLDER = Path(__file__).parent
SBATCH, RAYJOB = FOLDER / "slurm/train.sbatch", FOLDER / "k8s/rayjob.yaml"
TORCHRUN = FOLDER / "scripts/torchrun.sh"
_SETTINGS = "# settings\n"
_IMAGE = "rolemesh:latest"
_TERM_S = 600  # before a job's end Slurm sends SIGTERM, as train.sbatch asks


@dataclass(frozen=True)
class Job:
    """A run to be started: `recipe` and `run_dir` as this machine sees them.

    `devices` are those of a node, GPUs or (`on_cpu`) worker slots; None: not known, on CPU.
    """

    name: str
    recipe: Path
    run_dir: Path
    overrides: Sequence[str]
    nodes: int
    devices: int | None
    on_cpu: bool
    site: Site
    container: str | None
    passage: Passage
    requeue: bool = False

    def arguments(self, folders: Sequence[tuple[str, str]]) -> list[str]:
        """Recipe and overrides; paths as they are where `folders` (here, there) are mounted, if any.

        Raises RecipeError for a path that is in none of them.
        """
        recipe, run_dir = (_inside(path, folders) for path in (self.recipe, self.run_dir))
        return [recipe, *self.overrides, f"run.dir={run_dir}"]

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """The container's folders, as (here, there); none without a container."""
        pairs = [mount.split(":") for mount in self.site.mounts] if self.container else []
        return [(pair[0], pair[1]) for pair in pairs]

    @property
    def sets(self) -> dict[str, str]:
        """Variables that are set, whatever the user's shell has; none of them is a secret."""
        own = {"PYTHON": self.site.python or ("python" if self.container else sys.executable)}
        if self.site.interface:
            own[INTERFACE] = self.site.interface
        return {**own, **self.site.env}


def _inside(path: Path, folders: Sequence[tuple[str, str]]) -> str:
    if not folders:
        return str(path)
    for here, there in folders:
        if path.is_relative_to(here):
            return str(Path(there) / path.relative_to(here))
    known = ", ".join(here for here, _ in folders)
    raise RecipeError(
        f"{path} would not be there in the run, which sees {known}: put it there, or add its folder to the "
        "site file (mounts, or k8s.here)"
    )


def slurm_script(job: Job) -> str:
    """`train.sbatch` with the job's options and settings."""
    slurm = job.site.slurm
    options: dict[str, str | None] = {"job-name": job.name, "nodes": str(job.nodes), "export": "ALL"}
    if job.container and not job.site.mounts:
        raise RecipeError(
            "mounts is empty: a container sees nothing of the recipe; name its folders in the site file"
        )
    options |= {
        name: value
        for name in ("account", "partition", "qos", "constraint", "time")
        if (value := getattr(slurm, name)) is not None
    }
    if slurm.time is not None and (seconds := _seconds(slurm.time)) < 4 * _TERM_S:
        options["signal"] = (
            f"TERM@{seconds // 4}"  # ten minutes before a short job's end is before its first step
        )
    options["gpus-per-node"] = None if job.on_cpu else str(job.devices)
    more = [*slurm.options, *(["--requeue", "--open-mode=append"] if job.requeue else [])]
    settings = [f"set -- {shlex.join(job.arguments(job.mounts))}"]
    settings += [f"export {name}={shlex.quote(value)}" for name, value in job.sets.items()]
    settings += [f"unset {THREADS}"] if THREADS in job.passage.blocked else []
    settings += _container(job)
    text = SBATCH.read_text()
    for name, value in options.items():
        text = _directive(text, f"--{name}", value)
    for option in more:
        text = _directive(text, *option.partition("=")[::2])
    return text.replace(_SETTINGS, "".join(f"{line}\n" for line in settings), 1)


def _seconds(time: str) -> float:
    """What Slurm's MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS and DAYS-HOURS[:MINUTES[:SECONDS]] are."""
    if time.upper() == "UNLIMITED":
        return math.inf
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts]}.get(len(parts), parts)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _directive(text: str, name: str, value: str | None) -> str:
    """The script with this `#SBATCH` option: in the place of its own, or after the last; None: without it."""
    line = "" if value is None else f"#SBATCH {name}{f'={value}' if value else ''}\n"
    own = re.compile(rf"^#SBATCH {re.escape(name)}(=.*)?\n", re.MULTILINE)
    if own.search(text):
        return own.sub(lambda _: line, text)
    last = text.rindex("#SBATCH ")
    end = text.index("\n", last) + 1
    return text[:end] + line + text[end:]


def _container(job: Job) -> Iterator[str]:
    if job.container is None:
        return
    if job.site.slurm.runtime == "pyxis":
        # Else variables of the image would win over those of the job.
        names = [*job.sets, *(n for n in job.passage.values if n not in job.sets)]
        options = [f"--container-image={job.container}", f"--container-mounts={','.join(job.site.mounts)}"]
        options.append(f"--container-env={','.join(names)}")
        yield f"SRUN+=({shlex.join(options)})"
    else:
        words = ["apptainer", "exec", *([] if job.on_cpu else ["--nv"])]
        binds = [word for mount in job.site.mounts for word in ("--bind", mount)]
        yield f"WITHIN=({shlex.join([*words, *binds, job.container])})"


def torchrun_command(job: Job, rank: int, endpoint: str, run_id: str) -> tuple[dict[str, str], list[str]]:
    """Variables and command that start node `rank`; `endpoint` is HOST:PORT of node 0.

    Raises RecipeError for an endpoint that is none.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RecipeError(
            f"--endpoint {endpoint}: write HOST:PORT, an address of node 0 and a free port there"
        )
    meeting = {
        "NNODES": job.nodes,
        "NODE_RANK": rank,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RUN_ID": run_id,
    }
    sets = {**{name: str(value) for name, value in meeting.items()}, **job.sets}
    if job.container is None:
        return sets, ["bash", str(TORCHRUN), *job.arguments(())]
    names = [*sets, *(name for name in job.passage.values if name not in sets)]
    command = [
        "docker", "run", "--rm", "--init", "--network=host", "--ipc=host", "--ulimit=memlock=-1",
        *([] if job.on_cpu else ["--gpus=all"]),
        *(word for mount in job.site.mounts for word in ("-v", mount)),
        *(word for name in names for word in ("-e", name)),
        job.container, "bash", "-c",
        'exec bash "$("$PYTHON" -c "import rolemesh.launch; print(rolemesh.launch.__path__[0])")'
        '/scripts/torchrun.sh" "$@"', "train",
    ]  # fmt: skip
    return sets, [*command, *job.arguments(job.mounts)]


def k8s_manifest(job: Job) -> list[dict[str, Any]]:
    """`rayjob.yaml` for the job, after a Secret with what must not be read in it, where there is such.

    Raises RecipeError for CPU nodes of unknown size.
    """
    site, manifest = job.site.k8s, yaml.safe_load(RAYJOB.read_text())
    if job.devices is None:
        raise RecipeError("cluster.per_node is missing: how many worker slots has a pod?")
    sets = {name: value for name, value in job.sets.items() if name not in ("PYTHON", INTERFACE)}
    if job.site.interface:
        sets |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), job.site.interface)
    values = {**job.passage.values, **sets}
    secrets = {name: value for name, value in values.items() if is_secret(name) or hide(value, {}) != value}
    metadata = {"name": job.name, **({"namespace": site.namespace} if site.namespace else {})}
    manifest["metadata"] = metadata
    spec = manifest["spec"]
    program, command, _, *rest = shlex.split(spec["entrypoint"])
    recipe, *overrides = job.arguments([(site.here or site.mount, site.mount)])
    own = [f"cluster.nodes={job.nodes}" if word.startswith("cluster.nodes=") else word for word in rest]
    spec["entrypoint"] = shlex.join([program, command, recipe, *own, *overrides])
    cluster = spec["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    workers |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes)
    if job.on_cpu:
        slots = json.dumps(json.dumps({"rolemesh_slot": job.devices}))
        workers["rayStartParams"] = {"num-gpus": "0", "resources": slots}
    gpus = {} if job.on_cpu else {"nvidia.com/gpu": str(job.devices)}
    head = {"cpu": str(site.head_cpus), "memory": site.head_memory}
    worker = {"cpu": str(site.worker_cpus), "memory": site.worker_memory, **gpus}
    environment = _pod_environment(values, secrets, f"{job.name}-env")
    for group, resources in ((cluster["headGroupSpec"], head), (workers, worker)):
        _fill_pod(group["template"]["spec"], job, resources, environment)
    if not secrets:
        return [manifest]
    named = {**metadata, "name": f"{job.name}-env"}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": named, "stringData": secrets}, manifest]


def _pod_environment(
    values: Mapping[str, str], secrets: Mapping[str, str], name: str
) -> list[dict[str, Any]]:
    """The `env` of a container; secrets are read from the Secret `name`."""
    return [
        {"name": n, "valueFrom": {"secretKeyRef": {"name": name, "key": n}}}
        if n in secrets
        else {"name": n, "value": value}
        for n, value in values.items()
    ]


def _fill_pod(
    pod: dict[str, Any], job: Job, resources: Mapping[str, str], environment: list[dict[str, Any]]
) -> None:
    site, (container,) = job.site.k8s, pod["containers"]
    container["image"] = job.container or _IMAGE
    container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    if environment:
        container["env"] = environment
    container["volumeMounts"] = [
        {**mount, "mountPath": site.mount if mount["name"] == "shared" else mount["mountPath"]}
        for mount in container["volumeMounts"]
    ]
    pod["volumes"] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": site.shm}},
    ]


def manifest_text(documents: Sequence[Mapping[str, Any]], *, shown: bool) -> str:
    """The documents as YAML; values of a Secret are `***` where they are `shown` to a person."""
    if shown:
        documents = [
            {**d, "stringData": dict.fromkeys(d["stringData"], HIDDEN)} if "stringData" in d else d
            for d in documents
        ]
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=110)


class _Plain(yaml.SafeDumper):
    """Writes equal values out, each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
