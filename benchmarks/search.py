"""How long does the search for the best placement take, and how well is its plan proven?

Claims, on one core, for PPO with four roles on devices (actor and rollout 70B, critic 8B, reference 70B; the
reward is a function):
1. 128 devices of one type: at most 1 s, proven best.
2. 1,024 and 10,240 devices of two types: at most 10 s and 60 s, gap at most 5%.

The costs are synthetic but of a real size: hundreds of options per role and devices, memory that binds, and
times with fixed parts that more devices do not shorten. `--roles 5` adds a reward model. Seconds are those of
the processor; the limit of a search counts the clock's, so `--slack 10` gives it time on a machine that does
other work meanwhile. Exits with 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.costs import DeviceSet, RoleCost, RoleOption
from rolemesh.placement.layout import Layout
from rolemesh.placement.search import Infeasible, SearchResult, search
from rolemesh.placement.steps import step_graph

GB = 1e9
PARAMETERS = {"actor": 70e9, "rollout": 70e9, "critic": 8e9, "ref": 70e9, "reward": 8e9}
LAYERS = {"actor": 80, "rollout": 80, "critic": 32, "ref": 80, "reward": 32}
PROMPTS, RESPONSE = 4096, 1024  # sequences of a step, tokens of each
TOKENS = PROMPTS * 2 * RESPONSE


@dataclass(frozen=True)
class Device:
    flops: float  # per second, at the size of these models
    memory: float
    bandwidth: float  # of its memory, bytes per second
    link: float  # bytes per second inside a node
    network: float  # bytes per second between nodes


DEVICES = {
    "h100": Device(450e12, 76 * GB, 2.6e12, 400 * GB, 45 * GB),
    "a100": Device(190e12, 38 * GB, 1.3e12, 250 * GB, 22 * GB),
}


class SyntheticCosts:
    """Closed forms with the shape of real ones; `asked` counts the device sets."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0

    def options(self, role: str, devices: DeviceSet) -> list[RoleCost]:
        start = time.process_time()
        self.asked += 1
        made = list(self._generate(devices) if role == "rollout" else self._model(role, devices))
        self.seconds += time.process_time() - start
        return made

    def _layouts(self, devices: DeviceSet, layers: int) -> Iterator[Layout]:
        for tp in (1, 2, 4, 8):
            if any(count % tp for count in devices.counts):
                continue
            for pp in (1, 2, 4, 8, 16):
                if (
                    layers % pp == 0
                    and devices.world % (tp * pp) == 0
                    and devices.world // (tp * pp) <= PROMPTS
                ):
                    yield Layout(tp=tp, pp=pp, dp=devices.world // (tp * pp))

    def _model(self, role: str, devices: DeviceSet) -> Iterator[RoleCost]:
        device, weights = DEVICES[devices.device_type], PARAMETERS[role]
        trains = role in ("actor", "critic")
        network = device.network if len(devices.counts) > 1 else device.link
        for layout in self._layouts(devices, LAYERS[role]):
            tp, pp, dp = layout.tp, layout.pp, layout.dp
            sequences = math.ceil(PROMPTS / dp)
            for micro in (1, 2, 4, 8):
                if micro > sequences:
                    continue
                batches = math.ceil(sequences / micro)
                efficiency = (0.9 if tp == 1 else 0.8 if tp < 8 else 0.7) * (1 - 0.25 / (1 + micro))
                rate = device.flops * efficiency * tp * pp
                forward = batches * micro * 2 * RESPONSE * 2 * weights / rate * (batches + pp - 1) / batches
                forward += 0.004 * LAYERS[role] / pp * batches / 8
                for recompute, again, kept in (("none", 3, 34), ("selective", 3.1, 16), ("full", 4, 2)):
                    if not trains and recompute != "none":
                        continue
                    share = weights / (tp * pp)
                    activations = kept * 2 * RESPONSE * micro * 8192 * LAYERS[role] / tp * min(1, 4 / pp) / 4
                    for offload in (False, True):
                        state = share * (4 + 12 / dp) if trains else share * 2
                        moved_s = 2 * state / (25 * GB) if offload else 0.0
                        reduce_s = 2 * 2 * share / network * (dp - 1) / dp if dp > 1 else 0.0
                        seconds = {}
                        if role == "actor":
                            seconds = {
                                "old_log_prob": forward + moved_s / 2,
                                "update_actor": again * forward + reduce_s + moved_s,
                            }
                        elif role == "critic":
                            seconds = {
                                "values": forward + moved_s / 2,
                                "advantage": 0.05,
                                "update_critic": again * forward + reduce_s + moved_s,
                            }
                        else:
                            seconds = {"ref_log_prob" if role == "ref" else "reward": forward + moved_s}
                        yield RoleCost(
                            RoleOption(layout, micro, recompute, offload),
                            seconds,
                            0.5 * GB if offload else state,
                            dict.fromkeys(
                                seconds, activations / (1 if trains else 16) + (state if offload else 0)
                            ),
                            state if offload else 0.0,
                        )

    def _generate(self, devices: DeviceSet) -> Iterator[RoleCost]:
        device, weights = DEVICES[devices.device_type], PARAMETERS["rollout"]
        for layout in self._layouts(devices, LAYERS["rollout"]):
            tp, pp, dp = layout.tp, layout.pp, layout.dp
            if pp > 4:
                continue
            for running in (16, 32, 64, 128, 256, 512):
                share = 2 * weights / (tp * pp)
                cache = running * 2 * RESPONSE * 330e3 / (tp * pp)
                step_s = (share + cache / 2) / (device.bandwidth * 0.7) * pp + 80 * 2 * 8e-6 * (tp > 1)
                waves = max(1.0, PROMPTS / dp / running)
                seconds = {"generate": waves * RESPONSE * step_s + 1.6 * RESPONSE * share / device.bandwidth}
                for offload in (False, True):
                    more = 2 * share / (25 * GB) if offload else 0.0
                    yield RoleCost(
                        RoleOption(layout, running, offload=offload),
                        {"generate": seconds["generate"] + more},
                        0.5 * GB if offload else share,
                        {"generate": cache + (share if offload else 0.0), "sync_weights": share / 8},
                        share if offload else 0.0,
                    )

    def floor_s(self, role: str, devices: DeviceSet) -> dict[str, float]:
        """The arithmetic alone at the best efficiency; of generation, reading the weights."""
        device, weights = DEVICES[devices.device_type], PARAMETERS[role]
        if role == "rollout":
            most = 512 * devices.world
            steps = max(1.0, PROMPTS / most) * RESPONSE
            return {"generate": steps * 2 * weights / min(devices.world, 32) / (device.bandwidth * 0.7)}
        forward = TOKENS * 2 * weights / (device.flops * 0.9 * devices.world)
        return {
            "actor": {"old_log_prob": forward, "update_actor": 3 * forward},
            "critic": {"values": forward, "update_critic": 3 * forward, "advantage": 0.05},
            "ref": {"ref_log_prob": forward},
            "reward": {"reward": forward},
        }[role]

    def transfer_s(self, operation, source, source_devices, target, target_devices, *, together) -> float:  # type: ignore[no-untyped-def]
        moved = 2 * PARAMETERS["actor"]
        ends = ((source, source_devices), (target, target_devices))
        same = all(len(on.counts) == 1 for _, on in ends) and together
        share = max(moved / (cost.option.layout.tp * cost.option.layout.pp) for cost, _ in ends)
        slowest = min(
            DEVICES[on.device_type].link if same else DEVICES[on.device_type].network for _, on in ends
        )
        return 0.2 + share / slowest * (0.3 if source.option.layout == target.option.layout else 1.0)

    def device_bytes(self, device_type: str) -> float:
        return DEVICES[device_type].memory

    def host_bytes(self, device_type: str) -> float:
        return 200 * GB


def cluster(devices: int, types: int) -> ClusterSpec:
    """Nodes of eight devices; of two types, half each."""
    nodes = devices // 8
    kinds = ["h100"] * nodes if types == 1 else ["h100"] * (nodes // 2) + ["a100"] * (nodes - nodes // 2)
    return ClusterSpec(tuple(NodeSpec(f"node-{i}", 8, device_type=kind) for i, kind in enumerate(kinds)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[128, 1024, 10240])
    parser.add_argument("--roles", type=int, choices=(4, 5), default=4)
    parser.add_argument("--compare", action="store_true", help="search the named strategies too")
    parser.add_argument("--slack", type=float, default=1.0, help="times the aims, for the searches' limits")
    options = parser.parse_args()
    reward = "model" if options.roles == 5 else "function"
    graph = step_graph("ppo", reference=True, reward=reward, kl_in="reward")
    roles = [role for role in graph.roles() if role != "reward" or reward == "model"]
    kept = True
    for devices in options.devices:
        types, limit_s, gap = (
            (1, 1.0, 0.0) if devices <= 128 else (2, 10.0 if devices <= 1024 else 60.0, 0.05)
        )
        costs, start = SyntheticCosts(), time.process_time()
        result = search(
            graph,
            roles,
            cluster(devices, types),
            costs,
            seconds={} if reward == "model" else {"reward": 2.0},
            time_limit_s=limit_s * options.slack,
            compare=options.compare,
        )
        taken_s = time.process_time() - start
        print(f"{devices} devices, {types} type{'s' * (types > 1)}, {len(roles)} roles")
        if isinstance(result, Infeasible):
            print(f"  {result}")
            return 1
        kept &= result.proof.gap <= gap and (options.compare or taken_s <= limit_s)
        asked = f"{costs.seconds:.2f} s in {costs.asked} questions to the costs"
        report(result, f"{taken_s:.2f} s of {limit_s:g} s, {asked}")
    return 0 if kept else 1


def report(result: SearchResult, times: str) -> None:
    """Print times, proof, and the plan beside the other strategies'."""
    proof = result.proof
    print(f"  {times}; {proof.nodes_visited} nodes visited")
    print(f"  step {result.best.makespan_s:.2f} s, bound {proof.bound_s:.2f} s, gap {proof.gap:.2%}")
    for pool in result.best.pools:
        layouts = ", ".join(f"{role} ({result.best.costs[role].option.layout})" for role in pool.roles)
        print(f"  {pool.devices.world} x {pool.devices.device_type}: {layouts}")
    for other in (*result.strategies.values(), *result.runners_up):
        step = f"{other.plan.makespan_s:.2f} s" if other.plan else "none"
        print(f"  {other.name}: {step}; {other.reason}")


if __name__ == "__main__":
    raise SystemExit(main())
