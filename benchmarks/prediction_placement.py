"""Placement A or B: what the planner says of published pairs and crossovers, beside what was measured.

    python benchmarks/prediction_placement.py [pairs] [search] [crossover]

pairs: one system, colocated and synchronous (A) against split pools and asynchronous (B), with the published
    layouts where there are any. Which one is faster, in shuffled order, and the balanced accuracy beside that
    of a constant guess.
search: ReaL's searched plan against its own hand heuristic, the predicted gain beside the measured one. That
    the search wins is no finding (the heuristic is among its plans), the size of the gain is.
crossover: which of HybridFlow's placements wins at which size, and where.

No constant is fitted here. The two systems are modelled as they are published: both hand weights over
tensor by tensor (`gathered`); responses go on over a change of weights where pools are split (`streamed`:
verl's partial rollouts, `in_flight_weight_updates` of NeMo RL's recipes); GRPO scores with a reference,
DAPO does not; verl learns from the engine's own log-probabilities where pools are split; colocated roles
wait on the host; micro-batches, recompute and layouts are those of their scripts (RECIPES). What the
sources leave out is assumed once, for all rows: response lengths are log-normal with sigma 0.8, cut at the
longest, around the published mean; without one the mean is what the training seconds of the smallest pool
are at the model's published share of the peak, 40% where there is none; prompts have 128 tokens.
"""

from __future__ import annotations

import csv
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prediction_memory import SkippedError, published_shape

from rolemesh.placement.auto import costs_of, search_plan
from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet, Recompute
from rolemesh.placement.hardware import hardware
from rolemesh.placement.lengths import Fixed, Lengths, LogNormal
from rolemesh.placement.model import ModelShape
from rolemesh.placement.roles import PlanRequest, RoleRequest
from rolemesh.placement.search import Infeasible, Pin, PlannedPool, SearchResult
from rolemesh.placement.search.given import search_given
from rolemesh.placement.steps import step_graph
from rolemesh.placement.workload import Workload

TRUTH = Path(__file__).parent / "data" / "truth"
SIGMA = 0.8
MFU = 0.4
PROMPT = 128.0
PUBLISHED_MFU = {("Qwen3-30B-A3B", 32): 0.31}  # verl, docs/perf/dpsk.md: by model and GPUs
HYBRIDFLOW_NIC = 25e9 / 8  # 200 Gb/s between machines of eight GPUs (HybridFlow, section 8.1)
TIE = 0.03
LIMIT_S = 120.0
LLAMA2 = {
    "7B": ModelShape("llama", 32, 4096, 11_008, 32, 32, 128, 32_000, 4096),
    "13B": ModelShape("llama", 40, 5120, 13_824, 40, 40, 128, 32_000, 4096),
    "34B": ModelShape("llama", 48, 8192, 22_016, 64, 8, 128, 32_000, 16_384),
    "70B": ModelShape("llama", 80, 8192, 28_672, 64, 8, 128, 32_000, 4096),
}
# Longest sequence and samples of an update, by model and source, where rlhf_truth.csv has them.
LONGEST = {"deepseek v3": 1536, "qwen3-235b": 8192, "qwen3-30b": 4096, "llama-3.1-8b": 4096}
NAMES = {"DeepSeek V3": "deepseek-v3", "Qwen3-30B3A": "qwen3-30B-A3B", "Qwen3-30B-A3B": "qwen3-30B-A3B",
         "Qwen3-235B": "qwen3-235B-A22B"}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What a system's published scripts fix beyond the table: sequences (at their longest) of a micro-batch
    that trains and of one that scores, recompute, samples of an update, whether routing is fused, layouts.
    """

    micro_batch: int
    scoring: int
    recompute: Recompute
    update: int
    fused_routing: bool = True
    train: Mapping[str, int | bool] = field(default_factory=dict)
    generate: Mapping[str, int | bool] = field(default_factory=dict)


# NeMo RL: examples/configs/recipes/llm/performance over grpo_math_1B.yaml (train_micro_batch_size,
# logprob_batch_size, activation_checkpointing, moe_permute_fusion).
# verl: verl/experimental/fully_async_policy/shell (ppo_max_token_len, log_prob_max_token_len, gradient
# checkpointing, mini-batch x 16).
RECIPES = {
    ("NeMo", "Qwen3-30B"): Recipe(1, 4, "none", 512, fused_routing=False),
    ("NeMo", "Llama-3.1-8B"): Recipe(1, 2, "full", 512),
    ("NeMo", ""): Recipe(1, 1, "full", 512),
    ("verl", "Qwen2.5-Math-7B"): Recipe(
        2, 3, "full", 512, train={"tp": 1, "cp": 4, "pp": 1}, generate={"tp": 4, "pp": 1}
    ),
    ("verl", "Qwen3-30B"): Recipe(
        1, 1, "none", 2048, train={"tp": 2, "cp": 2, "ep": 8, "etp": 1, "pp": 1}, generate={"tp": 4, "pp": 1}
    ),
}


def recipe_of(row: Mapping[str, str]) -> Recipe:
    """The recipe of a row's system and model."""
    for (system, model), one in RECIPES.items():
        if row["source"].startswith(system) and row["actor"].startswith(model):
            return one
    raise SkippedError("batch or lengths are not given")


