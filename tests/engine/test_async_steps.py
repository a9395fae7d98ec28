"""Steps in flight over worker groups in threads, one pool each, whose calls take all sorts of times."""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_group import fetch, put
from tiny import char_tokenizer

from rolemesh.engine.algorithms import FixedKLController
from rolemesh.engine.controller import StuckError
from rolemesh.engine.errors import CallTimeout
from rolemesh.engine.future import DataProtoFuture, Outcome, RankSpan
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.run_log import RunLog
from rolemesh.engine.trainer import Trainer, TrainerSpec
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.placement.graph import StepGraph
from rolemesh.placement.layout import Layout
from rolemesh.placement.schedule import best_order
from rolemesh.placement.steps import step_graph

SPLIT = {"rollout": "generation", "reward": "scores"}  # the other roles train
APART = {role: f"pool of {role}" for role in ("rollout", "actor", "critic", "ref", "reward")}
TOGETHER: dict[str, str] = {}
STEPS, VALIDATION = 7, 99


class Roles:
    """Worker groups for every role of `graph` on the pools of `pool_of`; each pool does one call at a time.

    `seen` has (method, step, version of the weights that the call read) in the order in which calls began.
    `fail` names a method that fails, `hang` one that never ends.
    """

    def __init__(self, graph: StepGraph, pool_of: Mapping[str, str], seed: int = 0, **faults: str) -> None:
        self.random, self.faults = random.Random(seed), faults
        self.versions = {"actor": 0, "rollout": -1}
        self.seen: list[tuple[str, int, int]] = []
        self.generating = 0
        self.writes = {operation.method: operation.writes for operation in graph.operations}
        names = {operation.role: pool_of.get(operation.role, "training") for operation in graph.operations}
        self.pools = {name: SimpleNamespace(name=name) for name in set(names.values())}
        self.threads = {name: ThreadPoolExecutor(1) for name in self.pools}
        self.groups = {role: self.group(role, pool) for role, pool in names.items()}

    def group(self, role: str, pool: str) -> Any:
        roles = self

        class Group:
            resource_pool = roles.pools[pool]
            layout = Layout()

            def __getattr__(self, method: str) -> Any:
                return lambda *args, blocking=True, **keywords: roles.submit(pool, method, args, keywords)

            def save_hf(self, path: str) -> None:
                pass

        return Group()

    def submit(self, pool: str, method: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        source: Future[Outcome] = Future()
        limit_s = 0.2 if method == self.faults.get("hang") else 20.0
        seconds = self.random.choice((0.0, 0.001, 0.01))

        def work() -> None:
            start_s = time.time()
            try:
                if method == self.faults.get("hang"):
                    time.sleep(1)
                if method == self.faults.get("fail"):
                    raise RuntimeError(f"{method} failed")
                value = self.call(method, seconds, *args, **keywords)
                source.set_result(Outcome(value, (RankSpan(0, start_s, time.time(), 0),)))
            except Exception as error:
                source.set_exception(error)

        self.threads[pool].submit(work)
        return DataProtoFuture(source, name=method, fetch=fetch, timeout_s=limit_s)

    def call(self, method: str, seconds: float, argument: Any = None, **keywords: Any) -> Any:
        if method == "load_weights":
            weights = argument.ref()
            assert not self.generating, "weights came while samples were generated"
            assert weights == keywords["version"]
            self.versions["rollout"] = weights
            return [None]
        if method == "export_weights":
            return self.versions["actor"]
        data = fetch(argument)
        step = int(data.batch["step"][0]) if len(data) else 0
        generates = method.startswith("generate")
        self.seen.append((method, step, self.versions["rollout" if generates else "actor"]))
        self.generating += generates
        time.sleep(seconds)
        self.generating -= generates
        if method == "update_actor":
            self.versions["actor"] += 1
        if method.startswith("update"):
            return [{}]
        return put(self.columns(method, data, generates))

    def columns(self, method: str, data: DataProto, generates: bool) -> DataProto:
        columns = {name: torch.zeros(len(data), 2) for name in self.writes[method]}
        if generates:
            tokens = torch.ones(len(data), 2, dtype=torch.long)
            columns |= {"prompts": tokens, "responses": tokens, "response_mask": tokens}
            columns["input_ids"] = columns["attention_mask"] = tokens.repeat(1, 2)
            columns["weight_versions"] = torch.full((len(data), 2), self.versions["rollout"])
        return DataProto.from_dict(columns)

    def close(self) -> None:
        for threads in self.threads.values():
            threads.shutdown(cancel_futures=True)


def with_step(graph: StepGraph) -> StepGraph:
    """The graph, whose operations also read a column that tells them the step."""
    operations = (
        replace(op, reads=op.reads | ({"step"} if op.kind != "transfer" else set()))
        for op in graph.operations
    )
    return StepGraph(graph.name, tuple(operations), graph.inputs | {"step"}, graph.refill)


def prompts(step: int) -> DataProto:
    ids = torch.tensor([[1, 7]] * 3)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids * 0}
    return DataProto.from_dict({**tensors, "step": torch.full((3,), step)}, {"raw_prompt": list("abc")})


def train(folder: Path, roles: Roles, graph: StepGraph, staleness: int, **spec: Any) -> Trainer:
    trainer = Trainer(
        spec=TrainerSpec(
            steps=STEPS,
            samples_per_prompt=1,
            mini_batch_samples=3,
            advantage=AdvantageSpec(),
            staleness=staleness,
            **spec,
        ),
        graph=graph,
        groups=roles.groups,
        prompts=iter([prompts(step) for step in range(1, STEPS + 1)]),
        val_prompts=prompts(VALIDATION) if spec.get("validate_every") else None,
        tokenizer=char_tokenizer(),
        kl=FixedKLController(0.1),
        store=put,
        fetch=fetch,
        log=RunLog(folder),
    )
    try:
        trainer.fit()
    finally:
        roles.close()
    return trainer


