"""Clusters as values: presets, YAML there and back, what their devices can be counted on for."""

import dataclasses
import math

import pytest

from rolemesh.placement.cluster import ClusterError, ClusterSpec, NodeSpec
from rolemesh.placement.hardware import GIB, hardware
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, fit_pools

MIXED = """
across_groups_gb_per_s: 12.5
nodes:
  - {name: "train-[0-3]", device: h100-80, devices: 8, cpus: 96, group: rack-a, host_gib: 1024}
  - {count: 2, device: V100, devices: 4, memory_gib: 15.5, nic_gb_per_s: "6.25", group: rack-b}
  - {name: head, address: 10.0.0.1, labels: {kind: head}, resources: {disk: 2}}
  - 2 x a100-40x6
"""


def test_a_preset_names_nodes_devices_and_types():
    cluster = ClusterSpec.preset("16 x h100x8")
    assert cluster == ClusterSpec.uniform(16, 8, device_type="h100-80")
    mixed = ClusterSpec.preset("2 x h100x8 + 4 x v100x4")
    assert [(node.name, node.device_type, node.devices) for node in mixed.nodes] == [
        ("node-0", "h100-80", 8),
        ("node-1", "h100-80", 8),
        *((f"node-{i}", "v100-32", 4) for i in range(2, 6)),
    ]
    assert mixed.device_types == {"h100-80": 16, "v100-32": 16}
    assert ClusterSpec.preset("rtx4090-24x2").device_types == {"rtx4090-24": 2}
    assert ClusterSpec.preset("3xcpux4").device_kind == "cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16 h100", "'16 h100' is no preset: nodes x device x devices per node"),
        ("2 x h10x8", r"no profile of a device 'h10'.*did you mean"),
        ("2 x h100x8 + 1 x cpux4", "GPUs or CPU slots as its devices, not both"),
    ],
)
def test_a_preset_that_says_nothing_is_refused(text, message):
    with pytest.raises(ClusterError, match=message):
        ClusterSpec.preset(text)


def test_yaml_describes_uneven_and_mixed_clusters():
    cluster = ClusterSpec.from_yaml(MIXED)
    assert [node.name for node in cluster.nodes] == [
        *(f"train-{i}" for i in range(4)),
        "node-4",
        "node-5",
        "head",
        "node-7",
        "node-8",
    ]
    assert cluster.device_types == {"h100-80": 32, "v100-32": 8, "a100-40": 12}
    train, v100, head, a100 = (cluster.nodes[i] for i in (0, 4, 6, 7))
    assert (train.cpus, train.host_bytes, train.group) == (96, 1024 * GIB, "rack-a")
    assert (v100.memory_bytes, v100.nic_bytes_per_s) == (15.5 * GIB, 6.25e9)
    assert (head.devices, head.labels, head.resources) == (0, {"kind": "head"}, {"disk": 2})
    assert (a100.devices, a100.cpus) == (6, math.inf)


def test_yaml_is_read_back_as_it_was():
    cluster = ClusterSpec.from_yaml(MIXED)
    assert ClusterSpec.from_yaml(cluster.to_yaml()) == cluster
    large = ClusterSpec.preset("1280 x h100x8")
    assert len(large.to_yaml().splitlines()) <= 4
    assert ClusterSpec.from_yaml(large.to_yaml()) == large
    live = ClusterSpec(
        (
            NodeSpec("gpu07", 4, 64.0, "H100", address="10.0.0.7"),
            NodeSpec("gpu08", 4, 64.0, "H100", address="10.0.0.8", alive=False),
        )
    )
    again = ClusterSpec.from_yaml(live.to_yaml())
    assert [node.address for node in again.nodes] == ["10.0.0.7", "10.0.0.8"]
    assert (again.device_types, again.nodes[1].alive) == ({"h100-80": 4}, False)


def test_a_recipes_cluster_section_is_a_cluster():
    section = {"nodes": 16, "device": "h100-80", "per_node": 8}
    assert ClusterSpec.from_keys(section) == ClusterSpec.preset("16 x h100x8")
    with pytest.raises(ClusterError, match=r"no key 'pernode'.*did you mean per_node"):
        ClusterSpec.from_keys({"nodes": 16, "pernode": 8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{device: h100-80, devics: 8}]", r"a node has no key 'devics'.*did you mean devices"),
        ("nodes: [{device: h100-8, devices: 8}]", r"no profile of a device 'h100-8'.*did you mean h100-80"),
        ("nodes: [{device: h100-80, devices: some}]", "devices must be a number, got 'some'"),
        ("nodes: [{device: h100-80, devices: 1.5}]", "devices must be a whole number"),
        ("nodes: [{device: h100-80, devices: 8, memory_gib: 0}]", "memory_bytes must be above 0, got 0"),
        ("nodes: [{name: a, devices: 1}, {name: a, devices: 1}]", "several nodes are named a"),
        ("nodes: [{name: 'a-[0-3]', count: 2}]", "stands for 4 nodes, count says 2"),
        ("nodes: [{labels: [big]}]", "labels of node 'node-0' must be a mapping"),
        ("nodes: [3]", "a node is a mapping or a preset"),
        ("nod: 3", "a mapping with nodes"),
        ("nodes: [", "not YAML"),
        (
            "{nodes: [h100x8], across_group: 3}",
            r"the cluster has no key 'across_group'.*did you mean across_groups",
        ),
    ],
)
def test_what_cannot_be_read_names_the_key(text, message):
    with pytest.raises(ClusterError, match=message):
        ClusterSpec.from_yaml(text)


