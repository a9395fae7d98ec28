"""Weights & Biases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.loggers.base import Logger, RunInfo, kept_id, table

LOGIN = "api.wandb.ai"  # as `wandb login` notes it in ~/.netrc


class Wandb(Logger):
    """Metrics and sample tables of one W&B run; offline they lie in `wandb/`, for `wandb sync`."""

    package = "wandb"
    slow = True

    @classmethod
    def problem(cls, offline: bool, environ: Mapping[str, str]) -> str | None:
        if offline or environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in ("offline", "disabled"):
            return None
        netrc = Path(environ.get("NETRC", "~/.netrc")).expanduser()
        host = environ.get("WANDB_BASE_URL", f"https://{LOGIN}").partition("://")[2].split("/")[0]
        if netrc.is_file() and host in netrc.read_text():
            return None
        return f"no key for {host}: set WANDB_API_KEY, run `wandb login`, or set run.log_offline"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        import wandb

        self.tables = wandb.Table
        self.session = wandb.init(
            project=run.project,
            name=run.name,
            id=kept_id(run.folder, "wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline" if run.offline else None,
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.session.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, cells = table(rows)
        cells = [
            [cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in cells
        ]
        self.session.log({"val/samples": self.tables(columns=names, data=cells)}, step=step)

    def close(self, finished: bool) -> None:
        self.session.finish(exit_code=0 if finished else 1)
