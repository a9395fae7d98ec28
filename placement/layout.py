"""How one role's model is cut over the ranks of its pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolemesh.placement.hints import did_you_mean
from rolemesh.placement.model import Experts, ModelShape, stage_layers

_AXES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp")


class LayoutError(ValueError):
    """A layout that cannot be cut this way; the message holds the sizes and the legal alternatives."""


class Coords(NamedTuple):
    """Where one rank stands in the grid; field order is the grid's, slowest axis first."""

    pp: int
    dp: int
    cp: int
    tp: int


class ExpertCoords(NamedTuple):
    """Where one rank stands among the experts' ranks; field order is that grid's, slowest axis first.

    A pipeline stage's ranks, in their order, are cut over `etp` (parts of an expert), then `ep` (different
    experts); `edp` counts the copies.
    """

    pp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes; rank order is `arange(world).view(pp, dp, cp, tp)` (Megatron's).

    `pp_layers` are the layers of each part of the pipeline, in the model's order: pp numbers, pp x vpp with
    interleaving, where part i is on stage i modulo pp. Empty: as even as can be.

    Raises LayoutError when a size is not a positive whole number.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    pp_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.sizes().items():
            if type(value) is not int or value < 1:
                raise LayoutError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.sequence_parallel) is not bool:
            raise LayoutError(f"sequence_parallel must be true or false, got {self.sequence_parallel!r}")
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError("sequence_parallel cuts the sequence over tp: it needs tp > 1, got tp=1")
        self._check_pp_layers()

    def _check_pp_layers(self) -> None:
        given = self.pp_layers
        if not isinstance(given, list | tuple) or any(type(n) is not int or n < 1 for n in given):
            raise LayoutError(f"pp_layers must be whole numbers of at least 1, got {given!r}")
        object.__setattr__(self, "pp_layers", tuple(given))
        if given and len(given) != self.pp * self.vpp:
            raise LayoutError(
                f"pp_layers {list(given)} are for {len(given)} parts of a pipeline, {self._parts} has "
                f"{self.pp * self.vpp}"
            )

    @property
    def _parts(self) -> str:
        return f"pp={self.pp}" + (f" x vpp={self.vpp}" if self.vpp > 1 else "")

    @classmethod
    def fill(cls, pins: Mapping[str, object], world: int) -> Layout:
        """The layout of `world` ranks that keeps the pinned sizes; `dp` follows unless it is pinned.

        Raises LayoutError for an unknown key, and when the pinned sizes do not divide `world`.
        """
        for name in pins:
            _known_axis(name, tuple(field.name for field in fields(cls)))
        pinned = cls(**pins)  # type: ignore[arg-type]  # the constructor checks the values
        model_ranks = pinned.tp * pinned.cp * pinned.pp
        if world % model_ranks:
            legal = _legal_sizes(pinned, world)
            raise LayoutError(
                f"tp={pinned.tp} x cp={pinned.cp} x pp={pinned.pp} = {model_ranks} ranks per replica "
                f"do not divide the pool's {world} devices; {legal}"
            )
        dp = world // model_ranks
        if pins.get("dp", dp) != dp:
            raise LayoutError(
                f"tp={pinned.tp} x cp={pinned.cp} x pp={pinned.pp} x dp={pinned.dp} = {pinned.world} ranks, "
                f"the pool has {world}; dp={dp} would use them all (or leave dp out)"
            )
        return cls(**{**asdict(pinned), "dp": dp})

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def grid(self) -> NDArray[np.int64]:
        """Ranks as an array [pp, dp, cp, tp]."""
        return np.arange(self.world).reshape(self.pp, self.dp, self.cp, self.tp)

    def sizes(self) -> dict[str, int]:
        """Every axis and its size, without the switches."""
        return {name: getattr(self, name) for name in _AXES}

    def coords(self, rank: int) -> Coords:
        """Position of `rank` in the grid."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside this layout of {self.world} ranks ({self})")
        return Coords(*(int(index) for index in np.unravel_index(rank, self.grid.shape)))

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only along `axes`, each ascending, ordered by first rank."""
        return _groups(self.grid, Coords._fields, axes)

    @property
    def expert_grid(self) -> NDArray[np.int64]:
        """Ranks as an array [pp, edp, ep, etp]. Raises LayoutError when ep x etp does not divide a stage."""
        if reason := self._stage_fault():
            raise LayoutError(reason)
        return np.arange(self.world).reshape(self.pp, -1, self.ep, self.etp)

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Position of `rank` in the experts' grid."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside this layout of {self.world} ranks ({self})")
        return ExpertCoords(*(int(index) for index in np.unravel_index(rank, self.expert_grid.shape)))

    def expert_groups(self, *axes: str) -> list[list[int]]:
        """The same as `groups` for axes of the experts' grid."""
        return _groups(self.expert_grid, ExpertCoords._fields, axes)

    def rank(self, coords: Coords) -> int:
        """The rank at a position of the grid."""
        return int(self.grid[coords])

    def stages(self, n_layers: int) -> list[list[range]]:
        """Layers, counted from 0, of each part of each pipeline stage: [pp][vpp].

        Raises LayoutError when `pp_layers` are of another number of layers.
        """
        counts = self.pp_layers or stage_layers(n_layers, self.pp * self.vpp)
        if sum(counts) != n_layers:
            raise LayoutError(f"pp_layers {list(counts)} are {sum(counts)} layers, the model has {n_layers}")
        parts = [range(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]
        return [parts[stage :: self.pp] for stage in range(self.pp)]

    def replica(self, dp_rank: int) -> list[int]:
        """Ranks that together hold replica `dp_rank`, ascending."""
        return sorted(self._replica_grid(dp_rank).ravel().tolist())

    def collect_rank(self, dp_rank: int) -> int:
        """The rank that returns replica `dp_rank`'s results: last pipeline stage, tp 0, cp 0."""
        return int(self._replica_grid(dp_rank)[-1, 0, 0])

    def _replica_grid(self, dp_rank: int) -> NDArray[np.int64]:  # [pp, cp, tp]
        if not 0 <= dp_rank < self.dp:
            raise LayoutError(f"replica {dp_rank} is outside this layout of dp={self.dp}")
        return self.grid[:, dp_rank]

    def check(self, shape: ModelShape) -> None:
        """Raise LayoutError when the workers cannot run a model of this shape so, naming what would do."""
        if shape.not_runnable:
            raise LayoutError(shape.not_runnable)
        self.check_cut(shape)
        if shape.moe and (reason := self._experts_not_run()):
            raise LayoutError(reason)

    def check_cut(self, shape: ModelShape) -> None:
        """Raise LayoutError when megatron-core could not cut a model of this shape so, run or not.

        This is what planning asks; `check` is what running asks.
        """
        if self.pp * self.vpp > shape.n_layers:
            raise LayoutError(
                f"{self._parts} leaves stages without a layer: the model has {shape.n_layers} layers"
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} interleaves pipeline stages: it needs pp > 1")
        self.stages(shape.n_layers)
        if reason := self._experts_fault(shape.moe):
            raise LayoutError(reason)
        if reason := _tp_fault(self.tp, shape):
            devices = self.world // (self.pp * self.cp)
            whose = f"{devices} devices" if self.pp == 1 else f"{devices} devices of a pipeline stage"
            raise LayoutError(f"tp={self.tp} {reason}; legal tp for {whose}: {_legal_tp(shape, devices)}")

    def _experts_fault(self, moe: Experts | None) -> str | None:
        """Why `ep` and `etp` cannot cut the experts, or None."""
        if moe is None:
            axes = [f"{name}={getattr(self, name)}" for name in ("ep", "etp") if getattr(self, name) > 1]
            return f"{', '.join(axes)} cuts experts, and the model has none" if axes else None
        if moe.n % self.ep:
            return f"ep={self.ep} does not divide the {moe.n} experts"
        if moe.ffn % self.etp:
            return f"etp={self.etp} does not divide an expert's {moe.ffn} feed-forward columns"
        return self._stage_fault()

    def _stage_fault(self) -> str | None:
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            return f"ep={self.ep} x etp={self.etp} does not divide the {stage} ranks of a pipeline stage"
        return None

    def _experts_not_run(self) -> str | None:
        """Why the workers do not run a mixture of experts so, or None."""
        if self.etp not in (1, self.tp):
            return f"etp={self.etp} is not supported: experts are whole, or cut over tp: 1 or tp={self.tp}"
        if self.tp > 1 and not self.sequence_parallel:
            return (
                f"a mixture of experts with tp={self.tp} needs sequence_parallel: true "
                "(each token is then routed by one tp rank)"
            )
        return None

    def __str__(self) -> str:
        cut = [f"{name}={size}" for name, size in self.sizes().items() if size > 1]
        cut += [f"pp_layers={'+'.join(map(str, self.pp_layers))}"] * bool(self.pp_layers)
        return " ".join(cut + ["sequence_parallel"] * self.sequence_parallel) or "one rank"


def _groups(grid: NDArray[np.int64], names: tuple[str, ...], axes: tuple[str, ...]) -> list[list[int]]:
    for axis in axes:
        _known_axis(axis, names)
    inside = [i for i, name in enumerate(names) if name in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    size = int(np.prod([grid.shape[i] for i in inside]))
    return grid.transpose(outside + inside).reshape(-1, size).tolist()


def _known_axis(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise LayoutError(f"a layout has no {name!r} (known: {', '.join(known)}){did_you_mean(name, known)}")


def _legal_sizes(pinned: Layout, world: int) -> str:
    """For each axis of the replica that alone could be changed: the values that make `world` divide."""
    sizes = {name: getattr(pinned, name) for name in ("tp", "cp", "pp")}
    model_ranks = sizes["tp"] * sizes["cp"] * sizes["pp"]
    options = []
    for name, size in sizes.items():
        rest = model_ranks // size
        if size > 1 and world % rest == 0:
            values = [n for n in range(1, world // rest + 1) if (world // rest) % n == 0]
            options.append(f"legal {name}: {', '.join(map(str, values))}")
    return "; ".join(options) or f"their product must divide {world}"


def _tp_fault(tp: int, shape: ModelShape) -> str | None:
    """Why `tp` cannot cut this model, or None. Fewer KV heads than tp are copied, so they must divide it."""
    if shape.n_heads % tp:
        return f"does not divide the {shape.n_heads} attention heads"
    if shape.n_kv_heads % tp and tp % shape.n_kv_heads:
        return f"neither divides the {shape.n_kv_heads} KV heads nor is a multiple of them"
    if shape.n_dense_layers and shape.ffn % tp:
        return f"does not divide the {shape.ffn} feed-forward columns"
    if shape.moe and shape.moe.shared_ffn % tp:
        return f"does not divide the {shape.moe.shared_ffn} columns of the shared experts"
    return None


def _legal_tp(shape: ModelShape, devices: int) -> str:
    fitting = [tp for tp in range(1, devices + 1) if _tp_fault(tp, shape) is None]
    whole = ", ".join(str(tp) for tp in fitting if devices % tp == 0)
    idle = ", ".join(f"{tp} leaving {devices % tp} idle" for tp in fitting if devices % tp)
    return f"{whole} ({idle})" if idle else whole
