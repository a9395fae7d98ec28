"""A real vLLM engine in this process, against a plain forward pass and greedy decoding of transformers."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_checkpoint, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import RolloutError, SamplingOptions
from rolemesh.engine.rollout.requests import Rows, Sample
from rolemesh.engine.rollout.vllm import EngineSpec, VLLMEngine

pytestmark = [
    pytest.mark.full,
    pytest.mark.alone,
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TEMPERATURE = 0.7
OPTIONS = SamplingOptions(24, eos_ids=(2, 9, 17), pad_id=0, temperature=TEMPERATURE, seed=7)
SIZES = {"hidden": 64, "heads": 2, "kv_heads": 1}  # heads of 32: the smallest of vLLM on a CPU


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("actor"), "llama", **SIZES)


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Iterator[VLLMEngine]:
    """The engine; what it leaves in this process, a world and variables, goes with it."""
    before = dict(os.environ)
    yield VLLMEngine(
        EngineSpec(
            path=str(checkpoint),
            dtype="float32",
            sampling=OPTIONS,
            max_tokens=136,
            kv_tokens=4096,
            partial=True,
            sleeps=True,
        )
    )
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture
def engine(started: VLLMEngine, model: PreTrainedModel) -> Iterator[VLLMEngine]:
    """The engine with the checkpoint's weights."""
    started.load_weights(model.named_parameters(), 0)
    yield started
    started.wake()


def batch(lengths: list[int], width: int = 112) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(20, 100, mask.shape, generator=generator) * mask
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "row_ids": torch.arange(len(lengths))}
    )


def write(engine: VLLMEngine, data: DataProto, **changes: Any) -> DataProto:
    """The columns of all rows."""
    rows = Rows(data, replace(OPTIONS, **changes))
    for samples in engine.generate(rows.requests()):
        for sample in samples:
            rows.add(sample)
    return rows.columns(range(len(data)), partial=True)


def greedy(model: PreTrainedModel, data: DataProto) -> torch.Tensor:
    """transformers' greedy responses [b, R], padded."""
    width = data.batch["input_ids"].shape[1]
    ids = model.generate(
        data.batch["input_ids"],
        attention_mask=data.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=OPTIONS.max_response_tokens,
        eos_token_id=list(OPTIONS.eos_ids),
        pad_token_id=0,
    )
    return torch.nn.functional.pad(ids[:, width:], (0, OPTIONS.max_response_tokens + width - ids.shape[1]))


def row_log_probs(model: PreTrainedModel, output: DataProto, row: int) -> torch.Tensor:
    mask = output.batch["attention_mask"][row].bool()
    tokens = output.batch["input_ids"][row][mask]
    n = int(output.batch["response_mask"][row].sum())
    with torch.no_grad():
        log_probs = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return log_probs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)[-n:]


def test_log_probs_are_those_of_the_policy_at_the_temperature(engine: VLLMEngine, model: PreTrainedModel):
    for how in ({}, {"do_sample": False}):
        output = write(engine, batch([9, 1, 30, 40]), **how)
        for row in range(4):
            n = int(output.batch["response_mask"][row].sum())
            got = output.batch["rollout_log_probs"][row]
            torch.testing.assert_close(got[:n], row_log_probs(model, output, row), atol=1e-4, rtol=0)
            assert not got[n:].any()


def test_a_response_ends_with_the_first_end_token_or_at_the_limit(engine: VLLMEngine):
    output = write(engine, batch([5] * 60)).batch
    ended_by = set()
    for response, mask in zip(output["responses"], output["response_mask"], strict=True):
        n = int(mask.sum())
        assert not torch.isin(response[: n - 1], torch.tensor(OPTIONS.eos_ids)).any()
        if n < OPTIONS.max_response_tokens:
            ended_by.add(int(response[n - 1]))
    assert ended_by == set(OPTIONS.eos_ids)
    assert output["finished"].all()


def test_a_row_gets_the_same_answer_in_any_batch_and_another_with_another_seed(engine: VLLMEngine):
    data = batch([9, 1, 30, 40, 5, 6])
    whole = write(engine, data).batch["responses"]
    parts = DataProto.concat([write(engine, part) for part in data.chunk(3)]).batch["responses"]
    assert torch.equal(parts, whole)
    assert not torch.equal(write(engine, data, seed=8).batch["responses"], whole)
    data.batch["input_ids"][:] = data.batch["input_ids"][:1]
    data.batch["attention_mask"][:] = data.batch["attention_mask"][:1]
    responses = write(engine, data).batch["responses"].tolist()
    assert len({tuple(response) for response in responses}) == len(responses)


