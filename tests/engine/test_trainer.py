"""The training loop over worker groups in this process: what stops it early, and what counts in a step."""

import concurrent.futures
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import char_tokenizer

from rolemesh.engine.algorithms import FixedKLController
from rolemesh.engine.batch_ref import BatchRef, pack, unpack
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.refill import RefillError, RefillSpec
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.trainer import InitialKLError, Trainer, TrainerSpec
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.placement.layout import Layout
from rolemesh.placement.steps import step_graph
from rolemesh.placement.steps.operations import SEQUENCES

WIDTH = 3  # of a response


class Workers:
    """Worker groups for every role. `kl` is how far the reference is from the actor; `failed` are the prompts
    of which a sample gets no score. `calls` holds (method, rows of the batch, keywords) in order.
    """

    def __init__(self, kl: float = 0.0, failed: Sequence[str] = ()) -> None:
        self.kl, self.failed = kl, failed
        self.values: list[Any] = []
        self.calls: list[tuple[str, int, dict[str, Any]]] = []
        self.groups = {role: self.group(role) for role in ("actor", "rollout", "ref", "critic", "reward")}

    def store(self, data: DataProto) -> BatchRef:
        manifest, blocks = pack(data)
        first = len(self.values)
        self.values += blocks
        return manifest.stored(range(first, len(self.values)))

    def fetch(self, ref: BatchRef) -> DataProto:
        return unpack(ref, dict(enumerate(self.values)))

    def group(self, role: str) -> Any:
        workers = self

        class Group:
            resource_pool = SimpleNamespace(name=f"pool of {role}")
            layout = Layout(dp=2)

            def __getattr__(self, method: str) -> Any:
                return lambda argument, blocking=True, **keywords: workers.call(method, argument, keywords)

            def export_weights(self, blocking: bool) -> DataProtoFuture:
                return workers.done("export_weights", None)

            def checkpoint(self) -> list[str]:
                return [f"models/{role}, revision 1"]

            def save_hf(self, path: str) -> None:
                pass

        return Group()

    def call(self, method: str, argument: Any, keywords: dict[str, Any]) -> DataProtoFuture:
        self.calls.append((method, len(argument) if isinstance(argument, BatchRef) else 0, keywords))
        if not isinstance(argument, BatchRef):
            return self.done(method, None)
        data = self.fetch(argument)
        if method.startswith("update"):
            busy = [rows for rows in keywords["rows"] if len(rows)]
            return self.done(method, [{f"{method}/rows": float(sum(map(len, busy)))}] * len(busy))
        return self.done(method, self.store(getattr(self, method)(data)))

    def done(self, method: str, value: Any) -> DataProtoFuture:
        source: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        source.set_result(Outcome(value, (RankSpan(0, 1.0, 2.0, 0),)))
        return DataProtoFuture(source, name=method, fetch=lambda ref, limit_s: None, timeout_s=10.0)

    def generate_sequences(self, data: DataProto) -> DataProto:
        ids = data.batch["input_ids"]
        responses = torch.full((len(data), WIDTH), 5)
        mask = torch.ones_like(responses)
        columns = {
            "prompts": ids,
            "input_ids": torch.cat([ids, responses], 1),
            "attention_mask": torch.cat([data.batch["attention_mask"], mask], 1),
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": torch.zeros(mask.shape),
            "weight_versions": torch.zeros_like(mask),
        }
        columns["position_ids"] = columns["attention_mask"].cumsum(1) - 1
        return DataProto.from_dict(columns)

    def column(self, data: DataProto, name: str, value: float = 0.0) -> DataProto:
        return DataProto.from_dict({name: torch.full(data.batch["responses"].shape, value)})

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.column(data, "old_log_probs", -1.0)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.column(data, "ref_log_prob", -1.0 - self.kl)

    def compute_values(self, data: DataProto) -> DataProto:
        return self.column(data, "values")

    def compute_score(self, data: DataProto) -> DataProto:
        first, dropped = set(), []
        for uid in data.non_tensor_batch["uid"]:
            dropped.append(uid in self.failed and uid not in first)  # one sample of the prompt
            first.add(uid)
        scores = {"rm_scores": torch.ones(data.batch["responses"].shape), "dropped": torch.tensor(dropped)}
        return DataProto.from_dict(scores)

    def compute_advantage(self, data: DataProto) -> DataProto:
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns")
        return DataProto.from_dict({n: torch.zeros(data.batch["response_mask"].shape) for n in names})

    def compute_baseline(self, data: DataProto) -> DataProto:
        failed = [uid in self.failed for uid in data.non_tensor_batch["uid"]]
        return DataProto.from_dict(
            {"reward_baselines": torch.zeros(len(data)), "baseline_dropped": torch.tensor(failed)}
        )

    def generate_baseline(self, data: DataProto) -> DataProto:
        made = self.generate_sequences(
            DataProto.from_dict(
                {"input_ids": data.batch["prompts"], "attention_mask": data.batch["attention_mask"][:, :2]}
            )
        )
        return DataProto.from_dict({f"baseline_{name}": made.batch[name] for name in SEQUENCES})


