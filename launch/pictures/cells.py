"""Which device holds what: a plan's nodes as rows of cells, equal nodes folded. For the map's two forms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.memory.items import GIB
from rolemesh.placement.plan import PlacementPlan

MOST_ROWS = 24  # of a map; where equal nodes leave more, nodes that differ in pp are folded too
IDLE = ""


@dataclass(frozen=True)
class RoleAt:
    """A role on a device: for each axis longer than 1 the first and last coordinate over the folded nodes.

    `gib` is the memory of the role's heaviest rank; None where nothing is predicted.
    """

    role: str
    coords: Mapping[str, tuple[int, int]]
    gib: float | None

    def where(self) -> str:
        """`t0 p0-3 d12`: the axes by their first letter; empty for a role on one rank."""
        spans = ((name[0], *ends) for name, ends in self.coords.items())
        return " ".join(f"{name}{a}" if a == b else f"{name}{a}-{b}" for name, a, b in spans)


@dataclass(frozen=True)
class Cell:
    """A device of a row's first node: its pool (IDLE without one), rank, and roles."""

    pool: str
    rank: int
    roles: tuple[RoleAt, ...] = ()


@dataclass(frozen=True)
class Row:
    """Nodes that hold the same, and the cells of each. `link` says what joins devices, `domain` how many, and
    `device` of which type they are; empty where the cluster is not known.
    """

    nodes: tuple[str, ...]
    cells: tuple[Cell, ...]
    link: str = ""
    domain: int = 0
    group: str = ""
    device: str = ""

    def name(self) -> str:
        """`node-0`, or `node-[0-15]`, or first and last where names do not follow one another."""
        first, last = self.nodes[0], self.nodes[-1]
        if len(self.nodes) == 1:
            return first
        stem = re.sub(r"\d+$", "", first)
        numbers = [node[len(stem) :] for node in self.nodes]
        if all(node.startswith(stem) and n.isdigit() for node, n in zip(self.nodes, numbers, strict=True)):
            whole = [int(n) for n in numbers]
            if whole == list(range(whole[0], whole[-1] + 1)):
                return f"{stem}[{whole[0]}-{whole[-1]}]"
        return f"{first} ... {last}"


def rows_of(plan: PlacementPlan, cluster: ClusterSpec | None = None, *, coarse: bool = False) -> list[Row]:
    """The plan's nodes in order, equal ones as one row; link domains where the cluster is known.

    `coarse` also folds nodes that hold other parts of the same models.
    """
    cells = _cells(plan)
    links = _links(cluster, cells) if cluster else {}
    fine = _folded(cells, links, ("dp", "cp", "ep"))
    if len(fine) <= MOST_ROWS and not coarse:
        return fine
    return _folded(cells, links, ("dp", "cp", "ep", "pp", "tp") if coarse else ("dp", "cp", "ep", "pp"))


def _cells(plan: PlacementPlan) -> dict[str, list[Cell]]:
    """By node: ranks of a pool follow its nodes in order, pools of one node each other."""
    nodes: dict[str, list[Cell]] = {}
    for pool in plan.pools:
        rank = 0
        for node, count in plan.nodes.get(pool.name, ()):
            mine = nodes.setdefault(node, [])
            for _ in range(count):
                mine.append(Cell(pool.name, rank, tuple(_role(plan, role, rank) for role in pool.roles)))
                rank += 1
    for node, count in plan.idle.items():
        nodes.setdefault(node, []).extend([Cell(IDLE, i) for i in range(count)])
    return dict(sorted(nodes.items(), key=lambda entry: _node_order(entry[0])))


def _role(plan: PlacementPlan, role: str, rank: int) -> RoleAt:
    layout = plan.layouts[role]
    at = layout.coords(rank)._asdict()
    axes = {axis: at[axis] for axis in ("tp", "pp", "cp", "dp") if getattr(layout, axis) > 1}
    if layout.ep > 1:
        axes["ep"] = layout.expert_coords(rank).ep
    held = plan.prediction.role_bytes(role)
    return RoleAt(role, {axis: (n, n) for axis, n in axes.items()}, held / GIB if held else None)


def _links(cluster: ClusterSpec, cells: Mapping[str, Sequence[Cell]]) -> dict[str, tuple[str, int, str, str]]:
    """By node: its fast link in words, how many devices it joins, the node's group, and its devices' type."""
    found = {}
    for node in cluster.usable:
        if node.name not in cells:
            continue
        if cluster.device_kind == "cpu":
            found[node.name] = ("one machine's memory", node.devices, node.group, "")
            continue
        if not cluster.device_type(node):
            continue
        profile = cluster.profile_of(node)
        said = f"{profile.link_bytes_per_s / 1e9:.0f} GB/s"
        domain = min(profile.link_devices, node.devices)
        found[node.name] = (said, domain, node.group, cluster.device_type(node))
    return found


def _folded(
    cells: Mapping[str, Sequence[Cell]], links: Mapping[str, tuple[str, int, str, str]], axes: Sequence[str]
) -> list[Row]:
    """Nodes that differ in nothing but ranks and coordinates along `axes` share a row."""
    groups: dict[object, list[str]] = {}
    for node, mine in cells.items():
        key = (
            links.get(node),
            tuple((cell.pool, tuple(_kept(role, axes) for role in cell.roles)) for cell in mine),
        )
        groups.setdefault(key, []).append(node)
    rows = []
    for nodes in groups.values():
        columns = zip(*(cells[node] for node in nodes), strict=True)
        about = links.get(nodes[0], ("", 0, "", ""))
        rows.append(Row(tuple(nodes), tuple(_merged(column) for column in columns), *about))
    return rows


def _kept(role: RoleAt, axes: Sequence[str]) -> object:
    kept = tuple((axis, ends) for axis, ends in role.coords.items() if axis not in axes)
    return role.role, kept


def _merged(column: Sequence[Cell]) -> Cell:
    """The cells at one place of folded nodes as one, its coordinates from the least to the greatest."""
    first = column[0]
    roles = []
    for i, role in enumerate(first.roles):
        seen = [cell.roles[i].coords for cell in column]
        coords = {
            axis: (min(one[axis][0] for one in seen), max(one[axis][1] for one in seen))
            for axis in role.coords
        }
        roles.append(RoleAt(role.role, coords, role.gib))
    return Cell(first.pool, first.rank, tuple(roles))


def _node_order(name: str) -> tuple[str, int, str]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name
