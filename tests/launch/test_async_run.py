"""examples/async.yaml run by the command line: real Ray, generation and training on pools of their own."""

import json
import shutil
import signal
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from broken_runs import actor_of, start_run
from tiny import tiny_checkpoint

from rolemesh.launch.config import load_recipe
from rolemesh.launch.request import graph_of
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.schedule import ahead_of
from rolemesh.placement.simulator import SimulatedPool, simulate
from rolemesh.placement.timeline import Span, Timeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS = 5
OVERRIDES = (
    f"run.steps={STEPS}",
    "lengths.max_response_tokens=24",
    "batch.prompts=8",
    "batch.mini_batch_samples=32",
    "batch.micro_batch_tokens=256",
    "reward=reward.py:compute_score",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(c.isdigit() for c in solution_str))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The examples, and tiny models and prompts in the place of the quickstart's."""
    root = tmp_path_factory.mktemp("async")
    shutil.copytree(ROOT / "examples", root / "examples")
    (root / "reward.py").write_text(REWARD)
    assets = root / "runs" / "quickstart-assets"
    tiny_checkpoint(assets / "actor", layers=4, hidden=128)
    for name, n in (("train", 64), ("val", 4)):
        rows = [{"prompt": f"{i * 37 % 1000}>", "reward_model": {"ground_truth": str(i)}} for i in range(n)]
        (assets / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return root


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    return start_run(folder, *OVERRIDES, *overrides, recipe="examples/async.yaml")


def train(folder: Path, *overrides: str) -> str:
    process = start(folder, *overrides)
    try:
        output = process.communicate(timeout=550)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def metrics(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


@pytest.fixture(scope="module")
def run(folder) -> Path:
    train(folder, "run.validate_every=0")
    return folder / "runs" / "async"


def of_training(run: Path) -> Timeline:
    """The run's timeline without the look at the model before the first step, and the last validation."""
    spans = Timeline.load(run / "timeline.json").spans
    first: dict[tuple[str, str, int, int], Span] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if step := span.args["step"]:
            first.setdefault((span.name, span.role, span.rank, step), span)
    return Timeline(list(first.values()))


def length(spans: Iterable[Span]) -> float:
    spans = list(spans)
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def share_beside(timeline: Timeline, ahead: frozenset[str]) -> float:
    """Part of the generation of steps 2 and later during which others of the graph compute."""
    made = Timeline([span for span in timeline.spans if span.name == "generate" and span.args["step"] > 1])
    others = Timeline([span for span in timeline.spans if span.name not in ahead])
    both = Timeline(
        [*made.spans, *(Span("other", s.role, s.pool, s.rank, s.start_s, s.end_s) for s in others.spans)]
    )
    return both.overlap_s("generate", "other") / made.busy_s("generate")


def by_pool(spans: Iterable[Span]) -> dict[str, list[tuple[str, int]]]:
    """What begins on each pool, in that order; a transfer where it began first."""
    order: dict[str, list[tuple[str, int]]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        begun = order.setdefault(span.pool, [])
        if (name := (span.name, span.args["step"])) not in begun:
            begun.append(name)
    return order


def test_generation_goes_on_while_the_actor_learns_and_the_simulator_predicts_it(run: Path):
    """The same order on every pool, and nearly the same part of generation beside training, for a run's own
    seconds.
    """
    recipe = load_recipe(run / "recipe.yaml")
    graph, plan = graph_of(recipe), PlacementPlan.from_yaml((run / "plan.yaml").read_text())
    measured = of_training(run)
    share = share_beside(measured, ahead_of(graph))
    assert share > 0.5

    def seconds(name: str, step: int, seed: int) -> float:
        return length(s for s in measured.spans if s.name == name and s.args["step"] == step + 1)

    simulated = simulate(
        graph,
        seconds,
        [SimulatedPool(pool.name, pool.roles, pool.world) for pool in plan.pools],
        order=plan.order or None,
        steps=STEPS,
        staleness=recipe.schedule.staleness,
    ).timeline
    predicted = Timeline(
        [
            Span(s.name, s.role, s.pool, s.rank, s.start_s, s.end_s, {"step": s.args["step"] + 1})
            for s in simulated.spans
        ]
    )
    pools = [pool.name for pool in plan.pools]
    orders = by_pool(measured.spans), by_pool(predicted.spans)
    assert [orders[0][pool] for pool in pools] == [orders[1][pool] for pool in pools]
    assert share_beside(predicted, ahead_of(graph)) == pytest.approx(share, abs=0.2)


def test_each_token_is_one_update_old_but_the_first_steps(run: Path):
    rows = metrics(run)
    for step in range(1, STEPS + 1):
        ages = [rows[step][f"training/staleness/{what}"] for what in ("min", "mean", "max")]
        assert ages == [min(1, step - 1)] * 3
    assert rows[1]["training/rollout_probs_diff/max"] < 1e-4
    assert rows[2]["rollout_corr/rollout_is_max"] != 1.0
    assert statistics.mean(rows[step]["rollout_corr/k3_kl"] for step in range(2, STEPS + 1)) > 0


def test_stopped_by_sigterm_and_resumed_it_learns_what_the_unbroken_run_does(folder, run: Path):
    process = start(folder, "run.dir=runs/stopped", "run.validate_every=0")
    lines: list[str] = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith(f"step 2/{STEPS} ") and " elapsed, " not in line:  # done, not under way
                process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143, "".join(lines)
    finally:
        process.kill()
    stopped = folder / "runs" / "stopped"
    done = max(metrics(stopped))
    assert 2 <= done < STEPS
    assert (stopped / "checkpoints" / f"step_{done}" / "ahead.pt").exists()
    train(folder, "run.dir=runs/stopped", "run.validate_every=0", "--resume", "auto")
    one, other = metrics(run), metrics(stopped)
    for step in range(1, STEPS + 1):
        for name in set(one[step]) - {n for n in one[step] if n.startswith(("timing_s/", "perf/"))}:
            assert one[step][name] == other[step][name], (step, name)
    first, second = actor_of(run, STEPS), actor_of(stopped, STEPS)
    assert all(torch.equal(first[name], second[name]) for name in first)
