"""TensorBoard event files in the run folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.loggers.base import Logger, RunInfo, table

MOST_ROWS = 20  # of a table that a person reads in TensorBoard


class TensorBoard(Logger):
    """`tensorboard/`: metrics as scalars, the first samples as a table. A run that goes on hides later steps
    of before."""

    package = "tensorboard"
    slow = True

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.done + 1 if run.done else None
        )
        self.writer.add_text("recipe", f"```json\n{json.dumps(run.config, indent=1, default=str)}\n```")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, cells = table(rows[:MOST_ROWS])
        lines = [names, ["---"] * len(names), *cells]
        text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        self.writer.add_text("val/samples", text, step)

    def close(self, finished: bool) -> None:
        self.writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
