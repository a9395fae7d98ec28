"""Environment variables of a run: a launcher's, which never get in, and those that go along."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# A launcher (torchrun, Slurm through torchrun) describes its own world in these: a run must not read it.
LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
BLOCKED = (*LAUNCHER, "MASTER_*", "TORCHELASTIC_*")
INTERFACE = "ROLEMESH_INTERFACE"
THREADS = "OMP_NUM_THREADS"  # torchrun sets it where the user has not: only the launcher's is blocked
FORWARDED = (
    "NCCL_*", "UCX_*", "GLOO_*", "HF_*", INTERFACE, THREADS,
    "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip
OF_LOGGERS: Mapping[str, str] = {"wandb": "WANDB_*", "mlflow": "MLFLOW_*"}
OURS = ("RAY_*", "CUDA_VISIBLE_DEVICES")  # the run sets these itself


@dataclass(frozen=True)
class Passage:
    """The environment of what a launch starts: `values` go along, the variables `blocked` do not."""

    values: Mapping[str, str]
    blocked: tuple[str, ...]

    def lines(self, told: Iterable[str] = ()) -> list[str]:
        """Both lists, by name; `told` are names that the recipe sets itself (run.env)."""
        forwarded = sorted({*self.values, *told})
        return [
            f"forwarded: {', '.join(forwarded) or 'none is set'}",
            f"blocked: {', '.join(self.blocked) or 'none is set'} (a launcher's: "
            f"{', '.join(BLOCKED[:3])}, ..., {', '.join(BLOCKED[-2:])}, an {THREADS} that torchrun sets)",
        ]


def passage(environ: Mapping[str, str], more: Sequence[str] = ()) -> Passage:
    """What of `environ` goes along: FORWARDED and `more`, names or patterns such as `AWS_*`."""
    blocked = tuple(sorted(name for name in environ if matches(name, BLOCKED)))
    if "LOCAL_RANK" in environ and THREADS in environ:  # this shell is a torchrun's process
        blocked = tuple(sorted((*blocked, THREADS)))
    wanted = (*FORWARDED, *more)
    values = {n: v for n, v in environ.items() if n not in blocked and matches(n, wanted)}
    return Passage(dict(sorted(values.items())), blocked)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a variable's name is one of the names or patterns; cases differ."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
