"""Conversations: whose tokens are whose, and how they go on and end. The engines here write by a script."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny import char_tokenizer

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.agent import (
    AgentError,
    AgentSpec,
    Conversations,
    Tokenizers,
    fields_of,
    in_turns,
    side_by_side,
)
from rolemesh.engine.rollout.requests import NO_VERSION, Request, Rows, Sample
from rolemesh.engine.rollout.sampling import row_seed
from rolemesh.engine.user_file import UserFileError

OPTIONS = SamplingOptions(max_response_tokens=12, eos_ids=(2,), pad_id=0, seed=7)
TOKENIZER = char_tokenizer()
END = 2


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompts(*texts: str) -> DataProto:
    width = max(map(len, texts))
    tokens = torch.tensor([[0] * (width - len(text)) + ids(text) for text in texts])
    numbers = torch.arange(len(texts)) + 5
    infos = [{"index": 10 + row, "text": text} for row, text in enumerate(texts)]
    return DataProto.from_dict(
        {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "row_ids": numbers},
        {"extra_info": infos},
    )


def sample(request: Request, text: str) -> Sample:
    tokens = np.array([*ids(text), END][: request.max_tokens], dtype=np.int64)
    return Sample(request.row, tokens, np.full(len(tokens), -0.5, np.float32), 3, finished=True)


def talks_of(agent: type, data: DataProto, folder: Path, **limits: Any) -> Conversations:
    """Conversations with a class of a test."""

    class Spec(AgentSpec):
        def load(self):
            return agent

    spec = Spec("mine.py:Agent", str(folder), **limits)
    return Conversations(spec, Rows(data, OPTIONS), fields_of(data), Tokenizers(TOKENIZER, TOKENIZER))


def run(talks: Conversations, write: Any) -> list[int]:
    with talks:
        return [row for over in in_turns(talks, write) for row in over]


class Says:
    """Answers with the sum of digits until the model writes `x`, and notes what it has got."""

    seen: ClassVar[dict[str, list[tuple[list[int], str]]]] = {}

    def __init__(self, row, tokenizer) -> None:
        self.turns = self.seen.setdefault(row["extra_info"]["text"], [])

    def step(self, token_ids: list[int], text: str) -> str | None:
        self.turns.append((token_ids, text))
        return None if "x" in text else f"={sum(map(int, text))};"


def scripted(data: DataProto, *turns: Sequence[str]) -> Any:
    """An engine that writes `turns[row]` one after another; `asked` are its requests."""
    left = [list(texts) for texts in turns]

    def write(requests: Sequence[Request]) -> list[Sample]:
        write.asked += requests
        return [sample(request, left[request.row].pop(0)) for request in requests]

    write.asked = []
    return write


def test_the_response_is_what_was_written_and_read_and_the_mask_what_was_written(tmp_path: Path):
    data = prompts("ab", "c")
    write = scripted(data, ["12", "x"], ["x"])
    talks = talks_of(Says, data, tmp_path)
    assert run(talks, write) == [1, 0]
    batch = talks.columns([0, 1]).batch
    row = [*ids("12"), END, *ids("=3;"), *ids("x"), END]
    assert batch["responses"].tolist() == [row + [0] * 4, [*ids("x"), END] + [0] * 10]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 1, 1] + [0] * 4, [1, 1] + [0] * 10]
    assert batch["attention_mask"].tolist() == [[1, 1] + [1] * 8 + [0] * 4, [0, 1, 1, 1] + [0] * 10]
    assert batch["rollout_log_probs"][0].tolist() == [-0.5] * 3 + [0] * 3 + [-0.5] * 2 + [0] * 4
    assert batch["weight_versions"][0].tolist() == [3] * 3 + [NO_VERSION] * 3 + [3] * 2 + [NO_VERSION] * 4
    assert batch["position_ids"][0].tolist() == [*range(10), 9, 9, 9, 9]
    assert batch["num_turns"].tolist() == [2, 1]
    assert (batch["tool_s"] >= 0).all()
    assert Says.seen["ab"] == [([*ids("12"), END], "12"), ([*ids("x"), END], "x")]


def test_a_turn_is_asked_for_after_all_that_is_there_with_random_numbers_of_its_place(tmp_path: Path):
    data = prompts("ab")
    write = scripted(data, ["12", "x"])
    run(talks_of(Says, data, tmp_path), write)
    first, second = write.asked
    assert second.token_ids.tolist() == [*ids("ab12"), END, *ids("=3;")]
    assert (first.max_tokens, second.max_tokens) == (12, 6)
    assert (first.seed, second.seed) == (row_seed(7, 5), row_seed(7, 5, 6))


def test_an_observation_is_cut_where_the_response_is_full(tmp_path: Path):
    class Talks:
        def __init__(self, row, tokenizer) -> None: ...

        def step(self, token_ids, text):
            return ids("0123456789")

    data = prompts("ab")
    talks = talks_of(Talks, data, tmp_path)
    assert run(talks, scripted(data, ["1234"])) == [0]
    batch = talks.columns([0]).batch
    assert batch["responses"].tolist() == [[*ids("1234"), END, *ids("0123456")]]
    assert batch["response_mask"].tolist() == [[1] * 5 + [0] * 7]
    assert batch["attention_mask"].tolist() == [[1] * 14]


def test_a_conversation_ends_with_the_last_turn_that_the_recipe_allows(tmp_path: Path):
    data = prompts("ab")
    talks = talks_of(Says, data, tmp_path, turns=2)
    run(talks, scripted(data, ["1", "2", "3"]))
    assert talks.columns([0]).batch["num_turns"].tolist() == [2]


def test_an_agent_that_fails_is_named_with_row_and_turn_and_its_own_traceback(tmp_path: Path):
    class Fails(Says):
        def step(self, token_ids, text):
            return 1 / 0 if text == "2" else super().step(token_ids, text)

    data = prompts("ab", "c")
    with pytest.raises(AgentError, match=r"(?s)mine\.py:Agent: row 1 \(.*index 11\), turn 2.*ZeroDivision"):
        run(talks_of(Fails, data, tmp_path), scripted(data, ["1", "x"], ["1", "2"]))


@pytest.mark.parametrize(
    ("answer", "told"),
    [(3.5, "a float"), ([3, 5000], "token 5000; the tokenizer has ids 0 to"), ("", "None ends a conv")],
)
def test_what_no_model_can_read_is_refused(tmp_path: Path, answer: Any, told: str):
    class Odd(Says):
        def step(self, token_ids, text):
            return answer

    data = prompts("ab")
    with pytest.raises(AgentError, match=told):
        run(talks_of(Odd, data, tmp_path), scripted(data, ["1"]))


def test_an_agent_that_hangs_ends_the_call_at_its_limit(tmp_path: Path):
    class Hangs(Says):
        def step(self, token_ids, text):
            time.sleep(0.5)

    data = prompts("ab")
    with pytest.raises(AgentError, match=r"row 0 .*turn 1: its step has not answered within 0.05 s.*'1'"):
        run(talks_of(Hangs, data, tmp_path, timeout_s=0.05), scripted(data, ["1"]))


def test_async_agents_share_a_loop_and_wait_beside_each_other(tmp_path: Path):
    """Row 0 waits for row 1, which answers later."""
    loops = []
    told: list[asyncio.Future] = []

    class Awaits(Says):
        async def step(self, token_ids, text):
            loops.append(asyncio.get_running_loop())
            if text == "1":
                told.append(asyncio.get_running_loop().create_future())
                await told[0]
            else:
                while not told:
                    await asyncio.sleep(0.001)
                told[0].set_result(None)

    data = prompts("ab", "c")
    talks = talks_of(Awaits, data, tmp_path, timeout_s=5.0)
    assert sorted(run(talks, scripted(data, ["1"], ["2"]))) == [0, 1]
    assert loops[0] is loops[1]


class Scripted:
    """An engine that takes requests while it writes; `dies_at` requests it fails."""

    def __init__(self, turns: Sequence[Sequence[str]], dies_at: int = 100) -> None:
        self.left, self.dies_at, self.asked = [list(texts) for texts in turns], dies_at, 0
        self.coming: queue.SimpleQueue = queue.SimpleQueue()
        self.said: list[str] = []

    def generate(self, requests: Sequence[Request], stays: bool) -> Iterator[list[Sample]]:
        assert stays
        while requests is not None:
            for request in requests:
                self.asked += 1
                if self.asked == self.dies_at:
                    raise ConnectionError("the engine is gone")
                yield [sample(request, self.left[request.row].pop(0))]
            requests = self.coming.get(timeout=5)

    def add(self, requests: Sequence[Request]) -> None:
        self.coming.put(requests)

    def close(self) -> None:
        self.said.append("close")
        self.coming.put(None)

    def abort(self) -> None:
        self.said.append("abort")


def test_a_slow_tool_does_not_hold_others(tmp_path: Path):
    """Row 0's first answer comes when row 1's conversation of two turns is over."""
    over = threading.Event()

    class Waits(Says):
        def step(self, token_ids, text):
            answer = super().step(token_ids, text)
            if text == "1":
                assert over.wait(5)
            if text == "x2":
                over.set()
            return answer

    data, engine = prompts("ab", "c"), Scripted([["1", "x1"], ["2", "x2"]])
    with talks_of(Waits, data, tmp_path) as talks:
        assert [row for rows in side_by_side(talks, engine) for row in rows] == [1, 0]
    assert talks.columns([0, 1]).batch["num_turns"].tolist() == [2, 2]
    assert engine.said == ["close"]


def test_turns_that_a_dead_engine_has_not_written_are_written_by_the_next(tmp_path: Path):
    data, turns = prompts("ab", "c"), [["1", "2", "x"], ["3", "x"]]
    with talks_of(Says, data, tmp_path) as whole:
        list(side_by_side(whole, Scripted(turns)))
    with talks_of(Says, data, tmp_path) as talks:
        dying = Scripted(turns, dies_at=4)
        with pytest.raises(ConnectionError):
            list(side_by_side(talks, dying))
        assert talks.open
        left = [texts[talks.turns[row] :] for row, texts in enumerate(turns)]
        list(side_by_side(talks, Scripted(left)))
    for name in ("responses", "response_mask", "num_turns"):
        assert torch.equal(talks.columns([0, 1]).batch[name], whole.columns([0, 1]).batch[name])


def test_an_agent_that_fails_stops_the_engine(tmp_path: Path):
    class Fails(Says):
        def step(self, token_ids, text):
            raise RuntimeError("no tool")

    data, engine = prompts("ab"), Scripted([["1"]])
    with talks_of(Fails, data, tmp_path) as talks, pytest.raises(AgentError, match="no tool"):
        list(side_by_side(talks, engine))
    assert engine.said == ["close", "abort"]


def test_a_class_that_is_not_there_or_cannot_answer_is_told_of_with_its_key(tmp_path: Path):
    (tmp_path / "tool.py").write_text("class Deaf: ...\n")
    wrong = {"tool.py": "names no class", "tool.py:Other": "it has Deaf", "tool.py:Deaf": "step"}
    for path, told in wrong.items():
        with pytest.raises(UserFileError, match=f"rollout.agent.*{told}"):
            AgentSpec(str(tmp_path / path), "").load()
