import pytest

from rolemesh.engine.rewards.failure import Failed, FailurePolicy
from rolemesh.engine.rewards.pool import RewardError

BAD = Failed("http://rm:1/x failed after 5 tries: status 503")


def test_without_failures_every_policy_gives_the_scores():
    for policy in (FailurePolicy("raise"), FailurePolicy("drop_group"), FailurePolicy("value", 0.5)):
        decided = policy.apply([1.0, -2.0])
        assert decided.scores.tolist() == [1.0, -2.0]
        assert not decided.dropped.any()
        assert set(decided.metrics.values()) == {0.0}
        assert policy.apply([]).scores.shape == (0,)


def test_raise_says_how_many_and_why():
    with pytest.raises(RewardError, match=r"(?s)2 of 3 samples got no score:\n  2 x http://rm:1/x.*503"):
        FailurePolicy("raise", stop_above=1).apply([1.0, BAD, BAD])


def test_drop_group_drops_whole_groups_and_counts_them():
    policy = FailurePolicy("drop_group", stop_above=0.5)
    decided = policy.apply([1.0, BAD, 3.0, 4.0, 5.0, 6.0], ["a", "a", "b", "b", "a", "c"])
    assert decided.dropped.tolist() == [True, True, False, False, True, False]
    assert decided.scores.tolist() == [0, 0, 3, 4, 0, 6]
    assert decided.metrics == {
        "reward/failed": 1,
        "reward/defaulted": 0,
        "reward/dropped": 3,
        "reward/dropped_groups": 1,
    }
    with pytest.raises(RewardError, match="needs column uid"):
        policy.apply([BAD, 1.0, 1.0, 1.0])


def test_value_scores_failed_samples_and_no_others():
    decided = FailurePolicy("value", -1.0, stop_above=0.5).apply([1.0, BAD], ["a", "a"])
    assert decided.scores.tolist() == [1.0, -1.0]
    assert not decided.dropped.any()
    assert decided.metrics["reward/defaulted"] == decided.metrics["reward/failed"] == 1


@pytest.mark.parametrize("policy", [FailurePolicy("drop_group"), FailurePolicy("value", 0.0)])
def test_a_share_of_failures_above_the_limit_stops_the_run(policy):
    at_limit = [BAD] * 2 + [1.0] * 98
    assert policy.apply(at_limit, list(range(100))).metrics["reward/failed"] == 2
    with pytest.raises(RewardError, match=r"3 of 100 samples got no score, 3\.0%.*stop_above allows 2\.0%"):
        policy.apply([BAD, *at_limit[:-1]], list(range(100)))


def test_parts_of_a_step_share_its_limit():
    policy = FailurePolicy("value", 0.0, stop_above=0.02, window=400)
    for _ in range(4):  # 8 of 400: the limit
        policy.apply([BAD, BAD, 1.0, 1.0])
    with pytest.raises(RewardError, match="9 of 400"):
        policy.apply([BAD])
    policy = FailurePolicy("value", 0.0, stop_above=0.02, window=400)
    for _ in range(10):  # one in 100: steps long past do not count
        policy.apply([BAD, *[1.0] * 99])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drop",), "choose raise, drop_group or value"),
        (("value",), "with value"),
        (("raise", 0.0), "with value"),
        (("value", float("nan")), "finite"),
        (("raise", None, 2.0), "a share"),
    ],
)
def test_policies_that_mean_nothing_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        FailurePolicy(*arguments)
