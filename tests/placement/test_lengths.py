"""Length distributions against closed forms and Monte Carlo."""

import json
import math

import numpy as np
import pytest

from rolemesh.placement.lengths import Fixed, Lengths, LengthsError, LogNormal, Measured, log_normal

DISTRIBUTIONS = [
    Fixed(700.0),
    LogNormal(6.5, 0.8),
    LogNormal(6.5, 0.8, cut=2000),
    LogNormal(8.0, 0.5, cut=2000),  # most are stopped
    Measured((5, 900, 30, 30, 1200)),
]


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=repr)
def test_expectations_agree_with_sampled_sequences(lengths):
    drawn = lengths.sample(400_000, seed=1).astype(float)
    assert drawn.max() <= lengths.maximum
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert lengths.mean_square == pytest.approx((drawn**2).mean(), rel=0.05)
    for share in (0.1, 0.5, 0.95):
        assert lengths.quantile(share) == pytest.approx(np.quantile(drawn, share), rel=0.02)
    times = np.array([0.0, 29.0, 500.0, 1500.0, 1999.0, 2000.0, 1e6])
    running = [(drawn > t).mean() for t in times]
    np.testing.assert_allclose(lengths.active(times), running, atol=0.005)
    for n in (1, 8, 512):
        groups = drawn[: len(drawn) // n * n].reshape(-1, n)
        assert lengths.longest(n) == pytest.approx(groups.max(axis=1).mean(), rel=0.03)


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=repr)
def test_the_survival_curve_integrates_to_the_mean(lengths):
    end = lengths.maximum if math.isfinite(lengths.maximum) else 60_000
    edges = np.linspace(0, end, 200_001)
    middle = (edges[1:] + edges[:-1]) / 2
    assert lengths.active(middle).sum() * (edges[1] - edges[0]) == pytest.approx(lengths.mean, rel=1e-4)


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=repr)
def test_the_longest_of_n_grows_from_the_mean_to_the_maximum(lengths):
    longest = [lengths.longest(n) for n in (1, 2, 16, 1024, 10**6)]
    assert longest[0] == pytest.approx(lengths.mean, rel=1e-9)
    assert longest == sorted(longest)
    assert longest[-1] <= lengths.maximum * (1 + 1e-9)
    if math.isfinite(lengths.maximum):
        assert longest[-1] == pytest.approx(lengths.maximum, rel=1e-3)


def test_moments_and_order_statistics_have_their_closed_forms():
    lengths = LogNormal(2.0, 0.7)
    assert lengths.mean == pytest.approx(math.exp(2.0 + 0.49 / 2))
    assert lengths.mean_square == pytest.approx(math.exp(4.0 + 2 * 0.49))
    # E max(X, Y) = E X + E |X - Y| / 2; for log-normals the Gini mean difference is 2 mean erf(sigma / 2).
    assert lengths.longest(2) == pytest.approx(lengths.mean * (1 + math.erf(0.7 / 2)), rel=1e-9)
    uniform = Measured(tuple(range(1, 11)))
    assert uniform.longest(2) == pytest.approx(7.15)  # two ten-sided dice: sum of k (2k - 1) / 100
    assert uniform.quantile(0.5) == 5


@pytest.mark.parametrize(
    ("mean", "p95", "maximum"),
    [
        (1200, 3500, 4096),
        (1200, 3500, math.inf),
        (900, 1000, 1024),
        (5000, 16_000, 16_384),
        (1500, 6000, 4096),
    ],
)
def test_a_log_normal_has_the_mean_and_percentile_it_was_asked_for(mean, p95, maximum):
    lengths = log_normal(mean, p95, maximum)
    assert lengths.mean == pytest.approx(mean, rel=1e-9)
    assert lengths.quantile(0.95) == pytest.approx(min(p95, maximum), rel=1e-9)
    drawn = lengths.sample(200_000, seed=2)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.max() <= maximum