def prompts() -> DataProto:
    ids = torch.tensor([[1, 7]] * 3)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids * 0}
    return DataProto.from_dict(tensors, {"raw_prompt": np.array(list("abc"), dtype=object)})


def fit(folder: Path, workers: Workers, *, limit: float | None = None, validate: bool = False) -> list[dict]:
    """Train for two steps of 3 prompts with 2 samples each; what metrics.jsonl says."""
    Trainer(
        spec=TrainerSpec(
            steps=2,
            samples_per_prompt=2,
            mini_batch_samples=2,
            advantage=AdvantageSpec(),
            expect_initial_kl=limit,
        ),
        graph=step_graph("ppo", reference=True, reward="remote", kl_in="reward"),
        groups=workers.groups,
        prompts=iter([prompts(), prompts()]),
        val_prompts=prompts() if validate else None,
        tokenizer=char_tokenizer(),
        kl=FixedKLController(0.1),
        store=workers.store,
        fetch=workers.fetch,
        log=RunLog(folder),
    ).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def keywords(workers: Workers, method: str) -> list[dict[str, Any]]:
    return [given for name, _, given in workers.calls if name == method]


@pytest.mark.parametrize("kl", [0.3, -0.3])
def test_a_reference_too_far_from_the_actor_stops_before_anything_is_updated(tmp_path, kl):
    workers = Workers(kl=kl)
    with pytest.raises(InitialKLError) as caught:
        fit(tmp_path, workers, limit=0.2)
    assert f"is {kl:.4g} nats per token, over 18 tokens; ref.expect_initial_kl allows 0.2" in str(
        caught.value
    )
    assert "The actor is models/actor, revision 1, the reference is models/ref, revision 1" in str(
        caught.value
    )
    assert not {name for name, _, _ in workers.calls} & {"update_actor", "update_critic", "compute_score"}


def test_a_reference_that_is_near_enough_is_compared_once_and_nothing_runs_twice(tmp_path):
    workers = Workers(kl=0.1)
    fit(tmp_path, workers, limit=0.2)
    names = [name for name, _, _ in workers.calls if name != "load_weights"]
    assert len(names) == 2 * len(set(names)) == 16
    assert names.index("compute_ref_log_prob") < names.index("compute_score")  # the first step's


def test_a_reference_that_is_not_a_number_is_too_far(tmp_path):
    with pytest.raises(InitialKLError, match="is nan nats per token"):
        fit(tmp_path, Workers(kl=float("nan")), limit=0.2)


def test_all_samples_of_a_prompt_without_a_score_are_in_no_update(tmp_path):
    workers = Workers(failed=["1"])
    _, first, _ = fit(tmp_path, workers)
    assert keywords(workers, "compute_advantage")[0]["dropped"] == frozenset({"1"})
    for method in ("update_actor", "update_critic"):
        given = keywords(workers, method)[0]
        assert sorted(row for rows in given["rows"] for row in rows) == [0, 1, 4, 5]
        assert given["sizes"] == ((1, 1), (1, 1))
    assert (first["training/rows"], first["training/dropped_rows"]) == (6, 2)
    assert first["training/skipped_steps"] == 0


def test_a_step_without_a_single_score_is_skipped_and_counted(tmp_path):
    workers = Workers(failed=["0", "1", "2"])
    _, first, second = fit(tmp_path, workers)
    for row in (first, second):
        assert (row["training/dropped_rows"], row["training/skipped_steps"]) == (6, 1)
        assert "update_actor/rows" not in row
    assert keywords(workers, "update_actor")[0] == {"rows": ((), ()), "sizes": ((), ())}


