"""The devices there are: nodes with their device count, CPUs, labels and other resources."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import yaml

from rolemesh.placement.hardware import GIB, HardwareError, HardwareProfile, canonical, hardware
from rolemesh.placement.hints import did_you_mean

DeviceKind = Literal["cuda", "cpu"]

_FIGURES = {  # what a node may state itself: key of the YAML form, and field
    "memory_gib": "memory_bytes",
    "host_gib": "host_bytes",
    "link_gb_per_s": "link_bytes_per_s",
    "nic_gb_per_s": "nic_bytes_per_s",
    "pcie_gb_per_s": "pcie_bytes_per_s",
}
_NODE_KEYS = (
    "name",
    "count",
    "device",
    "devices",
    "cpus",
    "labels",
    "resources",
    "address",
    "group",
    "alive",
    *_FIGURES,
)
_CLUSTER_KEYS = ("nodes", "device_kind", "across_groups_gb_per_s")
_RECIPE_KEYS = ("nodes", "device", "per_node")
_TERM = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<device>\S+?)\s*x\s*(?P<devices>\d+)")
_RANGE = re.compile(r"(?P<stem>.*)\[(?P<first>\d+)-(?P<last>\d+)\](?P<tail>.*)")


class ClusterError(ValueError):
    """A cluster description that contradicts itself."""


@dataclass(frozen=True)
class NodeSpec:
    """One node. On a CPU cluster a device is a worker slot.

    `device_type` names the model (`h100-80`), `resources` other resources as Ray counts them,
    `cpus` is infinite where it is not known. Raises ClusterError for negative amounts.

    Attributes:
        memory_bytes: of one device; None, here and below: what is usual for the device type.
        host_bytes: host memory of the whole node.
        link_bytes_per_s: between two devices of the node, per direction.
        nic_bytes_per_s: to other nodes, per direction and device.
        pcie_bytes_per_s: between a device and host memory, per direction.
        group: what the node shares with its neighbours: a switch, a rail, or the NVLink domain where the
            device's domain is larger than a node. Empty where it is not known.
    """

    name: str
    devices: int = 0
    cpus: float = math.inf
    device_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = ""
    alive: bool = True
    memory_bytes: float | None = None
    host_bytes: float | None = None
    link_bytes_per_s: float | None = None
    nic_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if self.devices < 0 or self.cpus < 0 or any(amount < 0 for amount in self.resources.values()):
            raise ClusterError(f"node {self.name!r} has negative amounts: {self}")
        for name, amount in self._own_figures().items():
            if not amount > 0:
                raise ClusterError(f"node {self.name!r}: {name} must be above 0, got {amount:g}")

    def _own_figures(self) -> dict[str, float]:
        """Figures that the node states itself, by name."""
        stated = {name: getattr(self, name) for name in _FIGURES.values()}
        return {name: amount for name, amount in stated.items() if amount is not None}

    @property
    def profile(self) -> HardwareProfile:
        """What each of its devices can do: the device type's profile, with what the node itself states.

        Raises ClusterError for a node whose device type is not given or has no profile.
        """
        if not self.device_type:
            raise ClusterError(f"node {self.name!r} has no device type: give one, such as device: h100-80")
        try:
            return self.profile_from(hardware(self.device_type))
        except HardwareError as error:
            raise ClusterError(f"node {self.name!r}: {error}") from None

    def profile_from(self, usual: HardwareProfile) -> HardwareProfile:
        """`usual`, with what the node itself states."""
        own: dict[str, Any] = dict(self._own_figures())
        if "host_bytes" in own:
            own["host_bytes"] /= max(self.devices, 1)
        return replace(
            usual, **own, sources={**usual.sources, **dict.fromkeys(own, "the cluster's description")}
        )

    def like(self, other: NodeSpec) -> bool:
        """Whether the two can stand for each other: equal in all but name and address."""
        return _key(self) == _key(other)

    def __str__(self) -> str:
        where = f"{self.name} ({self.address})" if self.address not in ("", self.name) else self.name
        parts = [f"{self.devices} devices" + (f" of type {self.device_type}" if self.device_type else "")]
        parts += [f"{self.cpus:g} CPUs"] if math.isfinite(self.cpus) else []
        parts += [f"label {key}={value}" for key, value in sorted(self.labels.items())]
        parts += [f"{amount:g} {name}" for name, amount in sorted(self.resources.items())]
        parts += [f"group {self.group}"] if self.group else []
        return f"{where}: {', '.join(parts)}" + ("" if self.alive else " (not alive)")


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of one kind of device, though of several device types.

    `across_groups_bytes_per_s`: what each device gets between nodes of different groups, per direction;
    None: as much as inside a group. `profiles`: measured ones, by device type; they are no part of the YAML
    form. Raises ClusterError for a repeated node name or an unknown kind.
    """

    nodes: tuple[NodeSpec, ...]
    device_kind: DeviceKind = "cuda"
    across_groups_bytes_per_s: float | None = None
    profiles: Mapping[str, HardwareProfile] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ClusterError(f"several nodes are named {', '.join(repeated)}")
        if self.device_kind not in get_args(DeviceKind):
            raise ClusterError(f"device_kind {self.device_kind!r} is none of {get_args(DeviceKind)}")
        across = self.across_groups_bytes_per_s
        if across is not None and not across > 0:
            raise ClusterError(f"across_groups_bytes_per_s must be above 0, got {across:g}")

    @classmethod
    def uniform(
        cls,
        n_nodes: int,
        per_node: int,
        *,
        device_kind: DeviceKind = "cuda",
        device_type: str = "",
        cpus: float = math.inf,
    ) -> ClusterSpec:
        """`n_nodes` equal nodes, named node-0, node-1, ..."""
        return cls(
            tuple(NodeSpec(f"node-{i}", per_node, cpus, device_type) for i in range(n_nodes)), device_kind
        )

    @classmethod
    def preset(cls, text: str) -> ClusterSpec:
        """The cluster that `16 x h100x8` or `2 x h100x8 + 4 x v100x4` says: nodes x device x per node.

        Raises ClusterError for another form and for a device type without a profile.
        """
        return cls._of_entries([_term(term) for term in text.split("+")], {})

    @classmethod
    def from_yaml(cls, text: str) -> ClusterSpec:
        """Read a cluster file: a preset, or `nodes:` with a list of entries, or a recipe's `cluster` section.

        An entry is a preset's term or a mapping. Its `name` may end in a range, `node-[0-15]`, or there is
        a `count`; without `name`, nodes are numbered through. Figures are those of the device type unless
        the entry has its own: memory_gib (a device's), host_gib (the node's), link_gb_per_s, nic_gb_per_s
        (a device's), pcie_gb_per_s.

        Raises ClusterError for an unknown key or device type, naming the nearest, and for wrong values.
        """
        try:
            return cls.from_keys(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ClusterError(f"not YAML: {error}") from None

    @classmethod
    def from_keys(cls, keys: object) -> ClusterSpec:
        """As `from_yaml`, from what YAML reads."""
        if isinstance(keys, str):
            return cls.preset(keys)
        if not isinstance(keys, Mapping) or "nodes" not in keys:
            raise ClusterError(
                f"a cluster is a preset such as 16 x h100x8, or a mapping with nodes; got {keys!r}"
            )
        if not isinstance(keys["nodes"], list):
            _check_keys("the cluster", keys, _RECIPE_KEYS)
            entry = {
                "count": keys["nodes"],
                "device": keys.get("device", ""),
                "devices": keys.get("per_node", 8),
            }
            return cls._of_entries([entry], {})
        _check_keys("the cluster", keys, _CLUSTER_KEYS)
        entries = [_term(entry) if isinstance(entry, str) else entry for entry in keys["nodes"]]
        return cls._of_entries(entries, keys)

    @classmethod
    def _of_entries(cls, entries: Iterable[Mapping[str, Any]], keys: Mapping[str, Any]) -> ClusterSpec:
        nodes: list[NodeSpec] = []
        for entry in entries:
            nodes += _nodes(entry, first=len(nodes))
        kinds = {"cpu" if node.device_type == "cpu" else "cuda" for node in nodes if node.device_type}
        if len(kinds) > 1:
            raise ClusterError("a cluster has GPUs or CPU slots as its devices, not both")
        kind = keys.get("device_kind", kinds.pop() if kinds else "cuda")
        across = keys.get("across_groups_gb_per_s")
        return cls(
            tuple(nodes), kind, None if across is None else _number(keys, "across_groups_gb_per_s") * 1e9
        )

    def to_yaml(self) -> str:
        """The YAML form, equal nodes in a row as one entry; `from_yaml` reads it back."""
        keys: dict[str, Any] = {"device_kind": self.device_kind}
        if self.across_groups_bytes_per_s is not None:
            keys["across_groups_gb_per_s"] = self.across_groups_bytes_per_s / 1e9
        runs: list[list[NodeSpec]] = []
        for node in self.nodes:
            last = runs[-1][-1] if runs else None
            if (
                last
                and last.like(node)
                and _follows(last.name, node.name)
                and not (last.address or node.address)
            ):
                runs[-1].append(node)
            else:
                runs.append([node])
        keys["nodes"] = [_entry(run) for run in runs]
        return yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=110)

    @property
    def usable(self) -> tuple[NodeSpec, ...]:
        """Nodes that are alive and have a device."""
        return tuple(node for node in self.nodes if node.alive and node.devices)

    @property
    def n_devices(self) -> int:
        """Devices on nodes that are alive."""
        return sum(node.devices for node in self.usable)

    def device_type(self, node: NodeSpec) -> str:
        """The node's device type by its profile's name; `cpu` for worker slots, empty where not known."""
        return "cpu" if self.device_kind == "cpu" else canonical(node.device_type)

    @property
    def device_types(self) -> Mapping[str, int]:
        """Usable devices by type, in the order of the nodes."""
        counts: dict[str, int] = {}
        for node in self.usable:
            kind = self.device_type(node)
            counts[kind] = counts.get(kind, 0) + node.devices
        return counts

    def profile(self, device_type: str) -> HardwareProfile:
        """What a device of this type can be counted on for: the smallest of each figure over its nodes.

        Raises ClusterError when no usable node has the type.
        """
        kind = canonical(device_type)
        found = [self.profile_of(node) for node in self._distinct() if self.device_type(node) == kind]
        if not found:
            there = ", ".join(self.device_types) or "none"
            raise ClusterError(f"no usable node has devices of type {device_type!r} (there are: {there})")
        least = {name: min(getattr(profile, name) for profile in found) for name in _FIGURES.values()}
        return replace(
            found[0], **least, sources={k: v for profile in found for k, v in profile.sources.items()}
        )

    def with_profiles(self, *profiles: HardwareProfile) -> ClusterSpec:
        """The same devices, known by measured profiles (`hardware.load_profile`) instead of data sheets."""
        return replace(self, profiles={**self.profiles, **{profile.name: profile for profile in profiles}})

    def profile_of(self, node: NodeSpec) -> HardwareProfile:
        """What each device of a node can do. Raises ClusterError for a type that has no profile."""
        kind = self.device_type(node)
        if kind in self.profiles:
            return node.profile_from(self.profiles[kind])
        return replace(node, device_type=kind).profile

    def alike(self) -> tuple[tuple[NodeSpec, ...], ...]:
        """Usable nodes in classes that can stand for each other (name and address apart), in node order."""
        classes: dict[Any, list[NodeSpec]] = {}
        for node in self.usable:
            classes.setdefault(_key(node), []).append(node)
        return tuple(tuple(nodes) for nodes in classes.values())

    def _distinct(self) -> tuple[NodeSpec, ...]:
        """One usable node of each class."""
        return tuple(nodes[0] for nodes in self.alike())

    def bytes_per_s(self, one: NodeSpec, other: NodeSpec) -> float:
        """Nominal rate from a device of `one` to a device of `other`, per direction, each device's part."""
        first, second = self.profile_of(one), self.profile_of(other)
        link = min(first.link_bytes_per_s, second.link_bytes_per_s)
        if one.name == other.name:
            return link if one.devices <= first.link_devices else min(link, first.pcie_bytes_per_s)
        if one.group and one.group == other.group and first.link_devices > one.devices:
            return link  # one NVLink domain over several nodes
        rates = [first.nic_bytes_per_s, second.nic_bytes_per_s]
        if one.group != other.group and self.across_groups_bytes_per_s is not None:
            rates.append(self.across_groups_bytes_per_s)
        return min(rates)

    def table(self) -> str:
        """One indented line per node, for error messages."""
        return "\n".join(f"  {node}" for node in self.nodes) or "  (no nodes)"