PPO = with_step(step_graph("ppo", reference=True, reward="model", kl_in="reward"))
GRPO = with_step(step_graph("grpo", reward="function", kl_in="loss"))
REMAX = with_step(step_graph("remax", reward="function", kl_in="loss"))


def made_by(step: int, staleness: int) -> int:
    """After which step the weights are that make the samples of `step`."""
    return step - 1 if not staleness else max(0, (step - 2) // staleness * staleness)


@pytest.mark.parametrize(
    ("graph", "pool_of"),
    [(PPO, SPLIT), (PPO, APART), (PPO, TOGETHER), (GRPO, SPLIT), (REMAX, TOGETHER)],
    ids=["ppo split", "ppo apart", "ppo together", "grpo split", "remax together"],
)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_whatever_takes_how_long_each_step_has_samples_of_the_same_weights(
    tmp_path, graph: StepGraph, pool_of: Mapping[str, str], staleness: int
):
    roles = Roles(graph, pool_of, seed=staleness)
    train(tmp_path, roles, graph, staleness)
    methods = {op.method: op for op in graph.operations if op.kind != "transfer"}
    assert sorted((m, s) for m, s, _ in roles.seen) == sorted(
        (m, s) for m in methods for s in range(1, STEPS + 1)
    )
    for method, step, version in roles.seen:
        if method.startswith("generate"):
            assert version == made_by(step, staleness), (method, step)
            assert 0 <= step - 1 - version <= staleness
        elif methods[method].role == "actor" and method != "compute_advantage":
            assert version == step - 1, (method, step)


def test_generation_for_the_next_step_begins_before_the_actor_learns_from_this_one(tmp_path):
    roles = Roles(PPO, SPLIT)
    train(tmp_path, roles, PPO, 1)
    begun = [(method, step) for method, step, _ in roles.seen]
    for step in range(1, STEPS):
        assert begun.index(("generate_sequences", step + 1)) < begun.index(("update_actor", step))
    in_turn = Roles(PPO, SPLIT)
    train(tmp_path, in_turn, PPO, 0)
    begun = [(method, step) for method, step, _ in in_turn.seen]
    assert begun.index(("generate_sequences", 2)) > begun.index(("update_actor", 1))


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("pool_of", [SPLIT, TOGETHER], ids=["split", "together"])
def test_a_plans_order_is_followed_within_each_period(tmp_path, pool_of: Mapping[str, str], staleness: int):
    """In a period generation is for the step after the others'."""
    seconds = {op.name: 1.0 + i % 3 for i, op in enumerate(PPO.operations)}
    pools = {role: pool_of.get(role, "training") for role in PPO.roles()}
    order = best_order(PPO, seconds, pools, staleness=1).order
    roles = Roles(PPO, pool_of)
    train(tmp_path, roles, PPO, staleness, order=order)
    operations = {op.method: op for op in PPO.operations}
    for pool, names in order.items():
        listed = [name for name in names if PPO[name].kind != "transfer"]
        begun = [
            (step if name == "generate" else step + 1, listed.index(name))
            for method, step, _ in roles.seen
            if (name := operations[method].name) in listed
        ]
        assert begun == sorted(begun), pool


def test_while_only_the_critic_learns_the_weights_stay_those_of_the_start(tmp_path):
    roles = Roles(PPO, SPLIT)
    train(tmp_path, roles, PPO, 1, critic_warmup=3)
    made = {step: version for method, step, version in roles.seen if method == "generate_sequences"}
    assert made == {step: max(0, step - 2 - 3) for step in range(1, STEPS + 1)}
    assert roles.versions == {"actor": STEPS - 3, "rollout": STEPS - 3}


@pytest.mark.parametrize("staleness", [1, 3])
def test_validation_sees_the_newest_weights_and_changes_no_samples(tmp_path, staleness: int):
    roles = Roles(GRPO, SPLIT)
    train(tmp_path, roles, GRPO, staleness, validate_every=1)
    made = [(step, version) for method, step, version in roles.seen if method == "generate_sequences"]
    assert [version for step, version in made if step == VALIDATION] == list(range(STEPS + 1))
    assert {step: version for step, version in made if step != VALIDATION} == {
        step: made_by(step, staleness) for step in range(1, STEPS + 1)
    }


def test_a_step_that_refills_is_refused(tmp_path):
    graph = with_step(step_graph("grpo", reward="function", kl_in="loss", dynamic_sampling=True))
    with pytest.raises(ValueError, match=r"a step that refills \(generate, reward\) has a staleness of 0"):
        train(tmp_path, Roles(graph, SPLIT), graph, 1)


@pytest.mark.parametrize("method", ["generate_sequences", "update_actor", "load_weights", "export_weights"])
def test_the_first_failure_ends_the_run(tmp_path, method: str):
    with pytest.raises(RuntimeError, match=f"{method} failed"):
        train(tmp_path, Roles(PPO, SPLIT, fail=method), PPO, 1)


def test_what_never_ends_is_named_after_its_limit(tmp_path):
    with pytest.raises(CallTimeout, match=r"not done within \d+(\.\d)? s: .*update_critic"):
        train(tmp_path, Roles(PPO, APART, hang="update_critic"), PPO, 1)


def test_where_nothing_can_start_it_says_what_waits_for_what(tmp_path):
    order = {"training": ("update_actor", "advantage")}
    with pytest.raises(
        StuckError, match=r"in step 1 there wait: .*advantage for its turn, .*update_actor for adv"
    ):
        train(tmp_path, Roles(PPO, SPLIT), PPO, 1, order=order)
