"""The built-in rollout engine against a plain forward pass of the same Hugging Face model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import RolloutError, SamplingOptions
from rolemesh.engine.rollout.agent import AgentSpec, Conversations, Tokenizers, in_turns
from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.rollout.requests import Rows
from tests.tiny import char_tokenizer, tiny_checkpoint, tiny_config, tiny_model

OPTIONS = SamplingOptions(max_response_tokens=12, eos_ids=(2,), pad_id=0, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("actor"), "llama", vocab=32)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Path, model: PreTrainedModel) -> HFRollout:
    engine = HFRollout(checkpoint, "cpu", "float32", max_params=10**6)
    engine.load_weights(model.named_parameters())
    return engine


def left_padded_prompts(lengths: list[int], *, width: int = 7) -> DataProto:
    """Rows of random tokens 3..31, `lengths[i]` of them at the right of `width`; row ids count up."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) >= width - torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)).long()
    ids = torch.randint(3, 32, mask.shape, generator=generator) * mask
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "row_ids": torch.arange(len(lengths))}
    )


def row_log_probs(model: PreTrainedModel, output: DataProto, row: int, temperature: float) -> torch.Tensor:
    """Log-probabilities of a row's response tokens, by a forward pass over this row alone, unpadded."""
    mask = output.batch["attention_mask"][row].bool()
    tokens = output.batch["input_ids"][row][mask]
    n_response = int(output.batch["response_mask"][row].sum())
    with torch.no_grad():
        log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
    return log_probs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)[-n_response:]


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 5}, {"do_sample": False}], ids=str)
def test_log_probs_are_those_of_the_untruncated_policy_at_the_temperature(
    engine: HFRollout, model: PreTrainedModel, truncation: dict
) -> None:
    output = engine.generate(
        left_padded_prompts([7, 1, 4, 3]), replace(OPTIONS, temperature=0.7, **truncation)
    )
    for row in range(4):
        n_response = int(output.batch["response_mask"][row].sum())
        got = output.batch["rollout_log_probs"][row]
        torch.testing.assert_close(
            got[:n_response], row_log_probs(model, output, row, 0.7), atol=1e-5, rtol=0
        )
        assert not got[n_response:].any()


def test_greedy_decoding_is_transformers_greedy_decoding(engine: HFRollout, model: PreTrainedModel) -> None:
    prompts = left_padded_prompts([7, 1, 4, 3])
    output = engine.generate(
        prompts.select(["input_ids", "attention_mask"]), replace(OPTIONS, do_sample=False)
    )
    want = model.generate(
        prompts.batch["input_ids"],
        attention_mask=prompts.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )
    assert torch.equal(output.batch["input_ids"][:, : want.shape[1]], want)


def test_samples_of_a_row_are_the_same_for_every_dp(engine: HFRollout) -> None:
    prompts = left_padded_prompts([7, 1, 4, 3, 6, 2, 5])
    whole = engine.generate(prompts, OPTIONS)
    for dp in (2, 3, 7):
        shards = DataProto.concat([engine.generate(shard, OPTIONS) for shard in prompts.chunk(dp)])
        assert torch.equal(shards.batch["responses"], whole.batch["responses"])


@pytest.mark.parametrize(("bound", "most_rows"), [(1, 1), (19, 1), (38, 2), (75, 3), (10**6, 7)])
def test_a_bound_on_tokens_limits_the_rows_at_a_time_and_changes_no_sample(
    engine: HFRollout, monkeypatch: pytest.MonkeyPatch, bound: int, most_rows: int
) -> None:
    prompts = left_padded_prompts([7, 1, 4, 3, 6, 2, 5])  # a row is 7 + 12 = 19 tokens
    whole = engine.generate(prompts, OPTIONS).batch
    at_a_time, generate = [], engine.model.generate

    def counted(**kwargs: object) -> torch.Tensor:
        at_a_time.append(len(kwargs["input_ids"]))
        return generate(**kwargs)

    monkeypatch.setattr(engine.model, "generate", counted)
    bounded = engine.generate(prompts, replace(OPTIONS, max_batch_tokens=bound)).batch
    assert max(at_a_time) == most_rows
    assert sum(at_a_time) == 7
    assert set(bounded.keys()) == set(whole.keys())
    for name in whole.keys() - {"rollout_log_probs"}:
        assert torch.equal(bounded[name], whole[name]), name
    torch.testing.assert_close(bounded["rollout_log_probs"], whole["rollout_log_probs"], atol=1e-5, rtol=0)


