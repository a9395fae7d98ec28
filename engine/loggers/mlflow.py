"""MLflow."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.loggers.base import Logger, RunInfo, kept_id

PARAMS_AT_ONCE, LONGEST_PARAM = 100, 500  # what every MLflow server takes
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


class MLflow(Logger):
    """Metrics, the recipe as parameters, and samples as artifacts of one MLflow run.

    Offline the run folder holds a database, `mlflow.db`, and the artifacts, `mlflow/`.
    """

    package = "mlflow"
    slow = True

    @classmethod
    def problem(cls, offline: bool, environ: Mapping[str, str]) -> str | None:
        if offline or environ.get("MLFLOW_TRACKING_URI"):
            return None
        return "no server: set MLFLOW_TRACKING_URI, or set run.log_offline"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric = Metric
        self.client = MlflowClient(f"sqlite:///{run.folder / 'mlflow.db'}" if run.offline else None)
        self.run_id = kept_id(run.folder, "mlflow", self._new_run)
        if not run.done:
            params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in run.config.items()]
            for start in range(0, len(params), PARAMS_AT_ONCE):
                self.client.log_batch(self.run_id, params=params[start : start + PARAMS_AT_ONCE])

    def _new_run(self) -> str:
        run = self.run
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            place = (run.folder / "mlflow").absolute().as_uri() if run.offline else None
            experiment_id = self.client.create_experiment(run.project, artifact_location=place)
        return str(self.client.create_run(experiment_id, run_name=run.name).info.run_id)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self.metric(metric_name(name), value, now_ms, step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=values)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        self.client.log_text(self.run_id, lines, f"samples/step_{step}.jsonl")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "FAILED")


def metric_name(name: str) -> str:
    """A metric's name in the characters that MLflow takes: `mean@1` becomes `mean_at_1`."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
