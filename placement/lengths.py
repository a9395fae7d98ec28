"""How long prompts and responses are: distributions of token counts, cut where generation stops."""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolemesh.placement.hints import did_you_mean

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_FAR = 9.0  # standard deviations beyond which nothing is left: 1e-19
_LARGEST_SIGMA = 5.0  # the mean is then 3e5 times the median: no lengths are so


class LengthsError(ValueError):
    """Lengths that no distribution has, or that cannot be read."""


class Lengths(ABC):
    """Token counts of independent sequences. A sequence that would be longer stops at `maximum`.

    Counts are real numbers here, whole ones only when sampled.
    """

    @property
    @abstractmethod
    def maximum(self) -> float:
        """No sequence is longer, tokens."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expected length, tokens."""

    @property
    @abstractmethod
    def mean_square(self) -> float:
        """Expected square of the length, tokens squared: what attention's cost grows with."""

    @abstractmethod
    def quantile(self, share: float) -> float:
        """The length, tokens, that this share of all sequences does not exceed."""

    @abstractmethod
    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The share of sequences longer than `tokens`: those that still run after so many steps."""

    @abstractmethod
    def longest(self, n: int) -> float:
        """The expected length, tokens, of the longest of `n` sequences."""

    @abstractmethod
    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        """Lengths of `n` sequences in whole tokens, at least 1 each; the same for the same seed."""

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], folder: str | Path = ".") -> Lengths:
        """A recipe's `lengths`: `max_response_tokens`, and `expect` with the lengths to expect.

        `expect` is `{kind: lognormal, mean, p95}`, `{kind: fixed, tokens}` or `{kind: measured, path}`,
        the path relative to `folder`. Without it every sequence is as long as allowed.
        Raises LengthsError for an unknown key or kind, naming the nearest, and for lengths that cannot be.
        """
        _check_keys("lengths", keys, ("max_response_tokens", "expect"))
        maximum = _number(keys, "max_response_tokens", "lengths")
        expect = keys.get("expect")
        if expect is None:
            return Fixed(maximum)
        if not isinstance(expect, Mapping):
            raise LengthsError(
                f"lengths.expect must be a mapping such as {{mean: 1, p95: 3}}, got {expect!r}"
            )
        kind = expect.get("kind", "lognormal")
        if kind not in _KINDS:
            raise LengthsError(
                f"lengths.expect.kind is {kind!r} (known: {', '.join(_KINDS)}){did_you_mean(kind, _KINDS)}"
            )
        _check_keys("lengths.expect", expect, ("kind", *_KINDS[kind]))
        if kind == "measured":
            return Measured.read(Path(folder) / str(expect.get("path", "")), maximum)
        numbers = {key: _number(expect, key, "lengths.expect") for key in _KINDS[kind]}
        if kind == "fixed":
            return Fixed(min(numbers["tokens"], maximum))
        return log_normal(numbers["mean"], numbers["p95"], maximum)


_KINDS = {"lognormal": ("mean", "p95"), "fixed": ("tokens",), "measured": ("path",)}


@dataclass(frozen=True)
class Like(Lengths):
    """As `others` in all that a subclass does not say otherwise."""

    others: Lengths

    @property
    def maximum(self) -> float:
        return self.others.maximum

    @property
    def mean(self) -> float:
        return self.others.mean

    @property
    def mean_square(self) -> float:
        return self.others.mean_square

    def quantile(self, share: float) -> float:
        return self.others.quantile(share)

    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        return self.others.active(tokens)

    def longest(self, n: int) -> float:
        return self.others.longest(n)

    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        return self.others.sample(n, seed)


@dataclass(frozen=True)
class Longer(Lengths):
    """`others`, each longer by the same number of tokens."""

    others: Lengths
    by: float

    @property
    def maximum(self) -> float:
        return self.others.maximum + self.by

    @property
    def mean(self) -> float:
        return self.others.mean + self.by

    @property
    def mean_square(self) -> float:
        return self.others.mean_square + 2 * self.by * self.others.mean + self.by**2

    def quantile(self, share: float) -> float:
        return self.others.quantile(share) + self.by

    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        return self.others.active(np.asarray(tokens) - self.by)

    def longest(self, n: int) -> float:
        return self.others.longest(n) + self.by

    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        return self.others.sample(n, seed) + round(self.by)


@dataclass(frozen=True)
class Fixed(Lengths):
    """Every sequence has `tokens` tokens."""

    tokens: float

    def __post_init__(self) -> None:
        if not 0 < self.tokens < math.inf:
            raise LengthsError(f"sequences of {self.tokens:g} tokens: a length is above 0")

    @property
    def maximum(self) -> float:
        return self.tokens

    @property
    def mean(self) -> float:
        return self.tokens

    @property
    def mean_square(self) -> float:
        return self.tokens**2

    def quantile(self, share: float) -> float:
        return self.tokens

    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        return (np.asarray(tokens) < self.tokens).astype(np.float64)

    def longest(self, n: int) -> float:
        return self.tokens

    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        return _whole(np.full(n, self.tokens))

    def __str__(self) -> str:
        return f"{self.tokens:g} tokens each"


@dataclass(frozen=True)
class LogNormal(Lengths):
    """The logarithm is normal with mean `mu` and deviation `sigma`; what exceeds `cut` tokens stops there."""

    mu: float
    sigma: float
    cut: float = math.inf

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and self.cut > 0 and math.isfinite(self.mu)):
            raise LengthsError(f"a log-normal length needs sigma and cut above 0, got {self!r}")

    @property
    def maximum(self) -> float:
        return self.cut

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        return self._moment(2)

    def _moment(self, k: int) -> float:
        """The k-th moment of min(X, cut): the part below the cut, and the mass that stops there."""
        whole = math.exp(k * self.mu + (k * self.sigma) ** 2 / 2)
        if math.isinf(self.cut):
            return whole
        z = self._z(self.cut)
        return whole * _NORMAL.cdf(z - k * self.sigma) + self.cut**k * _NORMAL.cdf(-z)

    def _z(self, tokens: float) -> float:
        return (math.log(tokens) - self.mu) / self.sigma

    def quantile(self, share: float) -> float:
        if not 0 < share < 1:
            raise LengthsError(f"a share of sequences is between 0 and 1, got {share:g}")
        return min(math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(share)), self.cut)

    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        t = np.asarray(tokens, dtype=np.float64)
        with np.errstate(divide="ignore"):  # log 0: everybody runs
            share = _upper((np.log(np.maximum(t, 0)) - self.mu) / self.sigma)
        return np.where(t < self.cut, share, 0.0)

    def longest(self, n: int) -> float:
        return _longest(self, n)

    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        drawn = np.random.default_rng(seed).lognormal(self.mu, self.sigma, n)
        return _whole(np.minimum(drawn, self.cut))

    def __str__(self) -> str:
        end = f", at most {self.cut:g}" if math.isfinite(self.cut) else ""
        return f"log-normal, mean {self.mean:.0f} tokens, 95% below {self.quantile(0.95):.0f}{end}"


@dataclass(frozen=True)
class Measured(Lengths):
    """Lengths as a run had them: a sequence is as long as any of `tokens`, all alike likely."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(sorted(self.tokens)))
        if not self.tokens or not 0 < self.tokens[0] <= self.tokens[-1] < math.inf:
            found = f"the smallest is {self.tokens[0]:g}" if self.tokens else "there are none"
            raise LengthsError(f"measured lengths must be above 0: {found}")

    @classmethod
    def read(cls, path: str | Path, maximum: float = math.inf) -> Measured:
        """Read a file: `.npy`, `.json` (a list), or text with one number, or one JSON object, a line.

        An object's length is its `response_tokens`. What is longer than `maximum` stops there.
        Raises LengthsError for a file that is not there or not of this form, naming the line.
        """
        path = Path(path)
        try:
            if path.suffix == ".npy":
                read: Sequence[Any] = np.load(path, allow_pickle=False).ravel().tolist()
            elif path.suffix == ".json":
                read = json.loads(path.read_text())
            else:
                read = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            values = [entry["response_tokens"] if isinstance(entry, Mapping) else entry for entry in read]
            return cls(tuple(min(float(value), maximum) for value in values))
        except OSError as error:
            raise LengthsError(f"measured lengths: {error}") from None
        except KeyError as error:
            raise LengthsError(f"{path}: a line without {error}") from None
        except (TypeError, ValueError) as error:
            raise LengthsError(f"{path}: {error}; it should hold one number of tokens a line") from None

    @functools.cached_property
    def _array(self) -> NDArray[np.float64]:
        return np.array(self.tokens, dtype=np.float64)

    @property
    def maximum(self) -> float:
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        return float(self._array.mean())

    @property
    def mean_square(self) -> float:
        return float((self._array**2).mean())

    def quantile(self, share: float) -> float:
        if not 0 < share < 1:
            raise LengthsError(f"a share of sequences is between 0 and 1, got {share:g}")
        return self.tokens[math.ceil(share * len(self.tokens)) - 1]

    def active(self, tokens: ArrayLike) -> NDArray[np.float64]:
        return 1 - np.searchsorted(self._array, np.asarray(tokens), side="right") / len(self.tokens)

    def longest(self, n: int) -> float:
        """Exact: each value times the chance that it is the largest of `n` draws."""
        _check_n(n)
        below = (np.arange(len(self.tokens) + 1) / len(self.tokens)) ** n
        return float(self._array @ np.diff(below))

    def sample(self, n: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
        return _whole(np.random.default_rng(seed).choice(self._array, n))

    def __str__(self) -> str:
        return (
            f"{len(self.tokens)} measured, mean {self.mean:.0f} tokens, "
            f"95% below {self.quantile(0.95):g}, at most {self.maximum:g}"
        )


def log_normal(mean: float, p95: float, maximum: float = math.inf) -> Lengths:
    """Log-normal lengths that, stopped at `maximum` tokens, have this mean and this 95th percentile.

    These are what a run shows: the mean of the lengths as they came out, stopped ones included. A 95th
    percentile beyond the maximum is that of the lengths that would have been. Equal numbers: fixed lengths.

    Raises LengthsError when no log-normal has them, naming the means that one can have.
    """
    if not 0 < mean <= min(p95, maximum):
        raise LengthsError(
            f"mean {mean:g}, 95th percentile {p95:g}, at most {maximum:g} tokens: the mean must be above 0 "
            "and below both"
        )
    if mean in (p95, maximum):
        return Fixed(mean)

    def spread(sigma: float) -> LogNormal:
        return LogNormal(math.log(p95) - _Z95 * sigma, sigma, maximum)

    # The mean falls as sigma grows, up to a point: the first crossing is the distribution meant.
    grid = np.linspace(0, _LARGEST_SIGMA, 501)[1:]
    means = [spread(float(sigma)).mean for sigma in grid]
    crossing = next((i for i, value in enumerate(means) if value <= mean), None)
    if crossing is None:
        raise LengthsError(
            f"no log-normal has a mean of {mean:g} tokens with 95% below {p95:g}: "
            f"the mean is {min(means):.0f} or more; give measured lengths instead"
        )
    low, high = float(grid[crossing - 1]) if crossing else 1e-9, float(grid[crossing])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spread(middle).mean > mean else (low, middle)
    return spread(high)


@functools.lru_cache(maxsize=4096)
def _longest(lengths: LogNormal, n: int) -> float:
    """The integral of P(longest > t) over t, by Simpson's rule over z = (log t - mu) / sigma."""
    _check_n(n)
    end = lengths.sigma + _FAR
    if math.isfinite(lengths.cut):
        end = min(lengths._z(lengths.cut), end)
    if end <= -_FAR:
        return lengths.cut
    z = np.linspace(-_FAR, end, 2001)
    tokens = np.exp(lengths.mu + lengths.sigma * z)
    with np.errstate(divide="ignore"):
        exceeds = -np.expm1(n * np.log1p(-_upper(z)))
    weights = np.ones(len(z))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    steps = (z[1] - z[0]) / 3
    return float(tokens[0] + steps * weights @ (exceeds * lengths.sigma * tokens))


def _upper(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution's upper tail."""
    flat = [math.erfc(value) / 2 for value in (np.ravel(z) / math.sqrt(2)).tolist()]
    return np.array(flat).reshape(np.shape(z))


def _whole(tokens: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.rint(tokens), 1).astype(np.int64)


def _check_n(n: int) -> None:
    if n < 1:
        raise LengthsError(f"the longest of {n} sequences: there must be at least one")


def _check_keys(what: str, keys: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            raise LengthsError(
                f"{what} has no key {key!r} (known: {', '.join(known)}){did_you_mean(key, known)}"
            )


def _number(keys: Mapping[str, Any], key: str, what: str) -> float:
    try:
        return float(keys[key])
    except KeyError:
        raise LengthsError(f"{what} lacks {key}") from None
    except (TypeError, ValueError):
        raise LengthsError(f"{what}.{key} must be a number of tokens, got {keys[key]!r}") from None