def test_validation_leaves_out_what_got_no_score(tmp_path):
    before, *_ = fit(tmp_path, Workers(failed=["2"]), validate=True)
    assert before["val/reward/mean"] == WIDTH
    lines = (tmp_path / "samples" / "step_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [WIDTH, WIDTH, None]


class Graded(Workers):
    """Scores by try: `spread[t]` prompts of the t-th answered batch get samples of unequal scores."""

    def __init__(self, spread: Sequence[int]) -> None:
        super().__init__()
        self.spread, self.row_ids, self.uids = [*spread], [], []

    def generate_sequences(self, data: DataProto) -> DataProto:
        self.row_ids.append(data.batch["row_ids"].tolist())
        return super().generate_sequences(data)

    def compute_score(self, data: DataProto) -> DataProto:
        uneven = self.spread.pop(0)
        scores = torch.zeros(data.batch["responses"].shape)
        scores[: 2 * uneven : 2, -1] = 1.0
        return DataProto.from_dict({"rm_scores": scores})

    def compute_advantage(self, data: DataProto) -> DataProto:
        self.uids.append(data.non_tensor_batch["uid"].tolist())
        return super().compute_advantage(data)


def sample(folder: Path, workers: Workers, spec: RefillSpec, limit: float | None = None) -> list[dict]:
    """Two GRPO steps of 3 prompts with 2 samples each, refilled; what metrics.jsonl says of them."""
    Trainer(
        spec=TrainerSpec(
            steps=2,
            samples_per_prompt=2,
            mini_batch_samples=6,
            advantage=AdvantageSpec("grpo"),
            refill=spec,
            expect_initial_kl=limit,
        ),
        graph=step_graph("grpo", reward="function", kl_in="loss", dynamic_sampling=True),
        groups=workers.groups,
        prompts=iter([prompts() for _ in range(20)]),
        val_prompts=None,
        tokenizer=char_tokenizer(),
        kl=FixedKLController(0.1),
        store=workers.store,
        fetch=workers.fetch,
        log=RunLog(folder),
    ).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]


def test_a_step_is_refilled_until_it_has_prompts_enough(tmp_path):
    workers = Graded([1, 0, 3, 3])
    first, second = sample(tmp_path, workers, RefillSpec(prompts=3, tries=3), limit=0.2)
    assert workers.uids == [["0", "0", "6", "6", "7", "7"], ["0", "0", "1", "1", "2", "2"]]
    ids = [row for batch in workers.row_ids for row in batch]
    assert len(set(ids)) == len(ids) == 24  # every sample draws its own numbers
    assert (first["train/num_gen_batches"], second["train/num_gen_batches"]) == (3, 1)
    assert (first["training/rows"], first["training/generated_rows"]) == (6, 18)
    assert first["update_actor/rows"] == 6
    assert first["timing_s/generate"] == 3.0  # three of a second
    assert [name for name, *_ in workers.calls].count("compute_log_prob") == 2


def test_a_step_that_stays_short_stops_the_run_with_numbers(tmp_path):
    workers = Graded([1, 0, 0])
    with pytest.raises(RefillError, match=r"step 1: dynamic sampling kept 1 groups of the 3 .* 3 tries"):
        sample(tmp_path, workers, RefillSpec(prompts=3, tries=3))
    assert "update_actor" not in [name for name, *_ in workers.calls]


def test_or_is_left_out_and_counted(tmp_path):
    workers = Graded([0, 1, 3])
    first, second = sample(tmp_path, workers, RefillSpec(prompts=3, tries=2, at_limit="skip"))
    assert (first["training/skipped_steps"], first["training/rows"]) == (1, 0)
    assert "update_actor/rows" not in first
    assert second["update_actor/rows"] == 6
    assert len(keywords(workers, "update_actor")) == 1


def test_remax_leaves_out_prompts_whose_greedy_answer_got_no_score(tmp_path):
    workers = Workers()
    workers.compute_score = lambda data: workers.column(data, "rm_scores", 1.0).union(  # type: ignore[method-assign]
        DataProto.from_dict({"dropped": torch.zeros(len(data), dtype=torch.bool)})
    )
    workers.failed = ["1"]
    Trainer(
        spec=TrainerSpec(
            steps=1, samples_per_prompt=2, mini_batch_samples=6, advantage=AdvantageSpec("remax")
        ),
        graph=step_graph("remax", reward="remote", kl_in=None),
        groups=workers.groups,
        prompts=iter([prompts()]),
        val_prompts=None,
        tokenizer=char_tokenizer(),
        kl=FixedKLController(0.1),
        store=workers.store,
        fetch=workers.fetch,
        log=RunLog(tmp_path),
    ).fit()
    assert keywords(workers, "compute_advantage")[0]["dropped"] == frozenset({"1"})
    rows = keywords(workers, "update_actor")[0]["rows"]
    assert sorted(row for part in rows for row in part) == [0, 1, 4, 5]
