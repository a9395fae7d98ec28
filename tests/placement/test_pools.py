"""Fitting pools on nodes: exact against brute force, and refusals that carry numbers."""

import itertools
import random
import time

import pytest

from rolemesh.placement.cluster import ClusterError, ClusterSpec, NodeSpec
from rolemesh.placement.pools import PlacementError, PoolSpec, Where, fit_pools


def _pool(name, *counts, where=None, cpus=0.0):
    return PoolSpec(name, (name,), counts, cpus_per_process=cpus, where=where or Where())


def _brute_force_fits(pools, cluster):
    """Try every injective choice of nodes for every pool."""
    choices = [list(itertools.permutations(cluster.nodes, len(pool.process_on_nodes))) for pool in pools]
    return any(_holds(pools, chosen) for chosen in itertools.product(*choices))


def _holds(pools, chosen):
    devices, cpus, resources = {}, {}, {}
    for pool, nodes in zip(pools, chosen, strict=True):
        for node, count in zip(nodes, pool.process_on_nodes, strict=True):
            if not pool.where.admits(node):
                return False
            devices[node.name] = devices.get(node.name, node.devices) - count
            cpus[node.name] = cpus.get(node.name, node.cpus) - count * pool.cpus_per_process
            for name, amount in pool.where.resources_per_worker.items():
                key = (node.name, name)
                resources[key] = resources.get(key, node.resources[name]) - count * amount
    return all(left > -1e-6 for amounts in (devices, cpus, resources) for left in amounts.values())


def _random_case(rng):
    nodes = tuple(
        NodeSpec(
            f"n{i}",
            devices=rng.choice([0, 1, 2, 4]),
            cpus=rng.choice([1, 2, 4]),
            labels={"kind": rng.choice(["big", "small"])},
            resources=rng.choice([{}, {"nic": 2}]),
        )
        for i in range(rng.randint(1, 4))
    )
    pools = [
        _pool(
            f"p{i}",
            *(rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 2))),
            where=rng.choice(
                [Where(), Where(), Where(labels={"kind": "big"}), Where(resources_per_worker={"nic": 1})]
            ),
            cpus=rng.choice([0.0, 0.5, 1.0]),
        )
        for i in range(rng.randint(1, 3))
    ]
    return pools, ClusterSpec(nodes)


def test_what_fits_is_placed_and_what_does_not_is_refused_as_brute_force_says():
    rng = random.Random(7)
    verdicts = {True: 0, False: 0}
    for _ in range(600):
        pools, cluster = _random_case(rng)
        feasible = _brute_force_fits(pools, cluster)
        verdicts[feasible] += 1
        if not feasible:
            with pytest.raises(PlacementError):
                fit_pools(pools, cluster)
            continue
        placed = fit_pools(pools, cluster).nodes
        nodes = {node.name: node for node in cluster.nodes}
        assert [tuple(count for _, count in placed[pool.name]) for pool in pools] == [
            pool.process_on_nodes for pool in pools
        ]
        chosen = [[nodes[name] for name, _ in placed[pool.name]] for pool in pools]
        assert all(len({node.name for node in row}) == len(row) for row in chosen)
        assert _holds(pools, chosen)
    assert min(verdicts.values()) > 100


def test_a_first_choice_that_blocks_a_later_pool_is_taken_back():
    cluster = ClusterSpec((NodeSpec("big", 8), NodeSpec("small", 4)))
    assert fit_pools([_pool("a", 4), _pool("b", 8)], cluster).nodes == {
        "a": (("small", 4),),
        "b": (("big", 8),),
    }


def test_the_nearest_that_fits_does_fit():
    rng = random.Random(3)
    for _ in range(200):
        pools, cluster = _random_case(rng)
        with pytest.raises(PlacementError) as refused:
            fit_pools([_pool("huge", 9, 9), *pools], cluster)
        nearest = str(refused.value).split("Nearest that fits: ")[1].split(". Nodes")[0]
        if nearest != "none":
            fit_pools([_pool("huge", *map(int, nearest.strip("[]").split(", ")))], cluster)


def test_a_pool_larger_than_the_cluster_is_refused_with_the_numbers_at_once():
    with pytest.raises(PlacementError) as refused:
        fit_pools([_pool("main", 8, 8)], ClusterSpec((NodeSpec("node-0", 8, address="10.0.0.1"),)))
    message = str(refused.value)
    assert "pool 'main' asks 16 devices on 2 nodes as [8, 8]; 8 present" in message
    assert "node-0 (10.0.0.1): 8 devices" in message
    assert "Nearest that fits: [8]" in message
    assert (refused.value.pool, refused.value.wanted, refused.value.present) == ("main", 16, 8)


def test_a_node_that_is_short_is_named_with_what_it_has():
    cluster = ClusterSpec((NodeSpec("n1", 8), NodeSpec("n2", 4)))
    with pytest.raises(
        PlacementError, match=r"node n2 takes 4 .*\(4 devices free; needs 8\).*fits: \[4, 4\]"
    ):
        fit_pools([_pool("critic", 8, 8)], cluster)