def test_figures_come_from_the_device_type_unless_the_node_has_its_own():
    cluster = ClusterSpec.from_yaml(MIXED)
    h100 = cluster.profile("H100")
    assert h100.memory_bytes == hardware("h100-80").memory_bytes
    assert h100.host_bytes == 128 * GIB  # 1,024 GiB over 8 devices
    assert h100.sources["host_bytes"] == "the cluster's description"
    v100 = cluster.profile("v100-32")
    assert (v100.memory_bytes, v100.nic_bytes_per_s) == (15.5 * GIB, 6.25e9)
    assert v100.dtypes == ("float16", "float32")
    with pytest.raises(ClusterError, match=r"type 'h200-141'.*h100-80, v100-32, a100-40"):
        cluster.profile("h200-141")


def test_the_weakest_node_of_a_type_counts():
    nodes = [
        NodeSpec("a", 8, device_type="h100-80"),
        NodeSpec("b", 8, device_type="h100-80", nic_bytes_per_s=25e9),
    ]
    assert ClusterSpec(tuple(nodes)).profile("h100-80").nic_bytes_per_s == 25e9


def test_slots_of_a_cpu_cluster_have_the_slots_profile():
    cluster = ClusterSpec.uniform(2, 4, device_kind="cpu")
    assert cluster.device_types == {"cpu": 8}
    assert cluster.profile("cpu") == hardware("cpu")
    with pytest.raises(ClusterError, match="node 'node-0' has no device type"):
        ClusterSpec.uniform(1, 8).profile("")


def test_nodes_that_can_stand_for_each_other_are_one_class():
    cluster = ClusterSpec.from_yaml(MIXED)
    assert [len(nodes) for nodes in cluster.alike()] == [4, 2, 2]
    first, second = cluster.nodes[:2]
    assert first.like(second)
    for change in ({"devices": 7}, {"group": "rack-b"}, {"labels": {"a": "b"}}, {"host_bytes": 1.0}):
        assert not first.like(dataclasses.replace(second, **change))
    assert len(ClusterSpec.preset("1280 x h100x8").alike()) == 1


def test_rates_follow_the_topology():
    def node(name, kind="h100-80", devices=8, **figures):
        return NodeSpec(name, devices, device_type=kind, **figures)

    a, b, c = node("a", group="rack-0"), node("b", group="rack-0"), node("c", group="rack-1")
    cluster = ClusterSpec((a, b, c), across_groups_bytes_per_s=20e9)
    assert cluster.bytes_per_s(a, a) == 450e9
    assert cluster.bytes_per_s(a, b) == 50e9
    assert cluster.bytes_per_s(a, c) == 20e9
    trays = [node(f"t{i}", "gb200-186", 4, group="nvl72") for i in range(2)]
    assert ClusterSpec(tuple(trays)).bytes_per_s(*trays) == 900e9
    bridged = node("w", "a6000-48", 8)  # bridges join pairs only
    assert ClusterSpec((bridged,)).bytes_per_s(bridged, bridged) == 31.5e9


def test_a_pools_device_type_is_known_by_all_its_names():
    cluster = ClusterSpec((NodeSpec("a", 8, device_type="V100"), NodeSpec("b", 8, device_type="H100")))
    pool = PoolSpec("train", ("actor",), (8,), where=Where(device="h100-80"))
    assert fit_pools([pool], cluster).nodes["train"] == (("b", 8),)
    with pytest.raises(PlacementError, match=r"device type 'a100-80' \(there are types: H100, V100\)"):
        fit_pools([dataclasses.replace(pool, where=Where(device="a100-80"))], cluster)


def test_a_head_without_devices_in_a_cluster_file_is_no_obstacle():
    cluster = ClusterSpec.from_yaml(
        "nodes: [{name: head, cpus: 8}, {name: worker, device: h100-80, devices: 4}]"
    )
    assert fit_pools([PoolSpec("a", ("actor",), (4,))], cluster).nodes == {"a": (("worker", 4),)}
    assert cluster.device_types == {"h100-80": 4}
    assert [len(nodes) for nodes in cluster.alike()] == [1]


def test_a_node_with_another_kind_of_device_is_seen_in_the_message():
    cluster = ClusterSpec.from_yaml(
        "nodes: [{name: n1, device: h100-80, devices: 1}, {name: n2, resources: {TPU: 1}}]"
    )
    with pytest.raises(PlacementError, match=r"n1: 1 devices of type h100-80.*\n.*n2: 0 devices, 1 TPU"):
        fit_pools([PoolSpec("a", ("actor",), (1, 1))], cluster)


def test_a_label_that_no_node_has_is_named_with_those_that_exist():
    cluster = ClusterSpec.from_yaml(
        "nodes: [{devices: 4, labels: {kind: big}}, {devices: 4, labels: {kind: small}}]"
    )
    trainer = PoolSpec("trainer", ("actor",), (4,), where=Where(labels={"kind": "big"}))
    assert fit_pools([trainer], cluster).nodes["trainer"] == (("node-0", 4),)
    reward = PoolSpec("reward", ("reward",), (1,), where=Where(labels={"kind": "tiny"}))
    with pytest.raises(PlacementError, match=r"label kind=tiny \(there are labels: kind=big, kind=small\)"):
        fit_pools([trainer, reward], cluster)
