"""What a run needs of this machine and of the services it calls, looked at before anything starts."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from rolemesh.engine.checkpoint.store import FOLDER
from rolemesh.engine.ray.session import longest_socket_path, too_long
from rolemesh.engine.staging import stage_bytes, staged_path
from rolemesh.launch.check_report import CheckReport, Row
from rolemesh.launch.doctor import limit_findings
from rolemesh.launch.reward_keys import scorers
from rolemesh.launch.run_lock import holder_of
from rolemesh.launch.schema import Recipe, Run
from rolemesh.launch.walltime import walltime_problems
from rolemesh.placement.layout import Layout
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.memory.lora import adapter_params
from rolemesh.placement.model import ModelShape

STATE_BYTES = 12  # of a trained number in a checkpoint: its weight and Adam's two moments, in fp32
RAY_PORT = 6379
_LEAST_TEMP_BYTES = 64 << 20
_LEAST_STORE_BYTES = 256 << 20  # of /dev/shm, a third of which Ray's object store takes: it wants 75 MiB
_SPARE_DISK = 0.05
_PORTS = 24  # that a Ray of one node listens on
_PORTS_PER_WORKER = 8
_SAMPLE_BYTES = 16 << 20
_CONNECT_S = 5.0
_LOOK_AT_ONCE = 16


def live_rows(recipe: Recipe, shapes: Mapping[str, ModelShape], report: CheckReport, steps: int) -> None:
    """Add what is found of this machine, of the checkpoints' disk, and of the recipe's endpoints.

    `shapes` are the models of the roles, `steps` those of the run (0: not known).
    """
    machine_rows(recipe.run, report)
    report.rows += checkpoint_rows(recipe.run, trained_numbers(recipe, shapes), steps, report.resume.path)
    if recipe.run.address is None:
        report.rows += stage_rows(
            recipe.run, [str(getattr(recipe, role).path) for role in shapes if role != "rollout"]
        )
    report.rows += endpoint_rows(recipe)


def trained_numbers(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> dict[str, int]:
    """How many numbers each trained role learns: those of its adapters, or of its whole model."""
    return {
        role: adapter_params(shape, Layout(), shape.n_layers, rank)
        if (rank := getattr(recipe, role).lora.rank)
        else shape.n_params
        for role, shape in shapes.items()
        if role in ("actor", "critic")
    }


def machine_rows(run: Run, report: CheckReport) -> None:
    """Add what is found of the run folder, and, for a cluster of the run's own, of temporary files, shared
    memory, limits and ports.
    """
    report.rows += _folder_rows(run)
    report.problem("walltime", walltime_problems(run))
    if run.address is not None:
        return
    n_workers = 0 if report.plan is None else report.plan.n_devices
    report.rows += [*_temp_rows(run), *_shared_memory_rows(), *_limit_rows(), *_port_rows(n_workers)]


def checkpoint_rows(run: Run, trained: Mapping[str, int], steps: int, resume: Path | None) -> Iterator[Row]:
    """Whether the disk of the run folder holds the checkpoints that will be kept, and the one being written.

    `trained` is how many numbers each trained role learns; `resume` the checkpoint to go on from, which is
    among those kept where it is the run's own.
    """
    if run.save_every == 0 or not trained:
        return
    each = STATE_BYTES * sum(trained.values())
    made = -(-steps // run.save_every)
    kept = made if run.keep_last is None else min(run.keep_last + run.keep_best, made or run.keep_last)
    folder = Path(run.dir) / FOLDER
    there = len(list(folder.glob("step_*"))) if resume is not None and resume.parent == folder else 0
    removes = run.keep_last is not None and made > kept
    to_come = max(1, kept + removes - there)
    free = shutil.disk_usage(_existing(folder)).free
    what = f"{kept or 'all'} kept" + (", one more while it is written" if removes else "")
    what = f"checkpoints of {_gib(each)} ({', '.join(trained)}), {what}"
    if each * to_come <= free:
        fits = f"{what}: {_gib(each * to_come)} to come fit on the disk of {run.dir} ({_gib(free)} free)"
        yield Row("disk", "ok", f"{fits}{_writing_time(each, _existing(folder))}")
        return
    yield Row(
        "disk",
        "problem",
        f"{what}: {_gib(each * to_come)} to come, but {_existing(folder)} has {_gib(free)} free: "
        f"set run.keep_last{' lower' * (run.keep_last is not None)}, or run.dir on another disk",
    )


def _writing_time(n_bytes: int, folder: Path) -> str:
    """How long one writer takes for so many bytes, by a file that is written there, synced and removed."""
    sample = bytes(_SAMPLE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            file.write(sample)
            file.flush()
            os.fsync(file.fileno())
            rate = len(sample) / (time.perf_counter() - begun)
    except OSError:  # the row of the run folder says why
        return ""
    return f"; one writer takes {n_bytes / rate:.3g} s for one at {rate / 1e6:.3g} MB/s, measured now"


def stage_rows(run: Run, models: Iterable[str]) -> Iterator[Row]:
    """Whether the models that run.stage copies fit on this node's disk; other nodes look for themselves."""
    if run.stage is None:
        return
    folders = sorted({path for path in models if Path(path).is_dir()})
    needed = sum(stage_bytes(path) for path in folders if not staged_path(path, run.stage).exists())
    there = _existing(Path(run.stage))
    free = shutil.disk_usage(there).free
    what = f"run.stage: {_gib(needed)} to copy, {there} has {_gib(free)} free"
    if needed > free:
        yield Row("disk", "problem", f"{what}: free space there, or set run.stage to another disk")
    elif not os.access(there, os.W_OK) or not there.is_dir():
        yield Row(
            "disk", "problem", f"run.stage: {run.stage} cannot be made: {there} is not a writable folder"
        )
    else:
        yield Row("disk", "ok", what)


