"""What the planner makes of schedule.staleness."""

from pathlib import Path

import pytest

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.request import request_of
from rolemesh.placement.auto import plan_strategy
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan
from rolemesh.placement.predict import predict

RECIPE = """
algorithm: {name: grpo, kl: {in: loss}}
batch: {prompts: 64, samples_per_prompt: 4}
lengths: {max_response_tokens: 512}
data: train.jsonl
actor: actor
rollout: vllm
reward: reward.py:compute_score
placement: standalone
"""
SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
)


def planned(staleness: int) -> tuple[PlacementPlan, float]:
    """The plan of pools apart, and the mean seconds of twelve simulated steps."""
    recipe = parse_recipe(RECIPE, Path("/there"), [f"schedule.staleness={staleness}"])
    cluster = ClusterSpec.uniform(1, 3, device_type="h100-80")
    request = request_of(recipe, cluster, {"actor": SHAPE, "ref": SHAPE})
    assert request.staleness == staleness
    plan = plan_strategy(request, "standalone")
    return plan, predict(plan, request, steps=12, seeds=range(1)).simulation.total_s / 12


def test_a_step_is_as_long_as_the_longer_of_generation_and_training():
    (in_turn, in_turn_s), (ahead, ahead_s) = planned(0), planned(1)
    seconds = ahead.prediction.operations_s
    training_s = sum(seconds[name] for name in ("old_log_prob", "advantage", "update_actor"))
    longer_s = max(seconds["generate"], training_s)
    assert ahead.prediction.step_s == pytest.approx(longer_s + seconds["sync_weights"], rel=1e-3)
    assert in_turn.prediction.step_s > 1.2 * ahead.prediction.step_s
    assert ahead_s < in_turn_s


def test_more_staleness_is_scheduled_as_one_and_hands_weights_over_less_often():
    (one, one_s), (two, two_s) = planned(1), planned(3)
    assert one.prediction.step_s == two.prediction.step_s
    assert two_s < one_s
