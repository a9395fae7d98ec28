"""Plan requests for tests."""

from dataclasses import replace

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.lengths import Fixed, log_normal
from rolemesh.placement.model import ModelShape
from rolemesh.placement.modules import Experts
from rolemesh.placement.roles import PlanRequest, RoleRequest
from rolemesh.placement.steps import step_graph
from rolemesh.placement.workload import Workload

LLAMA_1B = ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128_256, 8192, tied=True)
LLAMA_8B = ModelShape("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 8192)
MIXTRAL = ModelShape("mixtral", 8, 1024, 3584, 16, 8, 64, 32_000, 8192, moe=Experts(8, 2, 3584))
SHORT = Workload(64, Fixed(128), Fixed(128), mini_batch_samples=32)
TAILED = Workload(128, Fixed(256), log_normal(300, 900, 1024), mini_batch_samples=64)


def ppo(
    cluster: str,
    actor: ModelShape = LLAMA_1B,
    critic: ModelShape | None = None,
    *,
    workload: Workload = SHORT,
    reward: str = "function",
    engine: str = "paged",
    kl_in: str | None = "reward",
    dtypes: dict[str, str] | None = None,
    changes: dict[str, dict] | None = None,
    **keys,
) -> PlanRequest:
    """A PPO step; `changes` replaces fields of a role's request."""
    shapes = {"actor": actor, "rollout": actor, "critic": critic or actor}
    shapes |= {"ref": actor} if kl_in else {}
    shapes |= {"reward": critic or actor} if reward == "model" else {}
    roles = {
        role: replace(
            RoleRequest(shape, (dtypes or {}).get(role, "bfloat16"), engine=engine),
            **(changes or {}).get(role, {}),
        )
        for role, shape in shapes.items()
    }
    graph = step_graph("ppo", reward=reward, kl_in=kl_in)
    return PlanRequest(graph, roles, workload, ClusterSpec.preset(cluster), **keys)
