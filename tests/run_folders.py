"""A run folder as a run leaves it, without running: `from run_folders import split_run`."""

import json
from pathlib import Path

from rolemesh.placement.timeline import Span, Timeline

RECIPE = """
algorithm: {name: ppo, kl: {in: reward}}
data: {train_files: [train.jsonl]}
actor: {path: actor}
critic: {path: critic}
reward: {path: reward}
placement: split
"""
PLAN = """
strategy: split
pools:
  actor_side:
    roles: [actor, rollout, ref]
    process_on_nodes: [2]
    device_kind: cpu
    nodes: {here: 2}
  critic_side:
    roles: [critic, reward]
    process_on_nodes: [1]
    device_kind: cpu
    nodes: {here: 1}
layouts:
  actor: {tp: 1, pp: 1, dp: 2}
  rollout: {tp: 1, pp: 1, dp: 2}
  ref: {tp: 2, pp: 1, dp: 1}
  critic: {tp: 1, pp: 1, dp: 1}
  reward: {tp: 1, pp: 1, dp: 1}
idle: {here: 1}
"""
PREDICTED = """
predicted:
  operations_s: {generate: 4.0, old_log_prob: 1.0, ref_log_prob: 1.0, values: 1.5, reward: 1.0,
    advantage: 0.1, update_critic: 3.0, update_actor: 3.0}
  peak_gib: {actor_side: 1.5, critic_side: 1.0}
  limit_gib: {actor_side: 2.0, critic_side: 2.0}
"""
MEASURED_S = {  # operation: role, pool, ranks, start, end in a step of 10 s
    "generate": ("rollout", "actor_side", 2, 0.0, 5.0),
    "old_log_prob": ("actor", "actor_side", 2, 5.0, 6.0),
    "ref_log_prob": ("ref", "actor_side", 2, 6.0, 6.5),
    "values": ("critic", "critic_side", 1, 5.0, 6.0),
    "reward": ("reward", "critic_side", 1, 6.0, 7.0),
    "advantage": ("critic", "critic_side", 1, 7.0, 7.1),
    "update_actor": ("actor", "actor_side", 2, 7.1, 10.0),
    "update_critic": ("critic", "critic_side", 1, 7.1, 9.1),
}


def split_run(folder: Path, *, predicted: bool = True, steps: int = 4, first_s: float = 1000.0) -> Path:
    """Steps 1 to `steps`: the first takes twice as long, the others differ by 1% and -1% in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "plan.yaml").write_text(PLAN + (PREDICTED if predicted else ""))
    timeline, now = Timeline(), first_s
    for step in range(1, steps + 1):
        slow = 2.0 if step == 1 else 1.0 + 0.01 * (step % 3 - 1)
        for name, (role, pool, ranks, start, end) in MEASURED_S.items():
            for rank in range(ranks):
                late = 0.0 if rank == 0 else -0.1 * (end - start)  # rank 0 is the last to end
                span = (now + slow * start, now + slow * (end + late))
                timeline.add(Span(name, role, pool, rank, *span, {"step": step, "bytes_fetched": 0}))
        now += slow * 10.0 + 0.5
    timeline.save(folder / "timeline.json")
    peaks = {"actor_side": [1.4, 1.2], "critic_side": [0.9]}
    memory = {
        pool: {"what": "resident memory", "peak_bytes": [gib * 2**30 for gib in of]}
        for pool, of in peaks.items()
    }
    (folder / "memory.json").write_text(json.dumps(memory))
    return folder
