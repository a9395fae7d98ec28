"""Shapes and their fit against counting by hand and against trying every node."""

import itertools
import random

import pytest

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.search.space import Shape, Space


def cluster(*nodes: tuple[int, str, str]) -> ClusterSpec:
    """(devices, type, group)"""
    return ClusterSpec(
        tuple(NodeSpec(f"n{i}", d, device_type=t, group=g) for i, (d, t, g) in enumerate(nodes))
    )


def worlds(space: Space) -> list[tuple[int, ...]]:
    return [shape.devices.counts for shape in space.shapes]


def test_equal_nodes_give_one_shape_per_count_and_shares_of_a_node():
    space = Space(ClusterSpec.uniform(3, 8))
    assert worlds(space) == [(1,), (2,), (4,), (8,), (8, 8), (8, 8, 8)]
    assert worlds(Space(ClusterSpec.uniform(1, 6))) == [(1,), (2,), (3,), (4,), (6,)]


def test_uneven_nodes_of_a_type_combine_and_types_do_not():
    space = Space(cluster((4, "a", ""), (2, "a", ""), (2, "b", "")))
    of_type = {t: [s.devices.counts for s in space.shapes if s.devices.device_type == t] for t in "ab"}
    assert sorted(of_type["a"]) == [(1,), (1,), (2,), (2,), (4,), (4, 2)]  # a share and a node of two differ
    assert of_type["b"] == [(1,), (2,)]


def test_groups_of_equal_size_count_once():
    space = Space(cluster(*[(8, "a", g) for g in ("x", "x", "y", "y")]))
    two = sorted(s.devices.groups for s in space.shapes if s.devices.counts == (8, 8))
    assert two == [("0.0", "0.0"), ("0.0", "0.1")]  # both in one group, or one in each
    assert len([s for s in space.shapes if s.devices.counts == (8, 8, 8)]) == 1


def test_many_groups_leave_packed_and_spread_shapes_and_say_so():
    nodes = [(8, "a", f"g{i // 8}") for i in range(128)]
    space = Space(cluster(*nodes))
    assert not space.complete
    assert {s.devices.world for s in space.shapes if s.whole} == {8 * n for n in range(1, 129)}
    sixteen = {s.whole[0][1] for s in space.shapes if s.devices.world == 16 * 8}
    assert sixteen == {(8, 8), (1,) * 16}


def test_nodes_that_are_gone_have_no_devices():
    nodes = (NodeSpec("up", 2), NodeSpec("down", 8, alive=False), NodeSpec("cpu", 0))
    assert worlds(Space(ClusterSpec(nodes))) == [(1,), (2,)]


def test_labels_that_matter_tell_nodes_apart():
    nodes = (NodeSpec("a", 2, labels={"rack": "1"}), NodeSpec("b", 2, labels={"rack": "2"}))
    assert len(Space(ClusterSpec(nodes)).classes) == 1
    space = Space(ClusterSpec(nodes), ["rack=1"])
    assert sorted(kind.labels for kind in space.classes) == [frozenset(), frozenset({"rack=1"})]


@pytest.mark.parametrize("seed", range(8))
def test_shapes_fit_exactly_when_some_choice_of_nodes_does(seed: int):
    rng = random.Random(seed)
    spec = cluster(
        *[(rng.choice([2, 4, 6]), rng.choice("ab"), rng.choice(["x", "y"])) for _ in range(rng.randint(2, 5))]
    )
    space = Space(spec)
    devices = {node.name: node.devices for node in spec.nodes}
    for _ in range(60):
        shapes = [rng.choice(space.shapes) for _ in range(rng.randint(1, 4))]
        found = space.fit(shapes)
        assert (found is not None) == fits_somehow(spec, shapes), shapes
        if found is not None:
            used = dict.fromkeys(devices, 0)
            for shape, nodes in zip(shapes, found, strict=True):
                assert sorted(count for _, count in nodes) == sorted(shape.devices.counts)
                assert grouping(spec, nodes) == sorted(pattern(shape))
                for name, count in nodes:
                    used[name] += count
            assert all(used[name] <= devices[name] for name in used)


def pattern(shape: Shape) -> list[tuple[int, ...]]:
    """For each topology group of each kind of node the devices on its nodes."""
    by_group: dict[str, list[int]] = {}
    groups = shape.devices.groups or ("",) * len(shape.devices.counts)
    for group, count in zip(groups, shape.devices.counts, strict=True):
        by_group.setdefault(group, []).append(count)
    return [tuple(counts) for counts in by_group.values()]


def grouping(spec: ClusterSpec, nodes) -> list[tuple[int, ...]]:
    by_group: dict[tuple[str, int], list[int]] = {}
    of = {node.name: node for node in spec.nodes}
    for name, count in nodes:
        by_group.setdefault((of[name].group, of[name].devices), []).append(count)
    return sorted(tuple(counts) for counts in by_group.values())


def fits_somehow(spec: ClusterSpec, shapes: list[Shape]) -> bool:
    def choices(shape: Shape):
        kind = shape.devices.device_type
        nodes = [node for node in spec.nodes if node.device_type == kind]
        if shape.share is not None:
            size = sum(shape.need)
            wanted = Space(spec).classes[shape.share[0]].devices
            return [{n.name: size} for n in nodes if n.devices == wanted]
        some = itertools.combinations(nodes, len(shape.devices.counts))
        whole = [tuple((n.name, n.devices) for n in chosen) for chosen in some]
        return [dict(chosen) for chosen in whole if grouping(spec, chosen) == sorted(pattern(shape))]

    def extend(k: int, free: dict[str, int]) -> bool:
        if k == len(shapes):
            return True
        return any(
            extend(k + 1, {name: n - choice.get(name, 0) for name, n in free.items()})
            for choice in choices(shapes[k])
            if all(free[name] >= n for name, n in choice.items())
        )

    return extend(0, {node.name: node.devices for node in spec.nodes})
