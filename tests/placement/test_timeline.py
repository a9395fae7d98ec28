"""Overlap against closed forms, and the trace against the Chrome trace format."""

import json
import random

import pytest

from rolemesh.placement.timeline import Span, Timeline, TimelineError


def _timeline(*spans):
    """(name, pool, rank, start_s, end_s)"""
    return Timeline([Span(name, name, pool, rank, start, end) for name, pool, rank, start, end in spans])


def test_overlap_counts_time_in_which_both_compute_once_whatever_the_ranks():
    timeline = _timeline(
        ("actor", "a", 0, 0.0, 4.0),
        ("actor", "a", 1, 1.0, 5.0),
        ("critic", "b", 0, 3.0, 7.0),
        ("critic", "b", 1, 3.5, 6.0),
    )
    assert timeline.busy_s("actor") == 5.0
    assert timeline.overlap_s("actor", "critic") == timeline.overlap_s("critic", "actor") == 2.0


def test_turns_on_the_same_devices_do_not_overlap():
    timeline = _timeline(
        ("actor", "a", 0, 0.0, 2.0), ("critic", "a", 0, 2.0, 3.0), ("actor", "a", 0, 5.0, 6.0)
    )
    assert timeline.overlap_s("actor", "critic") == 0.0
    assert timeline.overlap_s("actor", "nobody") == 0.0


def test_overlap_equals_counting_ticks():
    rng = random.Random(0)
    for _ in range(100):
        timeline, ticks = Timeline(), {"x": set(), "y": set()}
        for _ in range(rng.randint(0, 8)):
            name, start, length = rng.choice("xy"), rng.randint(0, 30), rng.randint(0, 8)
            timeline.add(Span(name, "r", "p", rng.randint(0, 2), start, start + length))
            ticks[name] |= set(range(start, start + length))
        assert timeline.overlap_s("x", "y") == len(ticks["x"] & ticks["y"])
        assert timeline.busy_s("x") == len(ticks["x"])


def test_the_file_is_a_chrome_trace_with_a_process_per_pool_and_a_thread_per_rank(tmp_path):
    timeline = _timeline(("actor", "left", 0, 100.0, 102.5), ("actor", "left", 1, 100.5, 101.0))
    timeline.add(Span("values", "critic", "right", 0, 101.0, 103.0, {"tokens": 128}))
    timeline.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text() + "]")
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert float(names.pop(("process_labels", 0, 0))) == 100.0
    assert names == {
        ("process_name", 1, 0): "left",
        ("process_name", 2, 0): "right",
        ("thread_name", 1, 0): "rank 0",
        ("thread_name", 1, 1): "rank 1",
        ("thread_name", 2, 0): "rank 0",
    }
    assert [e for e in events if e["ph"] == "X"][2] == {
        "ph": "X",
        "name": "values",
        "cat": "critic",
        "pid": 2,
        "tid": 0,
        "ts": 1e6,
        "dur": 2e6,
        "args": {"tokens": 128},
    }


def test_a_timeline_survives_its_file_to_the_microsecond(tmp_path):
    rng = random.Random(1)
    timeline = Timeline()
    for i in range(50):
        start = 1.7e9 + rng.uniform(0, 1000)
        timeline.add(
            Span(f"op{i % 3}", "actor", f"pool{i % 2}", i % 4, start, start + rng.random(), {"step": i})
        )
    timeline.save(tmp_path / "t.json")
    loaded = Timeline.load(tmp_path / "t.json")
    for span, other in zip(timeline.spans, loaded.spans, strict=True):
        assert (span.name, span.role, span.pool, span.rank, span.args) == (
            other.name,
            other.role,
            other.pool,
            other.rank,
            other.args,
        )
        assert (other.start_s, other.end_s) == pytest.approx((span.start_s, span.end_s), rel=0, abs=1e-6)
    Timeline().save(tmp_path / "empty.json")
    assert Timeline.load(tmp_path / "empty.json") == Timeline()


def test_what_is_no_timeline_is_refused(tmp_path):
    with pytest.raises(TimelineError, match=r"ends at 1.0 s, before 2.0 s"):
        Span("a", "r", "p", 0, 2.0, 1.0)
    for text in ("[1, 2", "[1, 2]", '{"traceEvents": []}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(TimelineError, match=r"t.json is no timeline of ours"):
            Timeline.load(tmp_path / "t.json")
