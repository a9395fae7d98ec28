"""What `check` finds of this machine and of services: real sockets and folders, disks that are said full."""

import json
import re
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from rolemesh.engine.ray.session import longest_socket_path
from rolemesh.launch import preflight
from rolemesh.launch.check import check_recipe
from rolemesh.launch.check_report import CheckReport
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.run_lock import only_run_in
from tests.tiny import tiny_checkpoint

GIB = 2**30
RECIPE = """
run: {dir: run, device: cpu, steps: 10}
data: {train_files: [train.jsonl], max_prompt_tokens: 16}
algorithm: grpo
batch: {prompts: 8, samples_per_prompt: 2}
lengths: {max_response_tokens: 16}
actor: {path: actor}
reward: reward.py:compute_score
"""
SERVICE = """
reward:
  kind: remote
  endpoints: [URL, "http://no-such-host.invalid:5000"]
  on_failure: raise
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("preflight")
    tiny_checkpoint(root / "actor")
    (root / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+1="}) for i in range(20)) + "\n")
    (root / "reward.py").write_text("def compute_score(*args):\n    return 0.0\n")
    return root


def check(folder: Path, *overrides: str, text: str = RECIPE, offline: bool = False) -> CheckReport:
    return check_recipe(parse_recipe(text, folder, overrides), offline=offline)


def found(report: CheckReport, area: str, state: str) -> str:
    """The rows of an area with that state."""
    return "\n".join(row.text for row in report.rows if (row.area, row.state) == (area, state))


def say_free(monkeypatch, free_bytes: float, total_bytes: float = 100 * GIB) -> None:
    usage = namedtuple("usage", "total used free")
    said = usage(total_bytes, total_bytes - free_bytes, free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: said)


def test_the_table_has_each_area_once_and_ends_with_the_verdict(folder):
    report = check(folder)
    assert report.problems == [], report.text()
    lines = report.text().splitlines()
    areas = [line.split("  ")[0] for line in lines[:-1] if not line.startswith(" ")]
    assert len(areas) == len(set(areas))
    assert {"data", "placement", "batch", "memory", "run folder", "temp dir", "ports"} <= set(areas)
    assert lines[-1] == "ok"
    assert not {"run folder", "temp dir", "ports"} & {row.area for row in check(folder, offline=True).rows}


def test_every_problem_is_told_at_once(folder, monkeypatch):
    say_free(monkeypatch, 0)
    report = check(
        folder,
        "actor.path=none",
        "data.prompt_key=question",
        "run.save_every=1",
        text=RECIPE.replace("reward: reward.py:compute_score", SERVICE.replace("URL", "http://127.0.0.1:1")),
    )
    wrong = {row.area for row in report.rows if row.state == "problem"}
    assert {"models", "data", "temp dir", "shared memory", "endpoints"} <= wrong
    assert report.text().splitlines()[-1] == f"{len(report.problems)} problems"


def test_checkpoints_that_the_disk_cannot_hold_are_refused_with_both_sizes(folder, monkeypatch):
    params = check(folder).plan and tiny_params(folder)
    each = 12 * params
    for keep, n in (("null", 10), ("2", 3), ("10", 10)):  # one more while the oldest of two is still there
        say_free(monkeypatch, n * each, n * each)
        monkeypatch.setattr(preflight, "_LEAST_TEMP_BYTES", 0)
        overrides = ("run.save_every=1", f"run.keep_last={keep}")
        assert found(check(folder, *overrides), "disk", "problem") == ""
        say_free(monkeypatch, n * each - 1, n * each)
        told = found(check(folder, *overrides), "disk", "problem")
        assert "set run.keep_last" in told
        assert f"{each / GIB:.3g} GiB (actor)" in told
    say_free(monkeypatch, 0)
    assert found(check(folder), "disk", "problem") == "", "nothing is saved"


def tiny_params(folder: Path) -> int:
    from rolemesh.launch.checkpoints import read_checkpoint

    return read_checkpoint(str(folder / "actor")).shape.n_params


def test_adapters_alone_make_small_checkpoints(folder):
    whole = found(check(folder, "run.save_every=1"), "disk", "ok")
    adapters = found(check(folder, "run.save_every=1", "actor.lora.rank=1"), "disk", "ok")
    sizes = [float(text.split(" GiB")[0].removeprefix("checkpoints of ")) for text in (whole, adapters)]
    assert sizes[1] < sizes[0] / 4


def test_temporary_folders_that_are_full_or_too_long_are_told_with_the_key(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        say_free(patch, 10 * 2**20)
        assert "is full (10 MiB free)" in found(check(folder), "temp dir", "problem")
        say_free(patch, 3 * GIB)
        assert "3.0% of its disk free (3 GiB)" in found(check(folder), "temp dir", "note")
    long = tmp_path / ("x" * 80)
    assert "by a short link in" in found(check(folder, f"run.temp_dir={long}"), "temp dir", "ok")
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(long))
    told = found(check(folder), "temp dir", "problem")
    assert f"paths of {longest_socket_path(long)} characters, the system allows 107; set TMPDIR" in told
    (tmp_path / "file").write_text("")
    told = found(check(folder, f"run.temp_dir={tmp_path}/file/ray"), "temp dir", "problem")
    assert "run.temp_dir: " in told
    assert "is not a writable folder" in told


def test_services_that_do_not_answer_are_named_and_one_endpoint_is_enough(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = RECIPE.replace(
            "reward: reward.py:compute_score", SERVICE.replace("URL", f"http://localhost:{port}")
        )
        report = check(folder, text=text)
        assert report.problems == []
        assert "takes connections" in found(report, "endpoints", "ok")
        assert "the name no-such-host.invalid does not resolve" in found(report, "endpoints", "note")
    told = found(check(folder, text=text), "endpoints", "problem")
    assert f"nothing answers at localhost:{port} (Connection refused)" in told
    assert "reward.endpoints[1]: http://no-such-host.invalid:5000" in told
    assert check(folder, text=text, offline=True).problems == []


def test_an_endpoint_behind_a_proxy_is_left_to_it(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    assert preflight._unreachable("http://no-such-host.invalid:5000") == ""
    monkeypatch.setenv("no_proxy", "no-such-host.invalid")
    assert "does not resolve" in preflight._unreachable("http://no-such-host.invalid:5000")


def test_an_endpoint_may_have_an_ipv6_address():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 in this Python")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with server:
        url = f"http://[::1]:{server.getsockname()[1]}/get_reward"
        assert preflight._unreachable(url) == ""
    assert "nothing answers at ::1:" in preflight._unreachable(url)


def test_another_ray_on_the_default_port_is_told_of_and_ports_are_counted(folder, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(preflight, "RAY_PORT", server.getsockname()[1])
        assert "this run has a cluster of its own" in found(check(folder), "ports", "note")
    assert found(check(folder), "ports", "note") == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert "RAY_ADDRESS is 10.0.0.9:6379, and not followed" in found(check(folder), "ports", "note")
    assert preflight._free_ports() > 100
    monkeypatch.setattr(preflight, "_free_ports", lambda: 20)
    assert "20 ports are free" in found(check(folder), "ports", "problem")


def test_a_run_folder_that_is_in_use_or_cannot_be_made_is_a_problem(folder, tmp_path):
    with only_run_in(tmp_path / "run"):
        told = found(check(folder, f"run.dir={tmp_path / 'run'}"), "run folder", "problem")
        assert "is in use by another run, process" in told
    assert check(folder, f"run.dir={tmp_path / 'run'}").problems == []
    (tmp_path / "file").write_text("")
    assert "cannot be made" in found(check(folder, f"run.dir={tmp_path}/file/run"), "run folder", "problem")


def test_chat_prompts_need_a_chat_template(folder, tmp_path):
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows) + "\n")
    chat = f"data.train_files=[{tmp_path / 'chat.jsonl'}]"
    assert "has no chat template" in found(check(folder, chat), "data", "problem")
    shutil.copytree(folder / "actor", tmp_path / "actor")
    (tmp_path / "actor/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert check(folder, chat, f"actor.path={tmp_path / 'actor'}").problems == []


def test_a_judges_template_is_read_before_the_run(folder, tmp_path):
    (tmp_path / "judge.jinja").write_text("Is {{ answer }} good?")
    judge = f"""