def endpoint_rows(recipe: Recipe) -> Iterator[Row]:
    """Whether the services of the recipe answer; of several endpoints of one, one is enough to start with."""
    services = {section: keys.endpoints for section, keys, kind in scorers(recipe.reward) if keys.endpoints}
    if recipe.has_ref and recipe.ref.kind == "remote":
        services["ref"] = recipe.ref.endpoints
    with ThreadPoolExecutor(_LOOK_AT_ONCE) as looking:
        found = {name: list(looking.map(_unreachable, urls)) for name, urls in services.items()}
    for name, urls in services.items():
        for number, (url, why) in enumerate(zip(urls, found[name], strict=True)):
            if not why:
                yield Row("endpoints", "ok", f"{name}.endpoints[{number}]: {url} takes connections")
            else:
                state = "note" if not all(found[name]) else "problem"
                yield Row("endpoints", state, f"{name}.endpoints[{number}]: {url}: {why}")  # type: ignore[arg-type]


def _unreachable(url: str) -> str:
    """Why nothing answers at a URL; empty when something does."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""  # its proxy connects
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"the name {host} does not resolve on {socket.gethostname()} ({error.strerror})"
    last = ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(_CONNECT_S)
            try:
                probe.connect(address)
                return ""
            except OSError as error:
                last = error.strerror or str(error)
    return f"nothing answers at {host}:{port} ({last}): is the service started, and the port right?"


def _folder_rows(run: Run) -> Iterator[Row]:
    folder = Path(run.dir)
    parent = _existing(folder)
    if not os.access(parent, os.W_OK) or not parent.is_dir():
        yield Row("run folder", "problem", f"run.dir: {folder} cannot be made: {parent} is not writable")
    elif holder := holder_of(folder):
        yield Row("run folder", "problem", f"run.dir: {folder} {holder}")
    else:
        yield Row("run folder", "ok", str(folder))


def _temp_rows(run: Run) -> Iterator[Row]:
    system = tempfile.gettempdir()
    root = Path(run.temp_dir or system).absolute()
    key = "run.temp_dir" if run.temp_dir else "TMPDIR"
    there = _existing(root)
    usage = shutil.disk_usage(there)
    if not os.access(there, os.W_OK) or not there.is_dir():
        yield Row("temp dir", "problem", f"{key}: {root} cannot be written: {there} is not a writable folder")
    elif usage.free < _LEAST_TEMP_BYTES:
        yield Row(
            "temp dir",
            "problem",
            f"{key}: {root} is full ({usage.free / 2**20:.0f} MiB free), and Ray's files go there: free "
            "space, or set run.temp_dir to a folder of another disk",
        )
    elif usage.free < _SPARE_DISK * usage.total:
        yield Row(
            "temp dir",
            "note",
            f"{key}: {root} has {usage.free / usage.total:.1%} of its disk free ({_gib(usage.free)}): Ray "
            "refuses work on a full disk; set run.temp_dir to a folder of another one",
        )
    elif too_long(root) and too_long(Path(system), link=True):
        yield Row(
            "temp dir",
            "problem",
            f"TMPDIR: {system} is too long: Ray's sockets would have paths of {longest_socket_path(root)} "
            "characters, the system allows 107; set TMPDIR to a short folder such as /tmp",
        )
    else:
        by_link = f" (long: reached by a short link in {system})" if too_long(root) else ""
        yield Row("temp dir", "ok", f"{root}{by_link}")


def _shared_memory_rows() -> Iterator[Row]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Row("shared memory", "note", "no /dev/shm: Ray keeps objects in files, which is slower")
    elif (free := shutil.disk_usage(folder).free) < _LEAST_STORE_BYTES:
        yield Row(
            "shared memory",
            "problem",
            f"/dev/shm has {free / 2**20:.0f} MiB free, a run wants {_LEAST_STORE_BYTES >> 20}: batches go "
            "through it; remove stale files there, or give the container more (docker run --shm-size=16g)",
        )


def _limit_rows() -> Iterator[Row]:
    for finding in limit_findings():
        if finding.problem:
            text = f"{finding.name}: {finding.value}, {finding.problem}; fix: {finding.fix}"
            yield Row("limits", "note", text)


def _port_rows(n_workers: int) -> Iterator[Row]:
    """Every port of a run is one that was free; enough of them have to be."""
    wanted = _PORTS + _PORTS_PER_WORKER * n_workers
    free = _free_ports()
    if free is not None and free < wanted:
        yield Row(
            "ports",
            "problem",
            f"{free} ports are free (net.ipv4.ip_local_port_range), a run with {n_workers} workers takes up "
            f"to {wanted}: end other programs, or widen the range",
        )
    else:
        yield Row("ports", "ok", f"up to {wanted}, on loopback, each one that is free when it is taken")
    if _listens(RAY_PORT):
        yield Row(
            "ports",
            "note",
            f"port {RAY_PORT} is in use, maybe by another Ray: this run has a cluster of its own and leaves "
            f"that one alone (run.address=127.0.0.1:{RAY_PORT} would join it)",
        )
    if address := os.environ.get("RAY_ADDRESS"):
        yield Row("ports", "note", f"RAY_ADDRESS is {address}, and not followed: run.address would join it")


def _free_ports() -> int | None:
    """Ports that the system can still hand out; None where it does not say."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return None
    local = (line.split()[1] for table in tables for line in table.splitlines()[1:])
    used = {int(address.rpartition(":")[2], 16) for address in local}
    return high - low + 1 - len([port for port in used if low <= port <= high])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _gib(amount: float) -> str:
    return f"{amount / GIB:.3g} GiB"
