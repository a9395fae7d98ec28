"""Recipe keys that services share: how requests are bounded, and how fast the planner may take them to be."""

from __future__ import annotations

from dataclasses import dataclass

from rolemesh.launch.fields import RecipeError, Section, key


@dataclass(frozen=True, kw_only=True)
class RequestLimits(Section):
    """What bounds the requests of one client."""

    in_flight: int = key(64, "Most requests at once, over all endpoints.", unit="requests", at_least=1)
    batch: int = key(16, "Most samples in one request.", unit="samples", at_least=1)
    connect_s: float = key(5.0, "Longest time to connect.", unit="s", above=0)
    read_s: float = key(60.0, "Longest silence of a server.", unit="s", above=0)
    total_s: float = key(
        120.0,
        "Longest time of one try, counted from sending, not from waiting for a turn.",
        unit="s",
        above=0,
    )
    retries: int = key(4, "Further tries after a failed one.", unit="tries", at_least=0)
    backoff_s: float = key(1.0, "Wait before the second try; it doubles each time.", unit="s", above=0)
    backoff_most_s: float = key(30.0, "Longest such wait.", unit="s", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backoff_s > self.backoff_most_s:
            raise RecipeError(
                f"backoff_s is {self.backoff_s:g}, above the longest wait {self.backoff_most_s:g}"
            )


@dataclass(frozen=True, kw_only=True)
class Speed(Section):
    """How fast a service (or function) is, as its owner states it: the planner counts with it."""

    latency_s: float = key(0.0, "Time before the first answer.", unit="s", at_least=0)
    samples_per_s: float | None = key(
        None, "Samples answered each second.", unit="samples/s", above=0, shown="any number"
    )


def check_endpoints(endpoints: tuple[str, ...]) -> None:
    """Raise RecipeError for an endpoint that is no URL."""
    for url in endpoints:
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest.partition("/")[0]:
            raise RecipeError(f"endpoints has {url!r}, but must be URLs such as http://rm-0:5000")