@dataclass(frozen=True)
class Verdict:
    """One pair: predicted and measured A over B."""

    name: str
    predicted: float
    measured: float

    @property
    def right(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)


def responses(mean: float, longest: float) -> Lengths:
    """Log-normal lengths of this mean once those beyond the longest are cut."""
    low, high = math.log(mean) - 3, math.log(longest) + 5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if LogNormal(middle, SIGMA, longest).mean < mean else (low, middle)
    return LogNormal(high, SIGMA, longest)


def shape_of(name: str) -> ModelShape:
    """A model by its name in the table of pairs."""
    if name.startswith("Qwen2.5"):
        return published_shape("qwen2.5-7B")
    return published_shape(NAMES.get(name, name))


def cluster_of(gpu: str, n_gpus: int) -> ClusterSpec:
    """Nodes of eight, Grace-Blackwell ones of four in racks that share NVLink."""
    device = hardware(gpu).name
    per_node = 4 if device.startswith("gb") else 8
    cluster = ClusterSpec.preset(f"{math.ceil(n_gpus / per_node)} x {device}x{min(per_node, n_gpus)}")
    if per_node == 8:
        return cluster
    nodes = [replace(node, group=f"rack-{i // 18}") for i, node in enumerate(cluster.nodes)]
    return replace(cluster, nodes=tuple(nodes))


def sizes(text: str) -> tuple[dict[str, int | bool], dict[str, int | bool]]:
    """Layouts of training and generation that a row states; empty where it states none."""
    train = re.search(r"VPP=\[([^\]]*)\]", text)
    generate = re.search(r"gen TP,PP=\[(\d+),(\d+)\]", text)
    mine: dict[str, int | bool] = {}
    if train:
        values = [1 if value.strip() == "n/a" else int(value) for value in train[1].split(",")]
        mine = {"tp": values[0], "cp": values[1], "ep": values[2], "pp": values[-2], "vpp": values[-1]}
    return mine, {"tp": int(generate[1]), "pp": int(generate[2])} if generate else {}


def step_s(request: PlanRequest, pools: Sequence[tuple[Sequence[str], int]]) -> float:
    """Seconds of a step on whole nodes given to pools in order. Raises SkippedError where it does not fit."""
    nodes = [(node.name, node.devices, node.group) for node in request.cluster.usable]
    planned, first = [], 0
    for roles, n_devices in pools:
        mine, left = [], n_devices
        while left > 0:
            mine.append(nodes[first])
            left, first = left - nodes[first][1], first + 1
        groups = tuple(group for _, _, group in mine)
        kind = request.cluster.usable[0].device_type
        devices = DeviceSet(kind, tuple(count for _, count, _ in mine), groups if any(groups) else ())
        at = tuple((name, count) for name, count, _ in mine)
        planned.append(PlannedPool("+".join(roles), tuple(roles), devices, at))
    found = search_given(
        request.graph,
        planned,
        request.cluster,
        costs_of(request),
        seconds=request.seconds,
        staleness=request.staleness,
        time_limit_s=LIMIT_S,
    )
    if isinstance(found, Infeasible):
        raise SkippedError(f"does not fit: {found.overrun}")
    return found.best.makespan_s