def test_numbers_that_no_log_normal_has_are_refused():
    assert log_normal(512, 512) == Fixed(512)
    with pytest.raises(LengthsError, match=r"no log-normal has a mean of 100 tokens with 95% below 3500"):
        log_normal(100, 3500)
    # The smallest mean beside a 95th percentile is exp(-z^2 / 2) of it, at sigma = z = 1.645.
    with pytest.raises(LengthsError, match=f"the mean is {3500 * math.exp(-(1.6448536**2) / 2):.0f} or more"):
        log_normal(100, 3500)
    for numbers in ((2000, 1000, 4096), (0, 1000, 4096), (2000, 3000, 1000)):
        with pytest.raises(LengthsError, match="the mean must be above 0 and below both"):
            log_normal(*numbers)


def test_samples_are_whole_and_repeat_with_their_seed():
    for lengths in DISTRIBUTIONS:
        drawn = lengths.sample(1000, seed=3)
        assert drawn.dtype == np.int64
        assert drawn.min() >= 1
        np.testing.assert_array_equal(drawn, lengths.sample(1000, seed=3))
    generator = np.random.default_rng(4)
    first, second = (LogNormal(5, 1).sample(10, generator) for _ in range(2))
    assert (first != second).any()


def test_measured_lengths_are_read_from_every_kind_of_file(tmp_path):
    values = [30, 5, 900]
    np.save(tmp_path / "lengths.npy", np.array(values))
    (tmp_path / "lengths.json").write_text(json.dumps(values))
    (tmp_path / "lengths.txt").write_text("30\n5\n\n900\n")
    (tmp_path / "lengths.jsonl").write_text("".join(f'{{"response_tokens": {v}}}\n' for v in values))
    for path in tmp_path.iterdir():
        assert Measured.read(path) == Measured((5, 30, 900))
        assert Measured.read(path, maximum=100) == Measured((5, 30, 100))
    keys = {"max_response_tokens": 512, "expect": {"kind": "measured", "path": "lengths.txt"}}
    assert Lengths.from_keys(keys, tmp_path) == Measured((5, 30, 512))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are none"),
        ("3\n0\n", "the smallest is 0"),
        ("3\nmany\n", "one number of tokens a line"),
        ('{"tokens": 3}\n', "without 'response_tokens'"),
    ],
)
def test_a_file_without_lengths_is_refused(text, message, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(LengthsError, match=message):
        Measured.read(path)
    with pytest.raises(LengthsError, match="No such file"):
        Measured.read(tmp_path / "absent.txt")


def test_a_recipes_lengths_are_read():
    expect = {"kind": "lognormal", "mean": 1200, "p95": "3500"}
    lengths = Lengths.from_keys({"max_response_tokens": 4096, "expect": expect})
    assert lengths == log_normal(1200, 3500, 4096)
    assert Lengths.from_keys({"max_response_tokens": 4096}) == Fixed(4096)
    fixed = {"kind": "fixed", "tokens": 100}
    assert Lengths.from_keys({"max_response_tokens": 4096, "expect": fixed}) == Fixed(100)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "lengths lacks max_response_tokens"),
        ({"max_response_tokens": "long"}, "must be a number of tokens, got 'long'"),
        ({"max_response_tokens": 0}, "a length is above 0"),
        ({"max_response_token": 9}, r"no key 'max_response_token'.*did you mean max_response_tokens"),
        ({"max_response_tokens": 9, "expect": {"kind": "lognorm"}}, r"'lognorm'.*did you mean lognormal"),
        ({"max_response_tokens": 9, "expect": {"mean": 3, "p9": 4}}, r"no key 'p9'.*did you mean p95"),
        ({"max_response_tokens": 9, "expect": 3}, "lengths.expect must be a mapping"),
        ({"max_response_tokens": 9, "expect": {"mean": 3}}, "lengths.expect lacks p95"),
    ],
)
def test_a_recipes_lengths_that_cannot_be_are_refused(keys, message):
    with pytest.raises(LengthsError, match=message):
        Lengths.from_keys(keys)


def test_a_quantile_is_a_share():
    for lengths in (LogNormal(5, 1), Measured((1, 2))):
        with pytest.raises(LengthsError, match="between 0 and 1, got 95"):
            lengths.quantile(95)
        with pytest.raises(LengthsError, match="at least one"):
            lengths.longest(0)


def test_they_read_well():
    assert str(log_normal(1200, 3500, 4096)) == "log-normal, mean 1200 tokens, 95% below 3500, at most 4096"
    assert str(Measured((5, 30))) == "2 measured, mean 18 tokens, 95% below 30, at most 30"
