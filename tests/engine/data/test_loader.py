import itertools
import json

import pytest

from rolemesh.engine.data.files import DataError
from rolemesh.engine.data.loader import PromptLoader, epoch_order
from rolemesh.engine.data.prompts import PromptDataset


@pytest.fixture
def dataset(tmp_path, tokenizer) -> PromptDataset:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"w{n}"}) + "\n" for n in range(33)))
    return PromptDataset(tmp_path / "a.jsonl", tokenizer)


def numbers(batches) -> list[list[int]]:
    return [batch.non_tensor_batch["index"].tolist() for batch in batches]


def test_an_epoch_uses_every_prompt_once_and_keeps_the_short_last_batch(dataset):
    loader = PromptLoader(dataset, 32)
    batches = numbers(loader)
    assert [len(batch) for batch in batches] == [32, 1]
    assert sorted(batches[0] + batches[1]) == list(range(33))
    assert (len(loader), loader.dropped_per_epoch) == (2, 0)


def test_dropped_prompts_are_counted_and_are_others_in_the_next_epoch(dataset):
    loader = PromptLoader(dataset, 32, drop_last=True)
    first, second = numbers(loader), numbers(loader)
    assert (len(first), len(loader), loader.dropped_per_epoch) == (1, 1, 1)
    assert set(first[0]) != set(second[0])


def test_the_order_is_a_function_of_seed_and_epoch(dataset):
    loader = PromptLoader(dataset, 8, seed=3)
    epochs = [[*itertools.chain(*numbers(loader))] for _ in range(3)]
    assert epochs == [epoch_order(33, 3, epoch).tolist() for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epoch_order(33, 4, 0).tolist() != epochs[0]
    assert numbers(PromptLoader(dataset, 33, shuffle=False)) == [list(range(33))]


@pytest.mark.parametrize("steps", range(12))
def test_a_run_resumed_at_any_step_sees_the_same_prompts(dataset, steps):
    def take(loader, n):
        return numbers(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), n))

    interrupted, resumed = PromptLoader(dataset, 8, seed=1), PromptLoader(dataset, 8, seed=1)
    before = take(interrupted, steps)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert before + take(resumed, 12 - steps) == take(PromptLoader(dataset, 8, seed=1), 12)


def test_a_position_in_another_order_is_refused(dataset):
    with pytest.raises(DataError, match="another order"):
        PromptLoader(dataset, 8, seed=1).load_state_dict(PromptLoader(dataset, 8, seed=2).state_dict())


@pytest.mark.parametrize(("batch_size", "drop_last"), [(0, False), (34, True)])
def test_a_batch_size_that_gives_no_batch_is_an_error(dataset, batch_size, drop_last):
    with pytest.raises(DataError, match="33"):
        PromptLoader(dataset, batch_size, drop_last=drop_last)