def test_samples_differ_by_seed_and_by_row(engine: HFRollout) -> None:
    prompts = left_padded_prompts([5, 5])
    prompts.batch["input_ids"][1] = prompts.batch["input_ids"][0]
    first, second = (engine.generate(prompts, replace(OPTIONS, seed=seed)) for seed in (0, 1))
    assert not torch.equal(first.batch["responses"], second.batch["responses"])
    assert not torch.equal(first.batch["responses"][0], first.batch["responses"][1])


def test_sampling_follows_the_policy_and_top_p_keeps_its_nucleus(
    engine: HFRollout, model: PreTrainedModel
) -> None:
    n_rows = 4000
    prompt = left_padded_prompts([4])
    prompts = prompt.select(["input_ids", "attention_mask"]).repeat(n_rows)
    prompts.batch["row_ids"] = torch.arange(n_rows)
    with torch.no_grad():
        mask = prompt.batch["attention_mask"].bool()
        probs = model(prompt.batch["input_ids"][mask][None]).logits[0, -1].softmax(-1)
    ordered = probs.sort(descending=True)
    nucleus = ordered.indices[ordered.values.cumsum(0) - ordered.values < 0.6]
    truncated = torch.zeros_like(probs).index_copy(0, nucleus, probs[nucleus] / probs[nucleus].sum())
    for top_p, want in ((1.0, probs), (0.6, truncated)):
        options = replace(OPTIONS, max_response_tokens=1, top_p=top_p)
        first = engine.generate(prompts, options).batch["responses"][:, 0]
        frequency = torch.bincount(first, minlength=32) / n_rows
        assert (frequency - want).abs().max() < 0.03
        assert not frequency[want == 0].any()


def test_a_response_ends_on_any_of_several_eos_ids(engine: HFRollout) -> None:
    prompts = left_padded_prompts([5] * 40)
    options = replace(OPTIONS, eos_ids=(2, 11, 23), max_response_tokens=30)
    output = engine.generate(prompts, options)
    ended_by = set()
    for response, mask in zip(output.batch["responses"], output.batch["response_mask"], strict=True):
        n = int(mask.sum())
        assert mask[:n].all()
        assert not torch.isin(response[: n - 1], torch.tensor(options.eos_ids)).any()
        assert (response[n:] == 0).all()
        if n < 30:
            assert int(response[n - 1]) in options.eos_ids
            ended_by.add(int(response[n - 1]))
    assert ended_by == {2, 11, 23}


def test_pad_equal_to_eos_keeps_one_eos_in_the_mask(engine: HFRollout) -> None:
    prompts = left_padded_prompts([5] * 16)
    apart = engine.generate(prompts, replace(OPTIONS, eos_ids=(2, 5, 9)))
    same = engine.generate(prompts, replace(OPTIONS, eos_ids=(2, 5, 9), pad_id=2))
    assert torch.equal(apart.batch["response_mask"], same.batch["response_mask"])
    assert apart.batch["response_mask"].sum(1).min() < 12
    kept = apart.batch["response_mask"].bool()
    assert torch.equal(apart.batch["responses"][kept], same.batch["responses"][kept])
    assert (same.batch["responses"][~kept] == 2).all()


def test_no_end_is_forced_on_a_response_cut_at_the_limit(engine: HFRollout) -> None:
    output = engine.generate(left_padded_prompts([3, 5]), replace(OPTIONS, eos_ids=(), max_response_tokens=4))
    longer = engine.generate(left_padded_prompts([3, 5]), replace(OPTIONS, eos_ids=(), max_response_tokens=9))
    assert output.batch["response_mask"].all()
    assert torch.equal(output.batch["responses"], longer.batch["responses"][:, :4])


def test_columns_join_prompt_and_response(engine: HFRollout) -> None:
    prompts = left_padded_prompts([7, 2])
    batch = engine.generate(prompts, OPTIONS).batch
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))
    mask = torch.cat([prompts.batch["attention_mask"], batch["response_mask"]], dim=1)
    assert torch.equal(batch["attention_mask"], mask)
    for row in range(2):
        kept = batch["position_ids"][row][mask[row].bool()]
        assert torch.equal(kept, torch.arange(len(kept)))


def test_no_rows_give_columns_of_no_rows(engine: HFRollout) -> None:
    some = engine.generate(left_padded_prompts([3]), OPTIONS)
    none = engine.generate(left_padded_prompts([3])[:0], OPTIONS)
    assert len(none) == 0
    assert {name: (column.dtype, column.shape[1:]) for name, column in none.batch.items()} == {
        name: (column.dtype, column.shape[1:]) for name, column in some.batch.items()
    }


