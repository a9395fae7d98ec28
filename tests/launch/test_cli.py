"""The command line: exit codes, messages, and how quickly it answers."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.launch import cli
from rolemesh.launch.cli import main
from rolemesh.launch.fields import RecipeError

BAD = "actor: {pth: x}\ndata: a.jsonl\nreward: r\n"


def rolemesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: those that are about processes of their own are below."""
    done = CliRunner().invoke(main, arguments)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def test_help_loads_none_of_the_heavy_libraries():
    code = (
        "import sys; from typer.testing import CliRunner; from rolemesh.launch.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_bad_recipe_exits_with_2_and_says_what_was_meant(command: str, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(BAD)
    done = rolemesh(command, str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert "did you mean actor.path?" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_adds_the_stack(tmp_path: Path):
    done = rolemesh("--debug", "check", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: RecipeError: no recipe at")


@pytest.mark.parametrize("command", ["check", "train"])
def test_the_address_of_a_cluster_is_the_recipes_key(command: str, tmp_path: Path, monkeypatch):
    seen = []

    def look(recipe, **_):
        seen.append(recipe.run.address)
        raise RecipeError("seen")

    monkeypatch.setattr("rolemesh.launch.check.check_recipe", look)
    (tmp_path / "r.yaml").write_text(
        "algorithm: grpo\ndata: a.jsonl\nactor: a\nreward: r.py:f\nbatch: {samples_per_prompt: 2}\n"
    )
    done = CliRunner().invoke(main, [command, str(tmp_path / "r.yaml"), "--address", "10.0.0.1:6379"])
    assert done.exit_code == 2
    assert seen == ["10.0.0.1:6379"]


def test_train_refuses_what_check_finds_before_anything_is_written(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "algorithm: grpo\ndata: none.jsonl\nactor: none\nreward: none\nbatch: {samples_per_prompt: 2}\n"
    )
    done = rolemesh("train", str(tmp_path / "r.yaml"), f"run.dir={tmp_path / 'run'}", "run.device=cpu")
    assert done.returncode == 2
    assert "problem: actor.path: no folder" in done.stdout
    assert not (tmp_path / "run").exists()


def test_check_says_what_sizes_were_left_to_their_default_and_how_many_other_keys(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "algorithm: grpo\ndata: none.jsonl\nactor: none\nreward: none\nbatch: {samples_per_prompt: 2}\n"
    )
    said = CliRunner().invoke(main, ["check", str(tmp_path / "r.yaml")]).stdout.splitlines()
    assert said[0].startswith("default: batch: prompts = ")
    assert "samples_per_prompt" not in said[0]
    assert any(re.fullmatch(r"default: \d+ other keys; --defaults lists them", line) for line in said)
    assert re.fullmatch(r"\d+ problems", said[-1])
    every = CliRunner().invoke(main, ["check", str(tmp_path / "r.yaml"), "--defaults"]).stdout
    assert "default: run: dir = " in every


def test_the_version_is_the_packages():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"rolemesh {version('rolemesh')}\n"


def test_usage_errors_exit_with_2():
    assert rolemesh("trian", "x").returncode == 2
    assert rolemesh("check").returncode == 2


def test_schema_prints_a_key_and_refuses_an_unknown_one():
    assert rolemesh("schema", "actor.layout.tp").stdout.startswith("actor.layout.tp: int")
    done = rolemesh("schema", "actor.layout.tpp")
    assert done.returncode == 2
    assert "did you mean actor.layout.tp?" in done.stderr


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("rank 3 died"), 1, "error: RuntimeError: rank 3 died"),
    ],
)
def test_failures_have_their_exit_code_and_no_stack(monkeypatch, capsys, error, code: int, said: str):
    monkeypatch.setattr("rolemesh.launch.describe.describe", lambda key: _raise(error))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["schema"])
    assert exit_.value.code == code
    assert capsys.readouterr().err.strip() == said


def test_causes_are_printed_down_to_the_first():
    try:
        try:
            raise ValueError("bad shape [2, 3]")
        except ValueError as error:
            raise RuntimeError("update_actor failed on rank 1") from error
    except RuntimeError as error:
        text = cli.describe_error(error)
    assert text.splitlines() == [
        "error: RuntimeError: update_actor failed on rank 1",
        "caused by: ValueError: bad shape [2, 3]",
    ]


def test_what_was_noted_on_an_error_is_printed_with_it():
    error = RuntimeError("rank 3 died")
    error.add_note("the run recovered once")
    assert cli.describe_error(error) == "error: RuntimeError: rank 3 died\nthe run recovered once"


def test_a_cause_that_the_error_quotes_is_not_said_twice():
    error = RuntimeError("reward failed on rank 0:\n  File x, line 1\nValueError: no score\nlog: worker.err")
    error.__cause__ = ValueError("no score")
    assert cli.describe_error(error).count("no score") == 1
    error.__cause__ = KeyError()
    assert cli.describe_error(error).endswith("caused by: KeyError: ")


def test_ctrl_c_ends_a_command_with_130():
    code = (
        "import time, rolemesh.launch.describe as d\n"
        "from rolemesh.launch.cli import main\n"
        "def wait(key):\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "d.describe = wait\n"
        "main(['schema'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"waiting"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