def _key(node: NodeSpec) -> tuple[object, ...]:
    """Equal for nodes that are `like` each other."""
    figures = tuple(getattr(node, name) for name in _FIGURES.values())
    extras = tuple(sorted(node.labels.items())), tuple(sorted(node.resources.items()))
    return (node.devices, node.cpus, node.device_type, node.alive, node.group, *figures, *extras)


def _check_keys(what: str, keys: Iterable[Any], known: tuple[str, ...]) -> None:
    for key in keys:
        if key not in known:
            raise ClusterError(
                f"{what} has no key {key!r} (known: {', '.join(known)}){did_you_mean(key, known)}"
            )


def _number(keys: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    try:
        return float(keys.get(key, default))
    except (TypeError, ValueError):
        raise ClusterError(f"{key} must be a number, got {keys[key]!r}") from None


def _count(keys: Mapping[str, Any], key: str, default: int) -> int:
    number = _number(keys, key, default)
    if number != int(number) or number < 0:
        raise ClusterError(f"{key} must be a whole number of at least 0, got {keys[key]!r}")
    return int(number)


def _term(text: str) -> dict[str, Any]:
    """`16 x h100x8` as an entry."""
    match = _TERM.fullmatch(text.strip())
    if match is None:
        raise ClusterError(
            f"{text.strip()!r} is no preset: nodes x device x devices per node, such as 16 x h100x8"
        )
    if 0 in (int(match["count"] or 1), int(match["devices"])):
        raise ClusterError(f"{text.strip()!r} has no devices: at least one node with one device")
    return {
        "count": int(match["count"] or 1),
        "device": canonical(match["device"]),
        "devices": int(match["devices"]),
    }


def _nodes(entry: Mapping[str, Any], first: int) -> list[NodeSpec]:
    """Nodes of one entry; `first` is the number of the first one that has no name."""
    if not isinstance(entry, Mapping):
        raise ClusterError(f"a node is a mapping or a preset such as h100x8, got {entry!r}")
    _check_keys("a node", entry, _NODE_KEYS)
    names = _names(entry, first)
    for key in ("labels", "resources"):
        if not isinstance(entry.get(key, {}), Mapping):
            raise ClusterError(f"{key} of node {names[0]!r} must be a mapping, got {entry[key]!r}")
    node = NodeSpec(
        name="",
        devices=_count(entry, "devices", 0),
        cpus=_number(entry, "cpus", math.inf),
        device_type=canonical(str(entry.get("device") or "")),
        labels={str(key): str(value) for key, value in entry.get("labels", {}).items()},
        resources={str(key): _number(entry["resources"], key) for key in entry.get("resources", {})},
        address=str(entry.get("address", "")),
        group=str(entry.get("group", "")),
        alive=bool(entry.get("alive", True)),
        **{field: _number(entry, key) * _scale(key) for key, field in _FIGURES.items() if key in entry},
    )
    nodes = [replace(node, name=name) for name in names]
    if node.device_type and nodes:
        _ = nodes[0].profile  # an unknown device type is refused here, where it is written
    return nodes


def _names(entry: Mapping[str, Any], first: int) -> list[str]:
    count = _count(entry, "count", 1)
    if "name" not in entry:
        return [f"node-{i}" for i in range(first, first + count)]
    name = str(entry["name"])
    if match := _RANGE.fullmatch(name):
        numbers = range(int(match["first"]), int(match["last"]) + 1)
        if (count != len(numbers) and "count" in entry) or not numbers:
            raise ClusterError(f"name {name!r} stands for {len(numbers)} nodes, count says {count}")
        return [f"{match['stem']}{i}{match['tail']}" for i in numbers]
    return [f"{name}-{i}" for i in range(count)] if "count" in entry else [name]


def _follows(name: str, following: str) -> bool:
    """Whether `following` is the next name: node-10 after node-9."""
    stem, number = _numbered(name)
    return number is not None and following == f"{stem}{number + 1}"


def _numbered(name: str) -> tuple[str, int | None]:
    """A name's stem and its number; None where it does not end in one that can be counted on."""
    match = re.fullmatch(r"(.*?)(0|[1-9]\d*)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _entry(nodes: list[NodeSpec]) -> dict[str, Any]:
    """Equal nodes as one entry of the YAML form."""
    node = nodes[0]
    stem, first = _numbered(node.name)
    name = node.name if len(nodes) == 1 else f"{stem}[{first}-{_numbered(nodes[-1].name)[1]}]"
    entry: dict[str, Any] = {"name": name}
    entry |= {"device": node.device_type} if node.device_type else {}
    entry["devices"] = node.devices
    entry |= {"cpus": node.cpus} if math.isfinite(node.cpus) else {}
    for key in ("address", "group", "labels", "resources"):
        if value := getattr(node, key):
            entry[key] = dict(value) if isinstance(value, Mapping) else value
    for key, figure in _FIGURES.items():
        amount = getattr(node, figure)
        if amount is not None:
            entry[key] = amount / _scale(key)
    return entry if node.alive else entry | {"alive": False}


def _scale(key: str) -> float:
    return GIB if key.endswith("gib") else 1e9
