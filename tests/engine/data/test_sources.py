import itertools
import json
from collections import Counter

import pytest

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.loader import PromptLoader, epoch_order
from rolemesh.engine.data.prompts import PromptDataset
from rolemesh.engine.data.sources import weighted

WEIGHTS = {"a": 2.0, "b": 0.5, "c": 0.3}  # and d once


@pytest.fixture
def dataset(tmp_path, tokenizer) -> PromptDataset:
    sizes = {"a": 3, "b": 10, "c": 7, "d": 4}
    rows = [{"prompt": f"w{i}", "data_source": name} for name, n in sizes.items() for i in range(n)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(tmp_path / "mixed.jsonl", tokenizer)


def loader(dataset, batch_size=5, weights=WEIGHTS, seed=1) -> PromptLoader:
    return PromptLoader(dataset, batch_size, seed=seed, sources=weighted(dataset.sources(), weights))


def numbers(batches) -> list[list[int]]:
    return [batch.non_tensor_batch["index"].tolist() for batch in batches]


def used(dataset, epochs: list[list[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(epochs))


def test_each_epoch_uses_each_source_as_often_as_its_weight_says(dataset):
    prompts = loader(dataset)
    for _ in range(4):
        (epoch,) = [list(itertools.chain(*numbers(prompts)))]
        assert Counter(dataset[i]["data_source"] for i in epoch) == {"a": 6, "b": 5, "c": 2, "d": 4}
    assert len(prompts) == 4  # 17 prompts in batches of 5


def test_no_prompt_is_used_again_before_all_of_its_source_were(dataset):
    sources = weighted(dataset.sources(), WEIGHTS)
    epochs = [epoch_order(len(dataset), 1, epoch, sources=sources).tolist() for epoch in range(7)]
    for n_epochs in range(1, 8):
        counts = used(dataset, epochs[:n_epochs])
        for name, rows in dataset.sources().items():
            uses = [counts[row] for row in rows]
            assert max(uses) - min(uses) <= 1, (name, n_epochs)
    assert {used(dataset, epochs[:2])[row] for row in dataset.sources()["b"]} == {1}


def test_the_order_is_a_function_of_seed_and_epoch(dataset):
    sources = weighted(dataset.sources(), WEIGHTS)
    orders = [epoch_order(24, seed, epoch, sources=sources).tolist() for seed in (1, 2) for epoch in (0, 1)]
    again = [epoch_order(24, seed, epoch, sources=sources).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert orders == again
    assert len({tuple(order) for order in orders}) == 4
    grouped = [dataset[i]["data_source"] for i in orders[0]]
    assert grouped != sorted(grouped)


@pytest.mark.parametrize("steps", range(0, 13, 2))
def test_a_run_resumed_at_any_step_sees_the_same_prompts(dataset, steps):
    def take(prompts, n):
        return numbers(itertools.islice(itertools.chain.from_iterable(itertools.repeat(prompts)), n))

    interrupted, resumed = loader(dataset), loader(dataset)
    before = take(interrupted, steps)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert before + take(resumed, 12 - steps) == take(loader(dataset), 12)


@pytest.mark.parametrize("weights", [{}, {"a": 2.0}, {**WEIGHTS, "d": 2.0}])
def test_a_position_among_other_weights_is_refused(dataset, weights):
    with pytest.raises(DataError, match="another order"):
        loader(dataset, weights=weights).load_state_dict(loader(dataset).state_dict())


def test_a_source_of_weight_0_is_left_out_and_one_that_is_not_there_is_refused(dataset):
    epoch = list(itertools.chain(*numbers(loader(dataset, weights={"a": 0, "b": 0.01}))))
    assert Counter(dataset[i]["data_source"] for i in epoch) == {"b": 1, "c": 7, "d": 4}
    with pytest.raises(DataError, match=r"names \['e'\], but the prompts are of \['a', 'b', 'c', 'd'\]"):
        loader(dataset, weights={"e": 1})
    with pytest.raises(DataError, match="every source has weight 0"):
        loader(dataset, weights=dict.fromkeys("abcd", 0))
    assert weighted(dataset.sources(), {}) == ()
