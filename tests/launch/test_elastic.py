"""A node is gone for good: the run goes on with those that are left. Several Ray nodes on this machine."""

import json
from pathlib import Path

import pytest
import yaml
from broken_runs import actor_of, output_of, start_run
from ray._private.authentication import authentication_token_setup
from ray.cluster_utils import Cluster
from tiny import tiny_checkpoint

from rolemesh.engine.ray.cluster import SLOT
from rolemesh.engine.recovery import read_recoveries
from rolemesh.placement.plan import PlacementPlan

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
STEPS = 5
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
)


@pytest.fixture
def cluster():
    # As `ray start` does: where there is a token, the cluster asks for it and joining brings it.
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    small = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    nodes = [cluster.add_node(**small, resources={SLOT: 2}) for _ in range(2)]
    yield cluster, nodes
    cluster.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "policy")
    rows = [{"prompt": f"{i}>", "reward_model": {"ground_truth": "1"}} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)
    content = {
        "run": {"steps": STEPS, "save_every": 2, "device": "cpu", "node_wait_s": 5},
        "data": {"train_files": ["train.jsonl"], "max_prompt_tokens": 8},
        "algorithm": {"name": "grpo", "kl": {"in": "none"}},
        "batch": {"prompts": 4, "samples_per_prompt": 4, "micro_batch_tokens": 64},
        "lengths": {"max_response_tokens": 8},
        "actor": {"path": "policy", "dtype": "float32", "optim": {"lr": 1e-3}},
        "reward": "./reward.py:compute_score",
        "placement": "colocate",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def test_an_elastic_run_that_loses_a_node_goes_on_under_another_plan(folder, cluster):
    ray_cluster, nodes = cluster
    address = f"--address={ray_cluster.address}"
    whole = start_run(folder, "run.dir=whole", address)
    output = output_of(whole, {}, 300)
    assert whole.returncode == 0, output
    assert "lost workers" not in output

    broken = start_run(folder, "run.dir=broken", address, "run.elastic=true")
    output = output_of(broken, {3: lambda: ray_cluster.remove_node(nodes[1], allow_graceful=False)}, 400)
    assert broken.returncode == 0, output
    assert "placed on what is left: colocate: 1 pools, 2 devices" in output
    (entry,) = read_recoveries(folder / "broken")
    assert (entry.step, entry.from_step, entry.replayed) == (4, 2, 1)
    assert PlacementPlan.from_yaml((folder / "broken" / "plan.yaml").read_text()).n_devices == 2
    trained = [(folder / run / "trained.jsonl").read_text() for run in ("whole", "broken")]
    assert trained[0] == trained[1]
    one, other = actor_of(folder / "whole", STEPS), actor_of(folder / "broken", STEPS)
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 1e-4
