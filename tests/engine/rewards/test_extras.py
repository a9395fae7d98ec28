import itertools
import math

from rolemesh.engine.rewards.extras import present_means, ragged_columns


def test_records_of_unequal_keys_become_full_columns_in_any_order_of_samples():
    records = [{"acc": 1.0, "pred": "a"}, {"acc": 0.0}, {"acc": 0.5, "pred": "b"}, {}]
    for order in itertools.permutations(range(4)):
        columns = ragged_columns([records[row] for row in order])
        assert list(columns) == ["acc", "pred"]
        assert columns["acc"].tolist() == [[1.0, 0.0, 0.5, None][row] for row in order]
        assert columns["pred"].tolist() == [["a", None, "b", None][row] for row in order]
        assert present_means(columns) == {"acc": 0.5}


def test_means_leave_out_nan_and_columns_that_are_not_numbers():
    means = present_means(ragged_columns([{"x": math.nan, "y": [1]}, {"x": 2, "y": [2]}, {"z": math.nan}]))
    assert means.pop("x") == 2.0
    assert math.isnan(means.pop("z"))
    assert means == {}
    assert ragged_columns([]) == {}
