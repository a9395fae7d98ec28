"""The placement benchmark reads its rows right, and knows one pair and one crossover."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("prediction_placement", None)
    import prediction_placement

    return prediction_placement


def test_lengths_have_the_published_mean(bench):
    for mean, longest in ((582, 1408), (3070, 3968), (5600, 8064)):
        assert bench.responses(mean, longest).mean == pytest.approx(mean, rel=1e-6)


def test_layouts_are_read_as_published(bench):
    train, generate = bench.sizes("colocated TP,CP,EP,PP,VPP=[2,2,16,8,n/a] gen TP,PP=[16,1]")
    assert train == {"tp": 2, "cp": 2, "ep": 16, "pp": 8, "vpp": 1}
    assert generate == {"tp": 16, "pp": 1}
    assert bench.sizes("colocated sync") == ({}, {})


def test_every_pair_of_one_system_is_known_or_told(bench):
    rows = [r for r in bench.read("placement_pairs.csv") if r["source"].startswith(("NeMo", "verl"))]
    assert len(rows) == 14
    for row in rows:
        if row["pair"] in ("16", "17"):
            with pytest.raises(bench.SkippedError, match="not given"):
                bench.workload(row)
        else:
            assert bench.workload(row).samples in (512, 2048, 8192)


@pytest.mark.slow
def test_colocation_wins_small_and_splitting_comes_near_where_it_was_measured_to_win(bench):
    """HybridFlow, 13B: colocation was best on 16 GPUs, splitting on 96."""
    lead = {n: bench.times("13B", "13B", n, ("colocate", "split")) for n in (16, 96)}
    small, large = (lead[n]["split"] / lead[n]["colocate"] for n in (16, 96))
    assert small > 1.1
    assert large < 1.03
