"""Probes run in processes of their own: what crashes or hangs there is an error here."""

import sys

import pytest

from rolemesh.launch.health import kernels
from rolemesh.launch.health.links import link_findings
from rolemesh.launch.health.probes import ProbeError, probe


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the given code, for probes."""

    def make(code: str) -> str:
        (tmp_path / "made_up_probe.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "made_up_probe"

    return make


def test_a_probe_answers_from_its_own_process(module):
    code = "import sys\nif sys.argv[2] == '1': open(sys.argv[1] + '/answer.json', 'w').write(sys.argv[4])"
    assert probe(module(code), "17", world=2, limit_s=60) == 17


def test_a_probe_that_crashes_is_told_with_its_last_words(module):
    code = "import os, signal\nprint('about to fall', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(ProbeError, match="rank 0 ended with signal SIGSEGV: about to fall"):
        probe(module(code), limit_s=30)


def test_a_probe_that_hangs_is_ended_at_its_limit(module):
    with pytest.raises(ProbeError, match=r"not done within 0.3 s"):
        probe(module("import time; time.sleep(60)"), limit_s=0.3)


def test_our_kernels_agree_with_torch_and_a_changed_one_does_not(monkeypatch):
    (good,) = [kernels.judged(one) for one in kernels._cpp()]
    assert not good.problem
    assert "runs (" in good.value
    plain = kernels._results

    def changed(device):
        found = plain(device)
        return found if "ROLEMESH_KERNELS" in kernels.os.environ else [found[0] + 0.01, *found[1:]]

    monkeypatch.delenv("ROLEMESH_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_results", changed)
    (bad,) = [kernels.judged(one) for one in kernels._cpp()]
    assert "differs from torch" in bad.problem


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="gloo's loopback")
def test_two_processes_reduce_and_give_a_figure():
    (finding,) = link_findings()
    assert "over 2 ranks (gloo)" in finding.value
    assert "GB/s each way" in finding.value
    assert not finding.required
