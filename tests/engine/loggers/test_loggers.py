"""Loggers by name; the packages of services are stood in for by modules that write down their calls."""

import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest

from rolemesh.engine.loggers import LOGGERS, Logger, Loggers, RunInfo, guard, logger_problems
from rolemesh.engine.run_log import RunLog

ROWS = [
    {"source": "a", "prompt": "1 | 2", "response": "x\ny", "score": 1.0},
    {"source": "b", "prompt": "3", "response": "z", "score": 0.0, "acc": True},
]


def log_steps(run: RunLog, steps: int = 6) -> None:
    for step in range(1, steps + 1):
        run.metrics(step, {"loss": 1.0 / step, "nan": math.nan})


def told(folder: Path, names: list[str], **options) -> tuple[RunLog, list[str]]:
    lines: list[str] = []
    info = RunInfo(folder, name="run", steps=6, shown=("loss",), write=lines.append, **options)
    return RunLog(folder, Loggers(names, info)), lines


def test_console_and_file_have_every_step(tmp_path):
    run, lines = told(tmp_path, ["console", "jsonl"])
    log_steps(run)
    run.loggers.close(finished=True)
    assert lines == [f"step {step}/6 loss {1 / step:.4g}" for step in range(1, 7)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert rows[2] == {"step": 3, "loss": 1 / 3, "nan": None}
    assert len(rows) == 6


def test_without_names_metrics_are_a_file_of_the_run_folder(tmp_path):
    log_steps(RunLog(tmp_path), 2)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
def test_a_logger_that_fails_at_step_3_is_told_once_and_the_others_miss_nothing(tmp_path, monkeypatch, slow):
    done: list[object] = []

    class Failing(Logger):
        def metrics(self, step, metrics):
            if step >= 3:
                raise OSError(f"no room, password=hunter2hunter2 at step {step}")
            done.append(step)

        def close(self, finished):
            done.append(finished)

    Failing.slow = slow
    monkeypatch.setattr("rolemesh.engine.loggers.LOGGERS", {**LOGGERS, "failing": Failing})
    run, lines = told(tmp_path, ["failing", "console", "jsonl"])
    log_steps(run)
    run.loggers.close(finished=True)
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == 1
    assert "logger failing failed: OSError('no room, password=***" in warnings[0]
    assert "hunter2" not in warnings[0]
    assert len(lines) == 6 + 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert done == [1, 2, True]


@pytest.mark.parametrize("error", [RuntimeError("no server"), SystemExit(1)])
def test_a_logger_that_does_not_start_is_told_once(tmp_path, monkeypatch, error):
    class Absent(Logger):
        def __init__(self, run):
            raise error

    monkeypatch.setattr("rolemesh.engine.loggers.LOGGERS", {"absent": Absent})
    run, lines = told(tmp_path, ["absent"])
    log_steps(run)
    run.loggers.close(finished=False)
    assert len(lines) == 1
    assert "logger absent did not start" in lines[0]


def test_a_logger_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path, monkeypatch):
    released = threading.Event()

    class Hanging(Logger):
        slow = True

        def metrics(self, step, metrics):
            released.wait(60)

    monkeypatch.setattr("rolemesh.engine.loggers.LOGGERS", {"hanging": Hanging})
    monkeypatch.setattr(guard, "WAITING", 3)
    monkeypatch.setattr(guard, "CLOSE_S", 0.2)
    run, lines = told(tmp_path, ["hanging"])
    start = time.monotonic()
    log_steps(run, 20)
    run.loggers.close(finished=True)
    released.set()
    assert time.monotonic() - start < 20  # the logger alone would take 60 s per step
    assert len(lines) == 1
    assert "calls behind" in lines[0]


def test_the_end_of_the_block_says_whether_the_run_finished(tmp_path, monkeypatch):
    ends: list[bool] = []

    class Ending(Logger):
        def close(self, finished):
            ends.append(finished)

    monkeypatch.setattr("rolemesh.engine.loggers.LOGGERS", {"ending": Ending})
    with Loggers(["ending"], RunInfo(tmp_path)):
        pass
    with pytest.raises(ValueError, match="broken"), Loggers(["ending"], RunInfo(tmp_path)):
        raise ValueError("broken")
    assert ends == [True, False]


def test_what_is_missing_is_said_with_the_package_or_the_login(tmp_path, monkeypatch):
    monkeypatch.setattr("rolemesh.engine.loggers.installed", lambda package: not package)
    found = list(logger_problems([*LOGGERS, "tensorbord"], offline=True, environ={}))
    for package in ("tensorboard", "wandb", "mlflow"):
        (line,) = [line for line in found if line.startswith(package)]
        assert f"needs the package {package}, which is not installed: pip install" in line
    assert "no logger is named tensorbord" in found[-1]
    assert len(found) == 4
    monkeypatch.setattr("rolemesh.engine.loggers.installed", lambda package: True)
    environ = {"NETRC": str(tmp_path / "netrc")}
    online = list(logger_problems(["wandb", "mlflow"], offline=False, environ=environ))
    assert "WANDB_API_KEY" in online[0]
    assert "MLFLOW_TRACKING_URI" in online[1]
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:5000"
    assert not list(logger_problems(["wandb", "mlflow"], offline=False, environ=environ))
    assert not list(logger_problems(["wandb", "mlflow"], offline=True, environ={}))


