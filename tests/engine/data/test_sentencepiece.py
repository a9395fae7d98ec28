"""A sentencepiece tokenizer from training to the sample table: prompts, generation, rewards' texts."""

import itertools
import json
from pathlib import Path

import pytest
import sentencepiece
import torch
from tiny import tiny_checkpoint, tiny_config, tiny_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolemesh.engine.batch_ref import pack, unpack
from rolemesh.engine.data.loader import PromptLoader
from rolemesh.engine.data.prompts import PromptDataset
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rewards.function import FunctionReward
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.validation import extra_columns, sample_table, validation_metrics
from rolemesh.launch.assemble import end_tokens
from rolemesh.launch.checkpoints import read_checkpoint

VOCAB, BOS, EOS = 72, 1, 2
ENDS = (EOS, *range(60, 72))  # a random model meets one of so many soon
QUESTIONS = [f"how much is {a} plus {b} ?" for a, b in itertools.product(range(20), range(20))]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} is{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder as Llama's: `tokenizer.model`, one BOS, EOS for padding, several ends."""
    root = tmp_path_factory.mktemp("sentencepiece")
    tiny_checkpoint(root, vocab=VOCAB)
    for file in root.glob("*token*"):
        file.unlink()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(QUESTIONS),
        model_prefix=str(root / "tokenizer"),
        vocab_size=VOCAB,
        model_type="bpe",
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        unk_id=0,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS)}))
    return root


@pytest.fixture(scope="module")
def tokenizer(folder) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def prompts(folder, tokenizer) -> PromptDataset:
    rows = [{"prompt": text, "data_source": "text"} for text in QUESTIONS[:8]]
    rows += [{"prompt": [{"role": "user", "content": t}], "data_source": "chat"} for t in QUESTIONS[8:12]]
    rows = [row | {"reward_model": {"ground_truth": str(i)}} for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(folder / "train.jsonl", tokenizer)


@pytest.fixture(scope="module")
def answered(folder, tokenizer, prompts) -> DataProto:
    """Answers of a random model to all prompts, once through the object store's form."""
    engine = HFRollout(folder, "cpu", "float32", 10**9)
    engine.load_weights(tiny_model(tiny_config(vocab=VOCAB)).state_dict().items())
    ends = end_tokens(str(folder), tokenizer.eos_token_id)
    assert ends == ENDS
    options = SamplingOptions(max_response_tokens=12, eos_ids=ends, pad_id=tokenizer.pad_token_id, seed=1)
    (batch,) = PromptLoader(prompts, 12, shuffle=False)
    batch.batch["row_ids"] = torch.arange(12)
    answers = engine.generate(batch, options)
    data = batch.pop(["input_ids", "attention_mask", "position_ids"]) and batch.union(answers)
    manifest, blocks = pack(data)
    return unpack(manifest.stored(list(range(len(blocks)))), dict(enumerate(blocks)))


def test_the_folder_is_known_as_one_with_a_tokenizer(folder):
    assert read_checkpoint(str(folder)).tokens is not None


def test_prompts_have_sentencepieces_ids_and_one_bos(prompts, processor):
    for i in range(8):
        assert prompts[i]["raw_prompt_ids"] == [BOS, *processor.encode(QUESTIONS[i])]
    for i in range(8, 12):
        ids = prompts[i]["raw_prompt_ids"]
        assert (ids[0], ids.count(BOS), ids.count(EOS)) == (BOS, 1, 0)
        assert processor.decode(ids[1:]) == f"{QUESTIONS[i]} is"


def test_padding_is_told_from_an_end_by_the_masks_alone(answered, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    mask, responses = answered.batch["response_mask"], answered.batch["responses"]
    lengths = mask.sum(-1).tolist()
    assert min(lengths) < 12
    for row, length in enumerate(lengths):
        assert mask[row, :length].all()
        ended = [token in ENDS for token in responses[row, :length].tolist()]
        assert ended == [False] * (length - 1) + [ended[-1]]
        assert ended[-1] or length == 12
        assert (responses[row, length:] == EOS).all()


def test_rewards_and_tables_decode_the_sampled_ids_and_nothing_encodes_them_again(
    answered, prompts, tokenizer, processor, tmp_path, monkeypatch
):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(ground_truth), 'acc': 1, 'text': solution_str}\n"
    )
    ids = answered.batch["responses"].clone()
    monkeypatch.setattr(type(tokenizer), "__call__", None)  # encoding would fail
    with FunctionReward(f"{tmp_path / 'reward.py'}:compute_score", tokenizer, workers=1) as reward:
        data = answered.union(reward.score(answered))
    assert torch.equal(data.batch["responses"], ids)
    extras = extra_columns(data, prompts.collate(range(12)))
    assert extras == ["acc", "text"]
    table = sample_table(data, tokenizer, extras)
    for i, row in enumerate(table):
        kept = ids[i, : row["response_tokens"]].tolist()
        assert (
            row["text"].strip()
            == processor.decode([t for t in kept if t not in tokenizer.all_special_ids]).strip()
        )
        assert row["response"] == tokenizer.decode(kept)
        assert (row["source"], row["ground_truth"], row["score"]) == (
            "text" if i < 8 else "chat",
            str(i),
            float(i),
        )
    assert table[3]["prompt"].strip() == QUESTIONS[3]
    metrics = validation_metrics(data, extras)
    assert metrics["val/reward/mean"] == pytest.approx(5.5)
    assert metrics["val/reward/text/mean"] == pytest.approx(3.5)
    assert metrics["val-core/chat/acc/mean@1"] == 1.0
    assert metrics["val-aux/chat/reward/mean@1"] == pytest.approx(9.5)
