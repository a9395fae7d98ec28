"""The files of a run's folder on a disk that is full for a while."""

import json

from small_disk import fill, small_disk

from rolemesh.engine.loggers import Loggers, RunInfo
from rolemesh.engine.run_log import RunLog
from rolemesh.placement.timeline import Span, Timeline

STEPS_FULL = (3, 4)


def test_a_full_disk_costs_lines_but_neither_the_run_nor_the_files(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        told: list[str] = []
        log = RunLog(disk, Loggers(["jsonl"], RunInfo(disk, write=told.append)), told.append)
        for step in range(1, 6):
            if step == STEPS_FULL[0]:
                filler = fill(disk)
            if step == STEPS_FULL[-1] + 1:
                filler.unlink()
            log.spans([Span("generate", "rollout", f"pool {step}", 0, step, step + 0.5, {"x": "y" * 5000})])
            log.metrics(step, {"long": step} | {f"name {i}": i for i in range(500)})
            log.trained(step, range(2000), 4)
            log.save_samples(step, [{"prompt": "p" * 5000}])
        there = [step for step in range(1, 6) if step not in STEPS_FULL]
        for name in ("metrics.jsonl", "trained.jsonl"):
            rows = [json.loads(line) for line in (disk / name).read_text().splitlines()]
            assert [row["step"] for row in rows] == there
        spans = Timeline.load(disk / "timeline.json").spans
        assert [(span.pool, round(span.end_s, 3)) for span in spans] == [
            (f"pool {step}", step + 0.5) for step in there
        ]
    assert sum("timeline.json could not be written (No space left on device)" in line for line in told) == 1
    assert sum("logger jsonl failed" in line for line in told) == len(told) - 1 == 1
