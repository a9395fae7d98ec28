"""A real vLLM engine in this process, against a plain forward pass and greedy decoding of transformers."""

import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import engine_side, keep
from safetensors.torch import load_file
from tiny import char_tokenizer, tiny_checkpoint, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_samples import greedy as likeliest
from vllm_samples import prompts
from vllm_samples import write as written

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import RolloutError, SamplingOptions
from rolemesh.engine.rollout.agent import AgentSpec, Conversations, Tokenizers, side_by_side
from rolemesh.engine.rollout.requests import Rows, Sample
from rolemesh.engine.rollout.vllm import EngineSpec, VLLMEngine
from rolemesh.parallel.weights.pieces import HfTensor
from rolemesh.parallel.weights.transfer_sides import EngineSide

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
    load(started, model, 0)
    yield started
    started.wake()


def side(engine: VLLMEngine) -> EngineSide:
    return engine_side(Path(engine.spec.path), engine.spec.tp)


def load(engine: VLLMEngine, model: PreTrainedModel, version: int) -> None:
    """Give the engine a model's weights, as a rollout's ranks keep them."""
    keepers = keep(side(engine), model.state_dict())
    engine.load_weights([keeper.weights for keeper in keepers], version)


def checksums(worker: Any) -> dict[str, float]:
    """In vLLM's worker: the sum of each tensor's numbers, by its Hugging Face name."""
    from vllm.model_executor.layers.linear import LinearBase

    parts = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    sums: dict[str, float] = {}
    model = worker.model_runner.get_model()
    for name, module in model.named_modules():
        block, _, last = name.rpartition(".")
        if isinstance(module, LinearBase):
            ones = torch.ones(1, module.input_size_per_partition)
            rows = module.quant_method.apply(module, ones, None)[0].double()
            sizes = getattr(module, "output_partition_sizes", [len(rows)])
            for part, of_part in zip(parts.get(last, (last,)), rows.split(sizes), strict=True):
                sums[f"{block}.{part}.weight"] = of_part.sum().item()
        elif last == "embed_tokens":
            sums[f"{name}.weight"] = module(torch.arange(module.org_vocab_size)).double().sum().item()
        elif last == "lm_head":
            states = torch.ones(1, module.embedding_dim)
            logits = module.quant_method.apply(module, states)[0, : module.org_vocab_size]
            sums[f"{name}.weight"] = logits.double().sum().item()
        elif last.endswith("norm"):
            sums[f"{name}.weight"] = module.weight.double().sum().item()
    return sums


def batch(lengths: list[int], width: int = 112) -> DataProto:
    return prompts(lengths, width)


def write(engine: VLLMEngine, data: DataProto, **changes: Any) -> DataProto:
    """The columns of all rows."""
    return written(engine, data, replace(OPTIONS, **changes))


def greedy(model: PreTrainedModel, data: DataProto) -> torch.Tensor:
    """transformers' greedy responses [b, R], padded."""
    return likeliest(model, data, OPTIONS)


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
    load(engine, new, 1)
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

    load(engine, new, 1)
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
    load(engine, model, 1)
    write(engine, batch([9]))
    engine.sleep()
    write(engine, batch([9]))
    assert calls == [
        "step", "sleep 1",
        "wake_up weights", "collective_rpc load_kept", "reset_prefix_cache",
        "wake_up kv_cache", "step", "sleep 1",
        "wake_up weights", "wake_up kv_cache", "step",
    ]  # fmt: skip


def test_weights_that_do_not_cover_the_model_are_refused_by_name(engine: VLLMEngine, model: PreTrainedModel):
    class WithoutNorm(EngineSide):
        def parts(self, tp_rank: int) -> Iterator[tuple[HfTensor, tuple[slice, ...]]]:
            return (at for at in super().parts(tp_rank) if at[0].name != "model.norm.weight")

    lacking = keep(WithoutNorm(side(engine).shape, torch.float32), dict(model.named_parameters()))
    with pytest.raises(RolloutError, match=r"1 parameters got no weights: model\.norm\.weight"):
        engine.load_weights([keeper.weights for keeper in lacking], 1)
    with pytest.raises(RolloutError, match="the engine has no weights"):
        write(engine, batch([9]))
    load(engine, model, 1)
    assert torch.equal(
        write(engine, batch([9]), do_sample=False).batch["responses"], greedy(model, batch([9]))
    )