reward:
  kind: judge
  model: m
  endpoints: ["http://127.0.0.1:1"]
  on_failure: raise
  judge: {{template: {tmp_path / "judge.jinja"}}}
"""
    text = RECIPE.replace("reward: reward.py:compute_score", judge)
    assert "uses ['answer']; it can use" in found(check(folder, text=text), "services", "problem")


def test_low_limits_are_noted(folder, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert "ulimit -n 65536" in found(check(folder), "limits", "note")


def test_the_table_shows_no_secret(folder, monkeypatch):
    monkeypatch.setenv("RM_TOKEN", "a-secret-of-this-test")
    text = RECIPE.replace(
        "reward: reward.py:compute_score",
        SERVICE.replace("URL", "http://me:a-secret-of-this-test@127.0.0.1:1"),
    )
    said = check(folder, text=text).text()
    assert "http://***@127.0.0.1:1" in said
    assert "a-secret-of-this-test" not in said


def test_a_checkpoint_is_told_with_its_size_its_time_and_what_is_free(folder):
    told = found(check(folder, "run.save_every=1"), "disk", "ok")
    assert re.search(r"checkpoints of [\d.e-]+ GiB \(actor\), 10 kept", told)
    assert re.search(r"\([\d.e+]+ GiB free\); one writer takes [\d.e-]+ s for one at [\d.e+]+ MB/s", told)


def test_models_to_stage_have_to_fit_on_this_nodes_disk(folder, monkeypatch):
    stage = f"run.stage={folder}/disk"
    assert "run.stage: " in found(check(folder, stage), "disk", "ok")
    say_free(monkeypatch, 1 << 10)
    told = found(check(folder, stage), "disk", "problem")
    assert re.search(r"GiB to copy, \S+ has 9\.54e-07 GiB free: free space there, or set run\.stage", told)