def grpo(row: Mapping[str, str], text: str, n_train: int, *, split: bool) -> PlanRequest:
    """A row's step under one of its two placements; `n_train` GPUs train."""
    recipe, shape, (train, generate) = recipe_of(row), shape_of(row["actor"]), sizes(text)
    train, generate = {**recipe.train, **train}, {**recipe.generate, **generate}
    if "ep" in train:  # a row may state more than its training GPUs have
        train["ep"] = min(train["ep"], n_train // train["pp"])
    load = workload(row)
    experts = shape.moe is not None
    nemo = row["source"].startswith("NeMo")
    actor = RoleRequest(
        shape,
        pins=train if experts else {k: v for k, v in train.items() if k != "ep"},
        micro_batch_tokens=math.ceil(recipe.micro_batch * load.longest_tokens),
        scoring_tokens=math.ceil(recipe.scoring * load.longest_tokens),
        recompute=recipe.recompute,
        offload=not split or None,
    )
    roles = {"actor": actor, "rollout": RoleRequest(shape, pins=generate, offload=not split or None)}
    if scores := not row["workload"].startswith("DAPO"):
        roles["ref"] = replace(actor, micro_batch_tokens=actor.scoring_tokens)
    graph = step_graph("grpo", kl_in="loss" if scores else None)
    if split and not nemo:
        graph = graph.select(op.name for op in graph.operations if op.name != "old_log_prob")
    cluster = cluster_of(row["gpu_type"], int(row["n_gpus"]))
    return PlanRequest(
        graph,
        roles,
        load,
        cluster,
        runnable=False,
        staleness=int(split),
        streamed=split,
        gathered=True,
        fused_routing=recipe.fused_routing,
    )


def workload(row: Mapping[str, str]) -> Workload:
    """Samples and lengths of a row."""
    text = row["workload"]
    if match := re.match(r"GRPO (\d+) rollouts", text):
        samples = int(match[1])
        mean = float(re.search(r"length (\d+)", row["notes"])[1])  # type: ignore[index]
        longest = next(value for key, value in LONGEST.items() if row["actor"].lower().startswith(key))
        return _load(samples, recipe_of(row).update, mean, longest - PROMPT)
    match = re.fullmatch(r"\w+ 512x16, (\d+)k", text)
    if match is None:
        raise SkippedError("batch or lengths are not given")
    return _load(512 * 16, recipe_of(row).update, _mean(row), int(match[1]) * 1024)


def _mean(row: Mapping[str, str]) -> float:
    """Tokens of a sequence, from the training seconds of the smallest pool that trained on this workload."""
    steps = {
        other[key]
        for other in read("placement_pairs.csv")
        if (other["actor"], other["workload"]) == (row["actor"], row["workload"])
        for key in ("step_seconds_a", "step_seconds_b")
    }
    runs = [
        (_training_gpus(run), float(run["train_seconds"]))
        for run in read("rlhf_truth.csv")
        if run["actor"].startswith(row["actor"]) and run["step_seconds"] in steps and run["train_seconds"]
    ]
    n_gpus, seconds = min(runs)
    share = PUBLISHED_MFU.get((row["actor"], n_gpus), MFU)
    flops = seconds * n_gpus * share * hardware(row["gpu_type"]).peak_flops("bfloat16")
    return flops / (6 * shape_of(row["actor"]).active_params) / (512 * 16)


def _training_gpus(run: Mapping[str, str]) -> int:
    """GPUs that train in a published run."""
    split = re.match(r"split (?:\d+ rollout : (\d+) train|(\d+):|(\d+) train)", run["placement"])
    return next(int(size) for size in (*(split.groups() if split else ()), run["n_gpus"]) if size)


def _load(samples: int, update: int, mean: float, longest: float) -> Workload:
    lengths = responses(mean - PROMPT, longest)
    return Workload(samples, Fixed(PROMPT), lengths, "grpo", mini_batch_samples=min(update, samples))


def pair(row: Mapping[str, str]) -> Verdict:
    """The pair's two steps, priced."""
    n_gpus = int(row["n_gpus"])
    colocated = grpo(row, row["placement_a"], n_gpus, split=False)
    one = step_s(colocated, [(tuple(colocated.roles), n_gpus)])
    stated = re.search(r"split (\d+):(\d+)", row["placement_b"])
    train = int(stated[1]) if stated else n_gpus // 2
    if stated and row["pair"] == "15":
        train = int(stated[2])  # the source's prose: 96 generate, 32 train
    apart = grpo(row, row["placement_b"], train, split=True)
    training = tuple(role for role in apart.roles if role != "rollout")
    other = step_s(apart, [(training, train), (("rollout",), n_gpus - train)])
    name = f"{row['pair']:>3} {row['actor']} on {n_gpus} {row['gpu_type']}"
    return Verdict(name, one / other, float(row["a_over_b"]))


def show_pairs(seed: int = 0) -> None:
    """Colocated against split, on the same system."""
    rows = [row for row in read("placement_pairs.csv") if row["source"].startswith(("NeMo", "verl"))]
    random.Random(seed).shuffle(rows)
    flip = random.Random(seed + 1)
    done, skipped = [], []
    print("pairs of one system (A over B, measured and predicted; sides shuffled)")
    for row in rows:
        try:
            verdict = pair(row)
        except SkippedError as error:
            skipped.append(f"{row['pair']}: {error}")
            continue
        swap = flip.random() < 0.5
        done.append((verdict, swap))
        measured, predicted = (
            (1 / verdict.measured, 1 / verdict.predicted) if swap else (verdict.measured, verdict.predicted)
        )
        tie = "tie" if abs(verdict.measured - 1) < TIE else "right" if verdict.right else "WRONG"
        print(f"  {verdict.name}: {measured:.2f} {predicted:.2f} {tie}", flush=True)
    for text in skipped:
        print(f"  not predicted: {text}")
    judged = [(v, swap) for v, swap in done if abs(v.measured - 1) >= TIE]
    split = [v.right for v, _ in judged if v.measured > 1]
    colocated = [v.right for v, _ in judged if v.measured < 1]
    shares = [sum(some) / len(some) for some in (split, colocated) if some]
    first = sum((v.measured > 1) != swap for v, swap in judged)
    print(
        f"  split is faster: {sum(split)} of {len(split)} right; colocated is faster (reversed pairs): "
        f"{sum(colocated)} of {len(colocated)} right; balanced accuracy {sum(shares) / len(shares):.0%} "
        f"(constant guess 50%; always the second one named: {first} of {len(judged)})"
    )


def show_search() -> None:
    """ReaL's heuristic against its search."""
    gains = []
    print("ReaL: gain of the search over the heuristic, measured and predicted")
    for row in read("placement_pairs.csv"):
        if row["placement_a"] != "ReaL-Heuristic":
            continue
        try:
            verdict = _heuristic(row)
        except SkippedError as error:
            print(f"  not predicted: {row['actor']} {row['workload']}: {error}")
            continue
        gains.append(verdict)
        print(f"  {verdict.name}: {verdict.measured:.2f} {verdict.predicted:.2f}", flush=True)
    if gains:
        mean = [
            math.exp(sum(math.log(getattr(g, key)) for g in gains) / len(gains))
            for key in ("measured", "predicted")
        ]
        print(f"  geometric mean: measured {mean[0]:.2f}, predicted {mean[1]:.2f} over {len(gains)} pairs")


def _heuristic(row: Mapping[str, str]) -> Verdict:
    names = re.match(r"(\d+B) \(critic (\d+B)\)", row["actor"])
    load = re.search(r"prompt (\d+) gen (\d+) batch (\d+)", row["workload"])
    if names is None or load is None:
        raise SkippedError("sizes are not given")
    n_gpus, batch = int(row["n_gpus"]), int(load[3])
    work = Workload(
        batch, Fixed(float(load[1])), Fixed(float(load[2])), mini_batch_samples=max(1, batch // 4)
    )  # four updates
    request = ppo(LLAMA2[names[1]], LLAMA2[names[2]], "h100-80", n_gpus, work)
    best = search_plan(request, time_limit_s=LIMIT_S, gap=0.01, compare=False)
    if isinstance(best, Infeasible):
        raise SkippedError(str(best.overrun))
    pp = 1
    while pp <= n_gpus // 8:  # tp inside a node, and as few stages as fit
        pins = {"tp": 8, "pp": pp}
        same = {role: replace(mine, pins=pins) for role, mine in request.roles.items()}
        try:
            slow = step_s(replace(request, roles=same), [(tuple(same), n_gpus)])
            return Verdict(
                f"{row['actor']} on {n_gpus}, {row['workload'][10:]}",
                slow / best.best.makespan_s,
                float(row["a_over_b"]),
            )
        except SkippedError:
            pp *= 2
    raise SkippedError("the heuristic fits with no number of stages")


def ppo(actor: ModelShape, critic: ModelShape, device: str, n_gpus: int, load: Workload) -> PlanRequest:
    """PPO with four models: the reference is the actor's, the reward's the critic's."""
    shapes = {"actor": actor, "rollout": actor, "critic": critic, "ref": actor, "reward": critic}
    roles = {role: RoleRequest(shape) for role, shape in shapes.items()}
    cluster = ClusterSpec.preset(f"{max(1, n_gpus // 8)} x {device}x{min(8, n_gpus)}")
    return PlanRequest(step_graph("ppo"), roles, load, cluster, runnable=False)


GROUPS = {
    "colocate": [("actor", "rollout", "critic", "ref", "reward")],
    "split": [("actor", "rollout", "ref"), ("critic", "reward")],
    "standalone": [("actor", "rollout"), ("critic",), ("ref",), ("reward",)],
}
CROSSOVERS = {  # (actor, critic): GPUs and which placement the source found best
    ("13B", "13B"): {16: "colocate", 32: "colocate", 64: "colocate", 96: "split", 128: "standalone"},
    ("34B", "34B"): {32: "colocate", 64: "colocate", 96: "split", 128: "split"},
    ("13B", "70B"): {64: "colocate", 96: "split"},
}


def show_crossover() -> None:
    """HybridFlow, figures 12 and 13: 1024 prompts and responses of 1024 tokens, 8 updates, A100-80."""
    right = total = 0
    print("HybridFlow: seconds of a step, best sizes of each placement's pools")
    for (actor, critic), facts in CROSSOVERS.items():
        for n_gpus, wanted in facts.items():
            found = times(actor, critic, n_gpus)
            won = min(found, key=found.__getitem__, default="none")
            right, total = right + (won == wanted), total + 1
            shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items())
            print(
                f"  actor {actor}, critic {critic}, {n_gpus} GPUs: {won}, measured {wanted}; {shown}",
                flush=True,
            )
    print(f"  {right} of {total} as measured")


def times(
    actor: str, critic: str, n_gpus: int, placements: Sequence[str] = tuple(GROUPS)
) -> dict[str, float]:
    """Seconds of the best step of each placement that fits."""
    load = Workload(1024, Fixed(1024.0), Fixed(1024.0), mini_batch_samples=128)
    request = ppo(LLAMA2[actor], LLAMA2[critic], "a100-80", n_gpus, load)
    nodes = [replace(node, nic_bytes_per_s=HYBRIDFLOW_NIC) for node in request.cluster.nodes]
    request = replace(request, cluster=replace(request.cluster, nodes=tuple(nodes)))
    found = {name: _grouped(request, GROUPS[name]) for name in placements}
    return {name: one.best.makespan_s for name, one in found.items() if one is not None}


def _grouped(request: PlanRequest, groups: Sequence[Sequence[str]]) -> SearchResult | None:
    pins = [Pin(tuple(group), "together") for group in groups if len(group) > 1]
    pins += [Pin(tuple(group[0] for group in groups), "apart")] if len(groups) > 1 else []
    found = search_plan(request, pins=pins, time_limit_s=LIMIT_S, gap=0.01, compare=False)
    return found if isinstance(found, SearchResult) else None


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table of published measurements."""
    with (TRUTH / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Print the sections asked for, or all."""
    sections = {"pairs": show_pairs, "search": show_search, "crossover": show_crossover}
    for name in sys.argv[1:] or sections:
        sections[name]()


if __name__ == "__main__":
    main()