def test_every_layer_computes_with_the_numbers_it_was_given(engine: VLLMEngine, model: PreTrainedModel):
    """vLLM packs its matrices into forms of its kernels' own, so they are read as what they make of ones and
    zeros.
    """
    load(engine, new := tiny_model(tiny_config("llama", **SIZES), seed=6), 1)
    (found,) = engine.llm.collective_rpc(checksums)
    given = {name: parameter.double().sum().item() for name, parameter in new.named_parameters()}
    assert found == pytest.approx(given, abs=1e-3)
    assert found != pytest.approx({n: p.double().sum().item() for n, p in model.named_parameters()}, abs=1e-1)


FAMILIES = {
    "llama, one key-value head": ("llama", {}),
    "qwen2, tied": ("qwen2", {"tied": True, "vocab": 101}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_an_engine_cut_over_two_processes_takes_each_ones_part(
    tmp_path: Path, family: str, changes: dict[str, Any]
):
    """In a process of its own: vLLM makes one engine in a process."""
    path = tiny_checkpoint(tmp_path, family, **SIZES | changes)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(written_by_two, path).result(400)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(got, greedy(model, batch([40, 9, 70], 80)))


def written_by_two(path: Path) -> torch.Tensor:
    """Greedy responses of an engine over two processes, each of which has no more than its rank's part."""
    spec = EngineSpec(path=str(path), dtype="float32", sampling=OPTIONS, max_tokens=104, tp=2, kv_tokens=1024)
    engine = VLLMEngine(spec)
    keepers = keep(side(engine), load_file(path / "model.safetensors"))
    engine.load_weights([keeper.weights for keeper in keepers], 0)
    return write(engine, batch([40, 9, 70], 80), do_sample=False).batch["responses"]


class Answers:
    """Puts tokens behind two turns of each row; row 0 waits with the first until row 1 is over."""

    TOKENS = (30, 31, 32)

    def __init__(self, row: dict[str, Any], tokenizer: Any) -> None:
        self.row, self.seen, self.turns = row["index"], row["seen"], 0

    def step(self, token_ids: list[int], text: str) -> list[int] | None:
        self.turns += 1
        self.seen += token_ids
        if self.row == 0 and self.turns == 1:
            assert ROW_1_IS_OVER.wait(60)
        if self.turns == 3:
            return None
        self.seen += self.TOKENS
        return list(self.TOKENS)


ROW_1_IS_OVER = threading.Event()


def conversed(engine: VLLMEngine, data: DataProto) -> Conversations:
    """The conversations of all rows."""
    ROW_1_IS_OVER.clear()
    fields = [{"index": row, "seen": []} for row in range(len(data))]
    rows = Rows(data, replace(OPTIONS, max_response_tokens=72))
    tokenizers = Tokenizers(char_tokenizer(), char_tokenizer())
    with Conversations(AgentSpec("a.py:A", ""), rows, fields, tokenizers) as talks:
        for over in side_by_side(talks, engine):
            if 1 in over:
                ROW_1_IS_OVER.set()
    return talks


def test_a_slow_tool_holds_no_other_conversation_and_every_token_is_one_that_was_seen(
    engine: VLLMEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(AgentSpec, "load", lambda spec: Answers)
    data = batch([60, 40, 50])
    talks = conversed(engine, data)
    output = talks.columns([0, 1, 2])
    assert talks.turns[0] > 1
    assert talks.rows.n_cached > 0  # a turn goes on from what the engine has computed
    for row in range(3):
        own = output.batch["response_mask"][row].bool()
        there = output.batch["attention_mask"][row].bool()
        response = output.batch["responses"][row][there[112:]].tolist()
        seen = talks.fields[row]["seen"]  # not a turn that fills the response, nor that an answer was cut
        assert response[: len(seen)] == seen[: len(response)]
        read = output.batch["responses"][row][there[112:] & ~own].tolist()
        assert read == (2 * list(Answers.TOKENS))[: len(read)]
        tokens = output.batch["input_ids"][row][there]
        with torch.no_grad():
            log_probs = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        of_all = log_probs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)[-len(response) :]
        of_own = of_all[own[there[112:]]]
        torch.testing.assert_close(output.batch["rollout_log_probs"][row][own], of_own, atol=1e-4, rtol=0)
    again = conversed(engine, data).columns([0, 1, 2])
    assert torch.equal(again.batch["responses"], output.batch["responses"])
