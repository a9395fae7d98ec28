import numpy as np
import pytest
import torch
from tiny import char_tokenizer

from rolemesh.engine.columns import object_column
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.validation import sample_table, sources_of, validation_metrics

TOKENIZER = char_tokenizer()


def answers(texts: list[tuple[str, str]], scores: list[float], **objects) -> DataProto:
    """Prompts and responses of at most 6 characters, padded with the end token."""
    width, end = 6, TOKENIZER.eos_token_id
    prompts, responses = (torch.full((len(texts), width), end) for _ in range(2))
    masks = torch.zeros(len(texts), 2 * width, dtype=torch.int64)
    rm_scores = torch.zeros(len(texts), width)
    for row, (prompt, response) in enumerate(texts):
        ids = TOKENIZER(prompt)["input_ids"]
        prompts[row, width - len(ids) :] = torch.tensor(ids)
        out = [*TOKENIZER(response, add_special_tokens=False)["input_ids"], end]
        responses[row, : len(out)] = torch.tensor(out)
        masks[row, width - len(ids) : width + len(out)] = 1
        rm_scores[row, len(out) - 1] = scores[row]
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": masks,
        "response_mask": masks[:, width:],
        "rm_scores": rm_scores,
    }
    return DataProto.from_dict(tensors, {name: object_column(values) for name, values in objects.items()})


TEXTS = [("1>", "2"), ("2>", "345"), ("3>", ""), ("4>", "5")]


def test_metrics_are_means_over_all_and_over_each_source_in_both_names():
    data = answers(TEXTS, [1.0, 0.0, 0.5, 0.25], data_source=["sum", "sum", "a/b", "sum"])
    assert validation_metrics(data) == {
        "val/reward/mean": pytest.approx(0.4375),
        "val/response_length/mean": 2.25,
        "val/reward/sum/mean": pytest.approx(1.25 / 3),
        "val/response_length/sum/mean": pytest.approx(8 / 3),
        "val-core/sum/reward/mean@1": pytest.approx(1.25 / 3),
        "val/reward/a/b/mean": 0.5,
        "val/response_length/a/b/mean": 1.0,
        "val-core/a/b/reward/mean@1": 0.5,
    }


def test_numbers_that_a_reward_returns_are_averaged_where_they_are_and_acc_is_the_core_one():
    objects = {"acc": [True, False, None, True], "note": ["x", None, "y", "z"], "n": [np.nan, 2, 4, None]}
    data = answers(TEXTS, [1.0, 0.0, 0.5, 0.25], data_source=["s", "s", "t", "s"], **objects)
    metrics = validation_metrics(data, ["acc", "n", "note"])
    assert metrics["val-core/s/acc/mean@1"] == pytest.approx(2 / 3)
    assert metrics["val-aux/s/n/mean@1"] == 2.0
    assert metrics["val-aux/t/n/mean@1"] == 4.0
    assert not [name for name in metrics if "note" in name or name.startswith("val-core/t/acc")]


def test_dropped_rows_count_nowhere():
    data = answers(TEXTS, [1.0, 9.0, 0.5, 0.0])
    data.batch["dropped"] = torch.tensor([False, True, False, False])
    metrics = validation_metrics(data)
    assert metrics["val/reward/mean"] == pytest.approx(0.5)
    assert metrics["val/dropped"] == 1.0
    assert sources_of(data) == ["all"] * 4


def test_the_table_has_texts_without_padding_and_what_is_known_of_each_answer():
    truths = [{"ground_truth": "2"}, {}, None, {"ground_truth": "5"}]
    data = answers(
        TEXTS, [1.0, 0.0, 0.5, 0.25], data_source=["s"] * 4, reward_model=truths, note=list("abcd")
    )
    table = sample_table(data, TOKENIZER, ["note"])
    assert table[0] == {
        "source": "s",
        "prompt": "1>",
        "response": "2<eos>",
        "score": 1.0,
        "response_tokens": 2,
        "ground_truth": "2",
        "note": "a",
    }
    assert [row["response"] for row in table] == ["2<eos>", "345<eos>", "<eos>", "5<eos>"]
    assert ["ground_truth" in row for row in table] == [True, False, False, True]