def test_sampling_follows_the_policy_at_the_temperature(engine: VLLMEngine, model: PreTrainedModel):
    n_rows = 3000
    data = batch([4]).select(["input_ids", "attention_mask"]).repeat(n_rows)
    data.batch["row_ids"] = torch.arange(n_rows)
    with torch.no_grad():
        tokens = data.batch["input_ids"][:1, -4:]
        probs = (model(tokens).logits[0, -1] / TEMPERATURE).softmax(-1)
    first = write(engine, data, max_response_tokens=1).batch["responses"][:, 0]
    frequency = torch.bincount(first, minlength=len(probs)) / n_rows
    assert (frequency - probs).abs().max() < 0.03


def test_after_an_update_greedy_output_is_that_of_transformers_with_the_new_weights(
    engine: VLLMEngine, model: PreTrainedModel
):
    """The prefix cache holds the prompts of the old weights: a stale one would show."""
    data = batch([100, 70, 9, 40])
    assert torch.equal(write(engine, data, do_sample=False).batch["responses"], greedy(model, data))
    new = tiny_model(tiny_config("llama", **SIZES), seed=5)
    engine.load_weights(new.named_parameters(), 1)
    after = write(engine, data, do_sample=False)
    assert torch.equal(after.batch["responses"], greedy(new, data))
    assert not torch.equal(after.batch["responses"], greedy(model, data))
    assert (after.batch["weight_versions"][after.batch["response_mask"].bool()] == 1).all()


def test_samples_of_a_prompt_share_its_prefix(engine: VLLMEngine):
    data = batch([100])
    data = data.repeat(4)
    data.batch["row_ids"] = torch.arange(4)
    requests = Rows(data, OPTIONS).requests()
    cached = [sample.n_cached for samples in engine.generate(requests) for sample in samples]
    assert sum(n >= 96 for n in cached) >= 3, cached  # whole blocks of 32


def test_an_aborted_response_is_kept_and_continued_with_the_next_weights(
    engine: VLLMEngine, model: PreTrainedModel
):
    data, new = batch([9, 30]), tiny_model(tiny_config("llama", **SIZES), seed=5)
    rows = Rows(data, replace(OPTIONS, eos_ids=(), do_sample=False))
    requests = rows.requests()
    writing = engine.generate([*requests, replace(requests[0], row=2, max_tokens=5)])
    (short,) = next(writing)  # five steps are done
    engine.abort()
    rest: list[Sample] = [sample for samples in writing for sample in samples]
    assert (short.row, len(short.tokens)) == (2, 5)
    for sample in rest:
        assert 5 <= len(sample.tokens) < 24
        assert not sample.finished
        rows.add(sample)
    begun = rows.columns([0, 1], partial=True)

    engine.load_weights(new.named_parameters(), 1)
    whole = write(engine, begun, eos_ids=(), do_sample=False).batch
    assert whole["finished"].all()
    for row, sample in enumerate(rest):
        n = len(sample.tokens)
        assert whole["weight_versions"][row].tolist() == [0] * n + [1] * (24 - n)
        assert whole["responses"][row, :n].tolist() == sample.tokens.tolist()
        prompt = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        start = torch.cat([prompt, whole["responses"][row, :n]])[None]
        want = new.generate(start, do_sample=False, max_new_tokens=24 - n, eos_token_id=None, pad_token_id=0)
        assert torch.equal(want[0, len(prompt) :], whole["responses"][row])


def test_the_engine_sleeps_between_turns_and_wakes_what_it_needs(
    engine: VLLMEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU nothing is freed: only the order of calls can be seen."""
    calls: list[str] = []
    for name in ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "step"):
        method = getattr(engine.llm, name)

        def record(*args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            said = [*args[:1], *kwargs.get("tags", ()), *(f"{kwargs[k]}" for k in ("level",) if k in kwargs)]
            entry = " ".join([_name, *map(str, said)])
            if entry != "step" or calls[-1:] != ["step"]:
                calls.append(entry)
            return _method(*args, **kwargs)

        monkeypatch.setattr(engine.llm, name, record)
    write(engine, batch([9]))
    engine.sleep()
    engine.sleep()
    engine.load_weights(model.named_parameters(), 1)
    write(engine, batch([9]))
    engine.sleep()
    write(engine, batch([9]))
    assert calls == [
        "step", "sleep 1",
        "wake_up weights", "collective_rpc begin_weights", "collective_rpc take_weights",
        "collective_rpc end_weights", "reset_prefix_cache",
        "wake_up kv_cache", "step", "sleep 1",
        "wake_up weights", "wake_up kv_cache", "step",
    ]  # fmt: skip


def test_weights_that_do_not_cover_the_model_are_refused_by_name(engine: VLLMEngine, model: PreTrainedModel):
    weights = dict(model.named_parameters())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(RolloutError, match=r"1 parameters got no weights: model\.norm\.weight"):
        engine.load_weights(weights.items(), 1)
    engine.load_weights([*weights.items(), ("model.norm.weight", norm)], 1)
    assert torch.equal(
        write(engine, batch([9]), do_sample=False).batch["responses"], greedy(model, batch([9]))
    )
