"""A judge that the run places itself: real vLLM engines of a tiny model that writes at random."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from judged import TOKENIZER, batch, scores
from vllm_server import chat_checkpoint

from rolemesh.engine.errors import CallError
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.engine.ray.pools import ResourcePool
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.remote.http import Limits
from rolemesh.engine.rewards import build
from rolemesh.engine.rewards.judge_answer import Scale
from rolemesh.engine.rewards.judge_forms import Scores
from rolemesh.engine.rewards.judge_pairs import Pairwise
from rolemesh.engine.rollout.vllm import VLLMSpec
from rolemesh.engine.workers.judge import JudgeSpec, JudgeWorker
from rolemesh.placement.layout import Layout

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TENTHS = Scale(0, 1, step=0.1)
RESPONSES = ["4", "it is 4", "5", "no idea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    TOKENIZER.save_pretrained(folder / "actor")
    (folder / "judge").mkdir()
    chat_checkpoint(folder / "judge")
    return folder


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, ResourcePool]]:
    """By their number of ranks."""
    with local_cluster(3, object_store_bytes=2**29):
        pools = {n: ResourcePool([n], name_prefix=f"pool{n}", device="cpu") for n in (1, 2)}
        yield pools
        for pool in pools.values():
            pool.shutdown()


def judge_group(pool: ResourcePool, folder: Path, form: Scores | Pairwise, layout: Layout) -> RayWorkerGroup:
    limits = Limits(in_flight=8, retries=1, total_s=200)
    service = build.Service("reward", (), limits, "raise", None, 0.0, window=4)
    judge = build.Judge(
        service, "", form, None, None, {"temperature": 0.0, "max_tokens": 60}, "auto", 2, None, "strip"
    )
    engine = VLLMSpec(
        path=str(folder / "judge"),
        dtype="float32",
        max_tokens=2048,
        max_seqs=8,
        kv_tokens=8192,
        sleeps=True,
        tp=layout.tp,
    )
    spec = JudgeSpec(engine, judge, str(folder / "actor"))
    group = RayWorkerGroup(pool, RayClassWithInitArgs(JudgeWorker, spec), role="reward", layout=layout)
    group.init_model()
    return group


def test_samples_are_scored_on_the_scale_and_an_engine_that_dies_is_replaced(pools, folder):
    group = judge_group(pools[1], folder, Scores(TENTHS, reasoning=False), Layout())
    first = group.compute_score(batch(RESPONSES))
    assert all(any(score == pytest.approx(tenth) for tenth in TENTHS.values()) for score in scores(first))
    metrics = first.meta_info["metrics"]
    assert metrics["reward/questions"] == len(RESPONSES)
    assert metrics["reward/requests"] == len(RESPONSES) + 1  # one to find the constraint
    assert metrics["reward/parse_failures"] == metrics["reward/engine_restarts"] == 0

    ((pid,),) = group.ask("engine_pids")
    os.kill(pid, signal.SIGKILL)
    again = group.compute_score(batch(RESPONSES))
    assert again.meta_info["metrics"]["reward/engine_restarts"] == 1
    assert scores(again) == scores(first)
    assert group.ask("engine_pids") != [[pid]]

    with pytest.raises(CallError, match=r"a question of \d+ tokens: the engine takes 2048, question and"):
        group.compute_score(batch(["4" * 3000]))


@pytest.mark.slow
def test_two_engines_share_the_questions_about_pairs(pools, folder):
    group = judge_group(pools[2], folder, Pairwise(reasoning=False), Layout(dp=2))
    result: DataProto = group.compute_score(batch(RESPONSES, uids=["g"] * 4))
    assert sum(scores(result)) == pytest.approx(2)  # six pairs, each shares out one win: 6 / 3
    assert result.meta_info["metrics"]["reward/questions"] == 12
    assert len(set(group.ask("engine_pids")[0])) == 2
