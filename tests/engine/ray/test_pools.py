"""Pools on a cluster of fake nodes: a head without GPUs, two nodes of four, one whose device is no GPU."""

import threading
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.ray.cluster import SLOT, node_ids, read_cluster
from rolemesh.engine.ray.pools import ResourcePool, ResourcePoolManager, create_pools
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from rolemesh.engine.roles import Role
from rolemesh.engine.worker import Worker
from rolemesh.placement.pools import PlacementError, Where

pytestmark = [pytest.mark.full, pytest.mark.alone]


class Probe(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[str, int]:
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == self.world_size
        return self.context.node, self.context.local_rank


@pytest.fixture(scope="module")
def nodes():
    small = {"object_store_memory": 10**8, "num_cpus": 4}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **small,
            "resources": {SLOT: 2},
            "_system_config": {"prestart_worker_first_driver": False},
        },
    )
    cluster.add_node(**small, num_gpus=4, labels={"kind": "big"}, resources={SLOT: 2})
    cluster.add_node(**small, num_gpus=4, labels={"kind": "small"})
    cluster.add_node(**small, resources={"TPU": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def by_label(kind: str) -> str:
    return next(node.name for node in read_cluster().nodes if node.labels.get("kind") == kind)


def nodes_of(pool: ResourcePool) -> list[str]:
    ids = {node_id: name for name, node_id in node_ids().items()}
    bundles = placement_group_table(pool.placement_group)["bundles_to_node_id"]
    return [ids[bundles[i]] for i in range(pool.world_size)]


def test_nodes_without_gpus_count_as_none_and_names_are_unique(nodes):
    cluster = read_cluster()
    assert cluster.device_kind == "cuda"
    assert sorted(node.devices for node in cluster.nodes) == [0, 0, 4, 4]
    assert len({node.name for node in cluster.nodes}) == 4
    assert read_cluster("cpu").n_devices == 4
    assert set(node_ids()) == {node.name for node in cluster.nodes}


def test_a_pool_beside_a_head_without_gpus_is_placed(nodes):
    pool = ResourcePool([4], name_prefix="actor")
    pool.create(wait_s=0)
    assert len(set(nodes_of(pool))) == 1
    pool.shutdown()


def test_a_pool_larger_than_the_cluster_is_refused_with_the_numbers(nodes):
    start = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        ResourcePool([8, 8], name_prefix="actor").create(wait_s=1)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert "actor" in message
    assert (caught.value.wanted, caught.value.present) == (16, 8)
    assert all(node.name in message for node in read_cluster().nodes)
    assert "1 TPU" in message, "a device of another kind is seen in the nodes' resources"


def test_pools_are_exclusive(nodes):
    manager = ResourcePoolManager({"a": [3, 3], "b": [3, 3]}, {Role.Actor: "a", Role.Critic: "b"})
    assert manager.get_n_gpus() == 12
    with pytest.raises(PlacementError, match=r"(?s)exclusive.*12 devices wanted > 8.*colocation"):
        manager.create_resource_pool(wait_s=0)


def test_labels_choose_the_node_and_a_missing_one_is_an_error_at_once(nodes):
    trainer = ResourcePool([2], name_prefix="trainer", where=Where(labels={"kind": "small"}))
    reward = ResourcePool([1], name_prefix="reward", where=Where(labels={"kind": "big"}))
    create_pools([trainer, reward], wait_s=0)
    assert nodes_of(trainer) == [by_label("small")] * 2
    assert nodes_of(reward) == [by_label("big")]
    for pool in (trainer, reward):
        pool.shutdown()
    start = time.monotonic()
    with pytest.raises(PlacementError, match=r"(?s)tiny.*(big|small)"):
        ResourcePool([1], name_prefix="reward", where=Where(labels={"kind": "tiny"})).create(wait_s=60)
    assert time.monotonic() - start < 5


def test_cpus_are_checked_too(nodes):
    with pytest.raises(PlacementError, match="CPU"):
        ResourcePool([4], name_prefix="actor", cpus_per_process=2).create(wait_s=0)


def test_devices_that_someone_else_holds_end_the_wait(nodes):
    other = placement_group([{"GPU": 4}] * 2, strategy="STRICT_SPREAD")
    assert other.wait(10)
    try:
        with pytest.raises(PlacementError, match=r"someone else holds them.*0 of 8"):
            ResourcePool([4], name_prefix="actor").reserve([(by_label("big"), 4)], {by_label("big"): 1}, 1.0)
    finally:
        remove_placement_group(other)


@pytest.mark.parametrize("processes", range(1, 13))
def test_shares_of_a_device_sum_to_at_most_one(processes):
    pool = ResourcePool([1], max_colocate_count=processes)
    assert 0.99 < processes * pool.share <= 1
    pool.shutdown()


def test_one_world_over_two_nodes_and_roles_beside_gpus(nodes):
    pool = ResourcePool([2, 1], name_prefix="cpu", device="cpu")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Probe), role="probe")
    places = group.place()
    assert [local for _, local in places] == [0, 1, 0]
    assert places[0][0] == places[1][0] != places[2][0]
    pool.shutdown()


def test_many_worlds_start_at_once_without_a_clash_of_ports(nodes):
    pools = [ResourcePool([1], name_prefix=f"p{i}", device="cpu") for i in range(3)]
    create_pools(pools, wait_s=10)
    groups: list[RayWorkerGroup] = []

    def start(pool: ResourcePool) -> None:
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(Probe), role="probe"))

    threads = [threading.Thread(target=start, args=[pool]) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(groups) == 3
    for pool in pools:
        pool.shutdown()


def test_a_node_that_joins_late_is_waited_for_and_told(nodes):
    told: list[str] = []
    pool = ResourcePool([4, 4, 4], name_prefix="actor")
    with pytest.raises(PlacementError):
        pool.create(wait_s=1, report=told.append)
    waiting = threading.Thread(target=pool.create, kwargs={"wait_s": 60, "report": told.append})
    waiting.start()
    time.sleep(1)
    nodes.add_node(num_gpus=4, num_cpus=4, object_store_memory=10**8)
    waiting.join(timeout=90)
    assert len(set(nodes_of(pool))) == 3
    assert all(line.startswith("8/12 devices, waiting up to") for line in told[:2])
    pool.shutdown()
