"""Examples to learn from: which tokens count, what is refused, left out or cut, and how batches look."""

import json
from pathlib import Path

import pytest
import torch
from tiny import char_tokenizer

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.supervised import Encoder, PairDataset, SftDataset

BOS, EOS = 1, 2
SFT_KEYS = {"prompt": "prompt", "response": "response", "messages": "messages"}
PAIR_KEYS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
# As chat models do it: a turn ends with an end token and a line break.
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Answers of earlier turns are written otherwise than the last one.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
)


def encoder(template: str | None = None) -> Encoder:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def split(made: Encoder, row: object) -> tuple[str, str]:
    """What does not count, and what does."""
    tokenizer = made.tokenizer
    return tokenizer.decode(row.ids[~row.counts]), tokenizer.decode(row.ids[row.counts])


def test_a_text_has_one_bos_and_the_answer_counts_up_to_its_end_token():
    made = encoder()
    row = made.answered("12>", "21")
    assert split(made, row) == ("<bos>12>", "21<eos>")
    assert made.answered("12>", "21<eos>").ids.tolist() == row.ids.tolist()


def test_every_answer_of_a_conversation_counts_and_nothing_else():
    made = encoder(TURNS)
    row = made.conversation([user("1"), assistant("2"), user("3"), assistant("4")])
    assert split(made, row) == ("<bos>u:1<eos>\na:\nu:3<eos>\na:", "2<eos>4<eos>")
    after = made.answered([user("1"), assistant("2"), user("3")], "4")
    assert split(made, after) == ("<bos>u:1<eos>\na:2<eos>\nu:3<eos>\na:", "4<eos>")
    assert after.ids.tolist() == row.ids.tolist()


def test_an_end_token_is_added_to_an_answer_whose_template_has_none():
    made = encoder("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert split(made, made.answered([user("1")], "2")) == ("1", "2<eos>")


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (TURNS, [user("1")], "no message of the assistant"),
        (TURNS, "text", "a prompt is text or a list of chat messages"),
        (FORGETFUL, [user("1"), assistant("2"), user("3"), assistant("4")], "otherwise than with it"),
        (None, [user("1"), assistant("2")], "no chat template"),
    ],
)
def test_conversations_that_cannot_be_learnt_from_are_refused(template, messages, said):
    with pytest.raises(DataError, match=said):
        encoder(template).conversation(messages)


def test_messages_do_not_answer_a_text():
    with pytest.raises(DataError, match="the prompt must be one too"):
        encoder(TURNS).answered("12>", [assistant("3")])


def write(path: Path, rows: list[dict]) -> list[Path]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return [path]


def test_a_batch_of_examples_is_padded_around_the_first_token_that_counts(tmp_path):
    rows = [{"prompt": "1>", "response": "234"}, {"prompt": "1234>", "response": "5"}]
    data = SftDataset(write(tmp_path / "a.jsonl", rows), encoder(), SFT_KEYS, max_tokens=20)
    batch = data.collate([0, 1]).batch
    lengths = batch["attention_mask"].sum(-1).tolist()
    assert lengths == [1 + 2 + 4, 1 + 5 + 2]
    assert batch["input_ids"].shape == (2, 6 + 4)
    assert torch.equal(batch["responses"], batch["input_ids"][:, 6:])
    assert batch["response_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["attention_mask"][0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert (batch["responses"][0, 3], batch["responses"][1, 1]) == (EOS, EOS)


def test_a_batch_of_pairs_holds_the_chosen_sequence_first(tmp_path):
    rows = [
        {"prompt": "1>", "chosen": "23", "rejected": "4"},
        {"prompt": "1>", "chosen": "2", "rejected": ""},
    ]
    data = PairDataset(write(tmp_path / "a.jsonl", rows), encoder(), PAIR_KEYS, max_tokens=20)
    batch = data.collate([0, 1]).batch
    assert batch["input_ids"].shape == (2, 2 * 6)
    text = data.encoder.tokenizer.decode
    sides = batch["input_ids"].reshape(4, 6), batch["attention_mask"].reshape(4, 6).bool()
    found = [text(ids[mask]) for ids, mask in zip(*sides, strict=True)]
    assert found == ["<bos>1>23<eos>", "<bos>1>4<eos>", "<bos>1>2<eos>", "<bos>1><eos>"]


def test_pairs_may_be_whole_conversations(tmp_path):
    rows = [{"chosen": [user("1"), assistant("2")], "rejected": [user("1"), assistant("3")]}]
    (row,) = PairDataset(write(tmp_path / "a.jsonl", rows), encoder(TURNS), PAIR_KEYS, max_tokens=20).rows
    assert [split(encoder(), side)[1] for side in row] == ["2<eos>", "3<eos>"]


def test_equal_pairs_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "1", "chosen": "2", "rejected": r} for r in ("2", "3")]
    data = PairDataset(write(tmp_path / "a.jsonl", rows), encoder(), PAIR_KEYS, max_tokens=20)
    assert (len(data), data.useless) == (1, 1)
    assert "1 with nothing to learn" in data.describe()
    with pytest.raises(DataError, match="nothing to learn from"):
        PairDataset(write(tmp_path / "b.jsonl", rows[:1]), encoder(), PAIR_KEYS, max_tokens=20)


def test_longer_examples_are_refused_left_out_or_cut(tmp_path):
    rows = [{"prompt": "1>", "response": "2"}, {"prompt": "1>", "response": "234567"}]
    rows += [{"prompt": "1234567>", "response": "2"}]
    files = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"row 2: prompt and answer have 10 tokens, more than the limit of 6"):
        SftDataset(files, encoder(), SFT_KEYS, max_tokens=6)
    assert len(SftDataset(files, encoder(), SFT_KEYS, max_tokens=6, overlong="filter")) == 1
    cut = SftDataset(files, encoder(), SFT_KEYS, max_tokens=6, overlong="truncate")
    assert (len(cut), len(cut.overlong), cut.useless) == (2, 2, 1)  # of the third only the prompt fits
    assert split(cut.encoder, cut.rows[1][0]) == ("<bos>1>", "234")


def test_a_row_without_a_column_names_the_key(tmp_path):
    files = write(tmp_path / "a.jsonl", [{"prompt": "1>", "answer": "2"}])
    with pytest.raises(DataError, match=r"row 1: has no 'response'; it has .* \(see data.response_key\)"):
        SftDataset(files, encoder(), SFT_KEYS, max_tokens=6)
