"""A recipe's pools on a real Ray cluster whose nodes differ in resources, labels and addresses."""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import yaml
from ray._private.authentication import authentication_token_setup
from ray.cluster_utils import Cluster

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.ray.cluster import SLOT, joined_cluster
from rolemesh.engine.ray.recovery import Spared
from rolemesh.engine.ray.worker_group import RayClassWithInitArgs
from rolemesh.engine.worker import Worker
from rolemesh.launch import train
from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import load_recipe
from rolemesh.launch.progress import Progress
from rolemesh.placement.pools import PlacementError
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(400)]


class Seated(Worker):
    """A role without its model, that tells where its process is."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        pass

    @register(Dispatch.ONE_TO_ALL)
    def seat(self) -> tuple[str, str]:
        import ray

        return ray.get_runtime_context().get_node_id(), self.context.node


@pytest.fixture(scope="module", autouse=True)
def _sent_by_value() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """The address, and Ray's id of each node."""
    # As `ray start` does: where there is a token, the cluster asks for it and joining brings it.
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    small = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    added = {
        "first": cluster.add_node(**small, resources={SLOT: 4}, labels={"kind": "h100", "zone": "a"}),
        "second": cluster.add_node(**small, resources={SLOT: 4}, labels={"kind": "h100", "zone": "b"}),
        "old": cluster.add_node(**small, resources={SLOT: 4, "v100": 3}, labels={"kind": "v100"}),
        "apart": cluster.add_node(**small, resources={SLOT: 1}, node_ip_address="127.0.0.2"),
    }
    yield {"address": cluster.address, **{name: node.node_id for name, node in added.items()}}
    cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("placed")
    tiny_checkpoint(root / "policy", layers=2)
    tiny_checkpoint(root / "scorer", layers=2, head="score", seed=1)
    rows = [{"prompt": f"{i}>", "reward_model": {"ground_truth": "1"}} for i in range(8)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return root


def recipe(folder: Path, nodes: dict[str, str], pools: dict[str, dict]):
    content = {
        "run": {"dir": "run", "steps": 1, "device": "cpu", "address": nodes["address"]},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "ppo", "kl": {"in": "reward"}},
        "batch": {"prompts": 8, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32"},
        "critic": {"path": "scorer", "dtype": "float32"},
        "reward": {"path": "scorer", "dtype": "float32"},
        "placement": {"pools": pools},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


@pytest.fixture
def seats(folder: Path, nodes: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """For pools of a recipe: the nodes of each role's processes, as these say, and what Ray has left then."""
    names = {node_id: name for name, node_id in nodes.items()}
    monkeypatch.setattr(train, "worker_of", lambda *_: RayClassWithInitArgs(Seated))

    def seated(pools: dict[str, dict]) -> tuple[dict[str, Counter], dict[str, float]]:
        asked = recipe(folder, nodes, pools)
        report = check_recipe(asked)
        assert report.plan is not None, report.problems
        with joined_cluster(nodes["address"], device_kind="cpu") as cluster:
            plan = report.plan.on(cluster)
            with (
                Progress(1) as progress,
                train._worker_groups(Spared(), asked, plan, 1, progress) as groups,
            ):
                found = {role: Counter(names[i] for i, _ in group.seat()) for role, group in groups.items()}
                for role in found:
                    planned = {node for node, _ in plan.nodes[plan.pool_of(role).name]}
                    assert {node for _, node in groups[role].seat()} == planned
                return found, ray.available_resources()

    return seated


def test_labels_and_resources_send_every_role_where_they_are(seats):
    found, left = seats(
        {
            "new": {
                "roles": ["actor", "rollout"],
                "nodes": 2,
                "per_node": 2,
                "where": {"labels": {"kind": "h100"}},
            },
            "b": {"roles": ["critic"], "devices": 2, "where": {"labels": {"kind": "h100", "zone": "b"}}},
            "old": {"roles": ["ref"], "devices": 3, "where": {"resources_per_worker": {"v100": 1}}},
            "apart": {"roles": ["reward"], "share": 1, "where": {"node_ip": "127.0.0.2"}},
        }
    )
    assert found == {
        "actor": {"first": 2, "second": 2},
        "rollout": {"first": 2, "second": 2},
        "critic": {"second": 2},
        "ref": {"old": 3},
        "reward": {"apart": 1},
    }
    assert left.get("v100", 0) == 0, "each of the three processes holds one"
    assert left[SLOT] == 13 - 10


def test_a_resource_counts_for_each_process(seats):
    pools = {
        "old": {"roles": ["ref"], "devices": 1, "where": {"resources_per_worker": {"v100": 1.5}}},
        "rest": {"roles": ["actor", "rollout", "critic", "reward"], "devices": 2},
    }
    found, left = seats(pools)
    assert found["ref"] == {"old": 1}
    assert left["v100"] == 1.5
    two = seats({**pools, "old": {**pools["old"], "devices": 2}})
    assert two[0]["ref"] == {"old": 2}
    assert two[1].get("v100", 0) == 0


def test_more_of_a_resource_than_a_node_has_is_refused_with_what_it_has(folder, nodes):
    old = {"roles": ["ref"], "devices": 2, "where": {"resources_per_worker": {"v100": 2}}}
    rest = {"roles": ["actor", "rollout", "critic", "reward"], "devices": 2}
    (problem,) = check_recipe(recipe(folder, nodes, {"old": old, "rest": rest})).problems
    assert "pool 'old' asks 2 devices" in problem
    assert "2 v100 each" in problem
    assert "3 v100 free" in problem


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            {"labels": {"kind": "h200"}},
            r"no node has label kind=h200 \(there are labels: kind=h100, kind=v100",
        ),
        ({"labels": {"rack": "a"}}, r"no node has label rack=a \(there are labels: kind=h100"),
        ({"resources_per_worker": {"h200": 1}}, r"no node has resource 'h200' \(there are resources: v100\)"),
        ({"node_ip": "10.9.8.7"}, r"no node has address '10\.9\.8\.7' \(there are nodes: .*127\.0\.0\.2"),
        (
            {"labels": {"kind": "h100"}, "resources_per_worker": {"v100": 1}},
            "no node has all of label kind=h100, resource 'v100'",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [{"devices": 2}, {"nodes": 1, "per_node": 2}, {"share": "1/2"}], ids=str)
def test_what_no_node_has_is_an_error_at_once_that_lists_what_there_is(
    folder: Path, nodes: dict[str, str], where: dict, message: str, size: dict
):
    pools = {
        "wanted": {"roles": ["ref"], **size, "where": where},
        "rest": {"roles": ["actor", "rollout", "critic", "reward"], "devices": 2},
    }
    start = time.monotonic()
    (problem,) = check_recipe(recipe(folder, nodes, pools)).problems
    assert "pool 'wanted'" in problem
    assert re.search(message, problem), problem
    assert time.monotonic() - start < 60, "nothing is waited for"


def test_a_plan_whose_label_is_gone_is_refused_before_anything_starts(folder, nodes):
    pools = {
        "all": {
            "roles": ["actor", "rollout", "ref", "critic", "reward"],
            "devices": 2,
            "where": {"labels": {"zone": "a"}},
        }
    }
    plan = check_recipe(recipe(folder, nodes, pools)).plan
    with joined_cluster(nodes["address"], device_kind="cpu") as cluster:
        others = tuple(node for node in cluster.nodes if node.labels.get("zone") != "a")
        with pytest.raises(PlacementError, match=r"(?s)does not fit this cluster.*no node has label zone=a"):
            plan.on(type(cluster)(others, "cpu"))