def test_a_model_above_max_params_is_refused_with_the_numbers(
    checkpoint: Path, model: PreTrainedModel
) -> None:
    with pytest.raises(RolloutError, match=rf"{model.num_parameters():,} parameters.* 1,000\..*vLLM"):
        HFRollout(checkpoint, "cpu", "float32", max_params=1000)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False)])
def test_weights_are_replaced_in_place(tmp_path: Path, family: str, tied: bool) -> None:
    path = tiny_checkpoint(tmp_path, family, tied=tied, vocab=32)
    engine = HFRollout(path, "cpu", "float32", max_params=10**6)
    prompts, options = left_padded_prompts([3, 5]), replace(OPTIONS, do_sample=False, eos_ids=())
    for seed in (1, 2):
        model = tiny_model(tiny_config(family, tied=tied, vocab=32), seed=seed)
        engine.load_weights(model.named_parameters())  # a shared matrix comes once
        output = engine.generate(prompts, options)
        for row in range(2):
            want = row_log_probs(model, output, row, 1.0)
            torch.testing.assert_close(output.batch["rollout_log_probs"][row], want, atol=1e-5, rtol=0)


def test_weights_that_do_not_cover_the_model_are_refused_by_name(
    checkpoint: Path, model: PreTrainedModel
) -> None:
    engine = HFRollout(checkpoint, "cpu", "float32", max_params=10**6)
    with pytest.raises(RolloutError, match="before load_weights"):
        engine.generate(left_padded_prompts([3]), OPTIONS)
    weights = dict(model.named_parameters())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(RolloutError, match=r"1 parameters got no weights: model\.norm\.weight"):
        engine.load_weights(weights.items())
    with pytest.raises(RolloutError, match=r"no parameter 'model\.norm\.scale'"):
        engine.load_weights([("model.norm.scale", norm)])
    with pytest.raises(RolloutError, match=r"model\.norm\.weight: got \[63\], the model has \[64\]"):
        engine.load_weights([("model.norm.weight", norm[1:])])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_response_tokens": 0},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_batch_tokens": 0},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(RolloutError, match=next(iter(wrong))):
        replace(OPTIONS, **wrong)


class Answers:
    """Puts tokens behind each turn but the third."""

    ANSWER = (5, 6, 7)

    def __init__(self, row: dict, tokenizer: object) -> None:
        self.turns = 0

    def step(self, token_ids: list[int], text: str) -> list[int] | None:
        self.turns += 1
        return None if self.turns == 3 else list(self.ANSWER)


def test_conversations_have_the_log_probs_of_the_policy_that_reads_all_of_them(
    engine: HFRollout, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentSpec, "load", lambda spec: Answers)
    options = replace(OPTIONS, max_response_tokens=40, eos_ids=(2, *range(8, 16)))
    data = left_padded_prompts([7, 1, 4, 3])

    def conversed(data: DataProto, options: SamplingOptions) -> DataProto:
        rows, fields = Rows(data, options), [{}] * len(data)
        tokenizers = Tokenizers(char_tokenizer(32), char_tokenizer(32))
        with Conversations(AgentSpec("a.py:A", ""), rows, fields, tokenizers) as talks:
            list(in_turns(talks, lambda requests: engine.write(requests, options, version=4)))
            return talks.columns(range(len(data)))

    output = conversed(data, options)
    batch = output.batch
    assert (batch["num_turns"] > 1).any()
    for row in range(4):
        own, there = batch["response_mask"][row].bool(), batch["attention_mask"][row].bool()
        tokens = batch["input_ids"][row][there]
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        of_all = log_probs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)[-int(there[7:].sum()) :]
        torch.testing.assert_close(
            batch["rollout_log_probs"][row][own], of_all[own[there[7:]]], atol=1e-5, rtol=0
        )
        assert (batch["weight_versions"][row] == torch.where(own, 4, -1)).all()
    plain = engine.generate(data, options).batch["responses"]
    assert torch.equal(batch["responses"][:, 0], plain[:, 0])  # turns draw as responses do
    few = replace(options, max_batch_tokens=1)  # a row at a time
    assert torch.equal(conversed(data[1:3], few).batch["responses"], batch["responses"][1:3])
    assert not torch.equal(conversed(data, replace(options, seed=8)).batch["responses"], batch["responses"])
