import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.prompts import PromptDataset

BOS = 1


def words(n: int, first: int = 0) -> str:
    return " ".join(f"w{first + k}" for k in range(n))


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


VERL_ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_verls_rows_are_read_alike_from_jsonl_and_parquet(tmp_path, tokenizer, suffix):
    file = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        write_jsonl(file, [VERL_ROW])
    else:
        pq.write_table(pa.Table.from_pylist([VERL_ROW]), file)
    item = PromptDataset(file, tokenizer)[0]
    assert tokenizer.decode(item.pop("raw_prompt_ids")) == "<s> system w1 user w2 w3 assistant"
    assert item.pop("raw_prompt") == VERL_ROW["prompt"]
    assert item == {
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 7},
        "index": 0,
    }


def test_plain_rows_take_the_files_name_as_source_and_keep_other_columns(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "sums.jsonl", [{"question": "w1 w2", "answer": "3"}])
    item = PromptDataset([file], tokenizer, prompt_key="question")[0]
    assert item["raw_prompt_ids"] == tokenizer.convert_tokens_to_ids(["<s>", "w1", "w2"])
    assert (item["data_source"], item["reward_model"]) == ("sums", {})
    assert item["extra_info"] == {"answer": "3"}


@pytest.mark.parametrize(
    "prompt", ["w1 w2", "<s> w1 w2", [{"role": "user", "content": "w1"}]], ids=["text", "rendered", "chat"]
)
def test_there_is_exactly_one_bos(tmp_path, tokenizer, prompt):
    item = PromptDataset(write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}]), tokenizer)[0]
    assert item["raw_prompt_ids"].count(BOS) == 1
    assert item["raw_prompt_ids"][0] == BOS


def test_a_prompt_does_not_end_with_an_eos_that_the_tokenizer_adds(tmp_path, tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    item = PromptDataset(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "w1"}]), tokenizer)[0]
    assert tokenizer.decode(item["raw_prompt_ids"]) == "<s> w1"


def test_batches_are_padded_on_the_left_to_the_longest_prompt_of_the_set(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": words(n)} for n in (1, 5, 3)])
    dataset = PromptDataset(file, tokenizer)
    batch = dataset.collate([2, 0])
    assert batch.batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 0, 1]]
    assert batch.batch["input_ids"][0, 2:].tolist() == batch.non_tensor_batch["raw_prompt_ids"][0]
    assert batch.non_tensor_batch["index"].tolist() == [2, 0]
    assert set(batch.non_tensor_batch) == {*dataset[0]}
    assert len(dataset.collate([])) == 0


@pytest.fixture
def overlong_file(tmp_path):
    # With the template's two tokens: 8 tokens and 10 tokens, of a limit of 8.
    rows = [{"prompt": [{"role": "user", "content": words(n)}]} for n in (5, 7)]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def test_an_overlong_prompt_is_an_error_at_load_counted_as_it_is_sent(overlong_file, tokenizer):
    with pytest.raises(DataError, match=r"a\.jsonl row 2: the prompt has 10 tokens.* 8; .*data\.overlong"):
        PromptDataset(overlong_file, tokenizer, max_prompt_tokens=8)


def test_overlong_prompts_are_left_out_or_cut_and_counted(overlong_file, tokenizer):
    left_out = PromptDataset(overlong_file, tokenizer, max_prompt_tokens=8, overlong="filter")
    assert (len(left_out), left_out.width) == (1, 8)
    cut = PromptDataset(overlong_file, tokenizer, max_prompt_tokens=8, overlong="truncate")
    assert tokenizer.decode(cut[1]["raw_prompt_ids"]) == "w0 w1 w2 w3 w4 w5 w6 assistant"
    for dataset in (left_out, cut):
        assert [(place.row, n_tokens) for place, n_tokens in dataset.overlong] == [(2, 10)]
        assert "1 too long" in dataset.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "w1"}\n{"prompt": \n', r"train\.jsonl row 2 is not JSON"),
        ('["w1"]\n', r"row 1 is a list"),
        ('{"text": "w1", "a": 1}\n', r"row 1 has no 'prompt'; it has \['a', 'text'\].*data\.prompt_key"),
        ('{"prompt": 3}\n', r"row 1: a prompt is text or a list of chat messages, not int"),
        ('{"prompt": [{"role": 1}, "x"]}\n', r"row 1: a prompt is text or"),
        ('{"prompt": "w1", "reward_model": "42"}\n', r"row 1: 'reward_model' is a str"),
        ("\n\n", r"no prompts in .*train\.jsonl: 0 rows read"),
        ('{"prompt": "w1 w2 w3"}\n', r"no prompts .*1 rows read, 1 of them longer than 2 tokens"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_row(tmp_path, tokenizer, text, message):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        PromptDataset(tmp_path / "train.jsonl", tokenizer, max_prompt_tokens=2, overlong="filter")


def test_missing_and_unreadable_files_are_explained(tmp_path, tokenizer):
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "w1"}])
    with pytest.raises(DataError, match=r"no file .*trian\.jsonl; .*holds \['train\.jsonl'\]"):
        PromptDataset(tmp_path / "trian.jsonl", tokenizer)
    with pytest.raises(DataError, match="nowhere is no folder"):
        PromptDataset(tmp_path / "nowhere" / "train.jsonl", tokenizer)
    with pytest.raises(DataError, match=r"\.jsonl, \.parquet, \.arrow"):
        PromptDataset(tmp_path / "train.csv", tokenizer)
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet is not a readable parquet"):
        PromptDataset(tmp_path / "bad.parquet", tokenizer)
    with pytest.raises(DataError, match="empty list of files"):
        PromptDataset([], tokenizer)


def test_problems_with_chat_messages_are_explained(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [VERL_ROW])
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"row 1: the chat template refuses .*no system role"):
        PromptDataset(file, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"row 1: these are chat messages .*no chat template"):
        PromptDataset(file, tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(DataError, match="row 1: the prompt has no tokens"):
        PromptDataset(write_jsonl(tmp_path / "b.jsonl", [{"prompt": " "}]), tokenizer)
