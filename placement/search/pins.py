"""What a user fixes, wishes or would rather not have; the search decides the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rolemesh.placement.costs import RoleOption

Strength = Literal["must", "prefer", "avoid"]

_POOL = ("together", "apart")
_DEVICES = ("device_type", "label", "devices")
_OPTION = ("micro_batch", "recompute", "offload")
_LAYOUT = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "sequence_parallel")


class PinError(ValueError):
    """A pin that says nothing, or one about a role that is not placed."""


@dataclass(frozen=True)
class Pin:
    """One statement about `roles`.

    `what` is `together` or `apart` (in one pool or in as many), `device_type`, `label` ("key=value" of every
    node), `devices` (their number), a layout's size (`tp`), or `micro_batch`, `recompute`, `offload`; `value`
    what it shall be. A `must` holds in every plan. A `prefer` that does not hold, and an `avoid` that does,
    makes a plan count as if its step took the fraction `weight` longer. Raises PinError.
    """

    roles: tuple[str, ...]
    what: str
    value: Any = None
    strength: Strength = "must"
    weight: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", (self.roles,) if isinstance(self.roles, str) else tuple(self.roles))
        if self.strength not in get_args(Strength):
            raise PinError(
                f"a pin's strength is one of {', '.join(get_args(Strength))}, got {self.strength!r}"
            )
        if self.what not in _POOL + _DEVICES + _OPTION + _LAYOUT:
            known = ", ".join(_POOL + _DEVICES + _OPTION + _LAYOUT)
            raise PinError(f"nothing to pin is called {self.what!r} (known: {known})")
        if self.what in _POOL and len(set(self.roles)) < 2:
            raise PinError(f"{self.what} needs at least two roles, got {', '.join(self.roles) or 'none'}")
        if self.what not in _POOL and (self.value is None or not self.roles):
            raise PinError(
                f"a pin on {self.what} needs a role and a value, got {self.roles} and {self.value!r}"
            )
        if not self.weight >= 0:
            raise PinError(f"a pin's weight is at least 0, got {self.weight}")

    def __str__(self) -> str:
        roles = ", ".join(self.roles)
        said = f"{roles} {self.what}" if self.what in _POOL else f"{roles}: {self.what}={self.value}"
        return said if self.strength == "must" else f"{self.strength} {said}"

    @property
    def about_pools(self) -> bool:
        """Whether it says who shares a pool."""
        return self.what in _POOL

    @property
    def about_devices(self) -> bool:
        """Whether it says which devices a role gets."""
        return self.what in _DEVICES

    @property
    def about_options(self) -> bool:
        """Whether it says how a role runs on its devices."""
        return self.what in _OPTION + _LAYOUT

    def wanted(self, holds: bool) -> bool:
        """Whether that is as the user wants it."""
        return holds != (self.strength == "avoid")

    def holds_for_pools(self, pools: Collection[Collection[str]]) -> bool:
        """For a pin about pools: whether roles in these pools satisfy it."""
        met = [len(set(self.roles) & set(pool)) for pool in pools]
        return max(met) == len(set(self.roles)) if self.what == "together" else max(met) <= 1

    def holds_for_option(self, option: RoleOption) -> bool:
        """For a pin about options."""
        where = option if self.what in _OPTION else option.layout
        return bool(getattr(where, self.what) == self.value)


def check_pins(pins: Collection[Pin], roles: Collection[str]) -> None:
    """Raise PinError for a pin about a role that is not among `roles`."""
    for pin in pins:
        for role in pin.roles:
            if role not in roles:
                raise PinError(
                    f"a pin ({pin}) is about {role!r}, which needs no devices ({', '.join(roles)})"
                )
