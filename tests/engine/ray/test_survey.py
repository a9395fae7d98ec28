"""Looking at the nodes of a real Ray cluster of several nodes."""

import time

import pytest
import ray
from ray.cluster_utils import Cluster

from rolemesh.engine import machine
from rolemesh.engine.ray import survey as module
from rolemesh.engine.ray.cluster import joined_cluster
from rolemesh.engine.ray.survey import survey
from rolemesh.placement.cluster import ClusterSpec

pytestmark = [pytest.mark.full, pytest.mark.alone]


@pytest.fixture(scope="module")
def address():
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1, num_gpus=0, resources={"rolemesh_slot": 2, "FPGA": 1}, labels={"zone": "a"})
    nodes.add_node(num_cpus=0, num_gpus=0, resources={"rolemesh_slot": 4})
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def cluster(address):
    with joined_cluster(address, device_kind="cpu") as spec:
        yield spec


def test_every_node_tells_its_memory_and_the_file_reads_back(cluster):
    found, notes = survey(cluster)
    facts = machine.look()
    assert notes == []
    assert sorted(node.devices for node in found.nodes) == [0, 2, 4]
    for node in found.nodes:
        assert node.host_bytes == pytest.approx(facts.memory_bytes / 2)
        assert node.address
    (two,) = (node for node in found.nodes if node.devices == 2)
    assert (two.labels["zone"], two.resources) == ("a", {"FPGA": 1.0})
    assert two.memory_bytes == pytest.approx(facts.memory_bytes / 4)
    assert ClusterSpec.from_yaml(found.to_yaml()) == found
    assert ray.available_resources().get("CPU") == 2.0  # the look took nothing


def test_a_node_that_does_not_answer_is_noted_within_the_limit(cluster, monkeypatch):
    monkeypatch.setattr(module, "look", lambda: time.sleep(60))
    start = time.monotonic()
    found, notes = survey(cluster, limit_s=1.0)
    assert time.monotonic() - start < 20
    assert found == cluster
    assert len(notes) == 3
    assert all("no answer within 1 s" in note for note in notes)