STAND_INS = {
    "wandb": """
from calls import calls
class Table:
    def __init__(self, columns, data): self.columns, self.data = columns, data
class Run:
    def log(self, values, step): calls.append(("log", values, step))
    def finish(self, exit_code): calls.append(("finish", exit_code))
def init(project, name, id, resume, dir, config, mode):
    calls.append(("init", project, name, id, resume, dir, config, mode))
    return Run()
""",
    "mlflow": """
from types import SimpleNamespace
from calls import calls
class MlflowClient:
    def __init__(self, uri): calls.append(("client", uri))
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name, artifact_location):
        calls.append(("experiment", name, artifact_location)); return "7"
    def create_run(self, experiment_id, run_name):
        calls.append(("run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    def log_batch(self, run_id, metrics=(), params=()):
        calls.append(("batch", run_id, [m[:2] + m[3:] for m in metrics], params))
    def log_text(self, run_id, text, file): calls.append(("text", run_id, text, file))
    def set_terminated(self, run_id, status): calls.append(("end", run_id, status))
""",
    "mlflow.entities": "def Metric(*values): return values\ndef Param(*values): return values\n",
}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What the stood-in packages were called with."""
    packages = tmp_path / "packages"
    for name, text in STAND_INS.items():
        folder = packages / name.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    (packages / "calls.py").write_text("calls = []\n")
    monkeypatch.syspath_prepend(packages)
    names = [*STAND_INS, "calls"]
    before = {name: sys.modules.pop(name, None) for name in names}
    import calls as module

    yield module.calls
    for name in names:
        sys.modules.pop(name, None)
        if before[name] is not None:
            sys.modules[name] = before[name]


def test_wandb_gets_the_run_its_steps_and_its_samples(tmp_path, calls):
    for _ in range(2):  # the second goes on with the first's run
        run, lines = told(tmp_path, ["wandb"], config={"run.seed": 1})
        run.metrics(1, {"loss": 0.5})
        run.save_samples(1, ROWS)
        run.loggers.close(finished=True)
        assert lines == []
    init, log, samples, finish = calls[:4]
    assert init[1:3] == ("rolemesh", "run")
    assert init[4:] == ("allow", str(tmp_path), {"run.seed": 1}, "offline")
    assert log == ("log", {"loss": 0.5}, 1)
    assert samples[1]["val/samples"].columns == ["source", "prompt", "response", "score", "acc"]
    assert samples[1]["val/samples"].data[0] == ["a", "1 | 2", "x\ny", 1.0, None]
    assert finish == ("finish", 0)
    assert calls[4][3] == init[3]


def test_mlflow_gets_the_run_its_steps_and_its_samples(tmp_path, calls):
    config = {f"key{i}": i for i in range(150)}
    for done in (0, 3):
        run, lines = told(tmp_path, ["mlflow"], config=config, done=done)
        run.metrics(done + 1, {"val-core/a b/acc/mean@1": 0.5})
        run.save_samples(done + 1, ROWS)
        run.loggers.close(finished=False)
        assert lines == []
    assert calls[0] == ("client", f"sqlite:///{tmp_path}/mlflow.db")
    assert calls[1] == ("experiment", "rolemesh", (tmp_path / "mlflow").as_uri())
    assert [call[0] for call in calls].count("run") == 1
    params = [call[3] for call in calls if call[0] == "batch" and call[3]]
    assert [len(some) for some in params] == [100, 50]
    assert ("batch", "r1", [("val-core/a b/acc/mean_at_1", 0.5, 4)], ()) in calls
    assert ("end", "r1", "FAILED") in calls
    (text,) = [call[2] for call in calls if call[-1] == "samples/step_4.jsonl"]
    assert [json.loads(line) for line in text.splitlines()] == ROWS


def test_tensorboard_writes_scalars_and_samples_that_it_reads_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, lines = told(tmp_path, ["tensorboard"])
    log_steps(run)
    run.save_samples(6, ROWS)
    run.loggers.close(finished=True)
    assert lines == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, 7)]
    assert "val/samples/text_summary" in events.Tags()["tensors"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_real_service_logs_offline_into_the_run_folder(tmp_path, name):
    pytest.importorskip(name)
    run, lines = told(tmp_path, [name], config={"run.seed": 1})
    log_steps(run)
    run.save_samples(6, ROWS)
    run.loggers.close(finished=True)
    assert lines == []
    assert list(tmp_path.glob("wandb/offline-run-*" if name == "wandb" else "mlflow.db"))