def test_cpus_are_checked_per_node():
    cluster = ClusterSpec((NodeSpec("n1", 8, cpus=4),))
    with pytest.raises(
        PlacementError, match=r"with 1 CPUs each; 8 present; node n1 takes 4 .*4 CPUs free; needs 8"
    ):
        fit_pools([_pool("a", 8, cpus=1.0)], cluster)
    fit_pools([_pool("a", 8, cpus=0.5)], cluster)


def test_a_head_without_devices_is_no_obstacle():
    cluster = ClusterSpec((NodeSpec("head", 0, cpus=2), NodeSpec("worker", 4, cpus=4)))
    assert fit_pools([_pool("a", 4, cpus=1.0)], cluster).nodes == {"a": (("worker", 4),)}


def test_pools_are_exclusive_and_the_message_points_to_colocation():
    with pytest.raises(
        PlacementError, match=r"exclusive: a 6 \+ b 6 = 12 devices wanted > 8 present.*colocation"
    ):
        fit_pools([_pool("a", 6), _pool("b", 6)], ClusterSpec.uniform(1, 8))


def test_pools_that_fit_in_sum_but_not_per_node_are_told_beside_whom():
    with pytest.raises(PlacementError, match=r"pool 'b' asks 3 .*present beside a; .*fits: \[1, 1, 1\]"):
        fit_pools([_pool("a", 2, 2, 2), _pool("b", 3)], ClusterSpec.uniform(3, 3))


def test_labels_choose_nodes_and_an_absent_label_is_named_with_those_that_exist():
    cluster = ClusterSpec(
        (NodeSpec("n1", 4, labels={"kind": "small"}), NodeSpec("n2", 4, labels={"kind": "big"}))
    )
    trainer = _pool("trainer", 2, where=Where(labels={"kind": "big"}))
    assert fit_pools([trainer], cluster).nodes == {"trainer": (("n2", 2),)}
    reward = _pool("reward", 1, where=Where(labels={"kind": "tiny"}))
    with pytest.raises(PlacementError, match=r"label kind=tiny \(there are labels: kind=big, kind=small\)"):
        fit_pools([trainer, reward], cluster)


def test_constraints_that_no_single_node_meets_together_are_listed():
    cluster = ClusterSpec((NodeSpec("n1", 4, labels={"kind": "big"}), NodeSpec("n2", 4, device_type="a100")))
    both = _pool("a", 1, where=Where(device="a100", labels={"kind": "big"}))
    with pytest.raises(PlacementError, match="no node has all of device type 'a100', label kind=big"):
        fit_pools([both], cluster)


def test_an_unknown_address_lists_the_known_ones():
    cluster = ClusterSpec((NodeSpec("n1", 4, address="127.0.0.1"),))
    fit_pools([_pool("a", 1, where=Where(node_ip="n1"))], cluster)
    with pytest.raises(PlacementError, match=r"address 'myhost' \(there are nodes: n1 127.0.0.1\)"):
        fit_pools([_pool("a", 1, where=Where(node_ip="myhost"))], cluster)


def test_the_message_shows_other_resources_so_that_a_wrong_kind_is_seen():
    cluster = ClusterSpec((NodeSpec("n1", 1), NodeSpec("n2", 0, resources={"TPU": 1})))
    with pytest.raises(PlacementError, match="n2: 0 devices, 1 TPU"):
        fit_pools([_pool("a", 1, 1)], cluster)


def test_a_pool_of_another_device_kind_is_refused():
    with pytest.raises(PlacementError, match="'a' asks cuda devices, the cluster has cpu ones"):
        fit_pools([_pool("a", 1)], ClusterSpec.uniform(1, 1, device_kind="cpu"))


def test_dead_nodes_hold_nothing():
    cluster = ClusterSpec((NodeSpec("n1", 4, alive=False), NodeSpec("n2", 2)))
    with pytest.raises(PlacementError, match=r"n1: 4 devices \(not alive\)"):
        fit_pools([_pool("a", 4)], cluster)
    with pytest.raises(PlacementError, match="0 present"):
        fit_pools([_pool("a", 4)], ClusterSpec(()))


def test_a_thousand_nodes_are_fitted_or_refused_in_seconds():
    cluster = ClusterSpec.uniform(1024, 8)
    halves = [_pool("a", *[8] * 512), _pool("b", *[4] * 1024)]
    start = time.monotonic()
    with pytest.raises(PlacementError, match="'b' asks 4096"):
        fit_pools(halves, cluster)
    fit_pools([_pool("a", *[8] * 512), _pool("b", *[8] * 512)], cluster)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("counts", [(), (0,), (-1,), (1.5,)])
def test_a_pool_needs_whole_processes(counts):
    with pytest.raises(PlacementError, match="whole numbers of at least 1"):
        _pool("a", *counts)


def test_a_cluster_that_contradicts_itself_is_refused():
    with pytest.raises(ClusterError, match="several nodes are named n"):
        ClusterSpec((NodeSpec("n"), NodeSpec("n")))
    with pytest.raises(ClusterError, match="negative"):
        NodeSpec("n", devices=-1)


def test_two_pools_of_one_name_are_refused():
    with pytest.raises(PlacementError, match="several pools are named a"):
        fit_pools([_pool("a", 1), _pool("a", 1)], ClusterSpec.uniform(1, 2))
