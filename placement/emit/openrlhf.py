"""OpenRLHF's flags for a plan: groups of devices, engines, and one tensor and sequence cut for all models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rolemesh.placement.emit.values import (
    EmitError,
    Emitted,
    Keys,
    micro_batch_tokens,
    mini_batch,
    nodes_of,
)  # fmt: skip
from rolemesh.placement.plan import PlacementPlan

_TOGETHER = {("actor", "ref"): "colocate_actor_ref", ("critic", "reward"): "colocate_critic_reward"}
_ESTIMATORS = {
    "gae": "gae", "rloo": "rloo", "reinforce_plus_plus": "reinforce",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def openrlhf_flags(keys: Keys, plan: PlacementPlan) -> Emitted:
    """OpenRLHF's flags. Raises EmitError for pipelines, other groups of roles and estimators it lacks."""
    left_out: list[str] = []
    pairs = dict(
        [
            *_devices(plan),
            *_cut(plan),
            *_batch(keys, plan, left_out),
            *_algorithm(keys, left_out),
            *_models(keys, plan, left_out),
        ]
    )
    waiting = [role for role in plan.roles if keys[role].get("offload")]
    if waiting:
        left_out.append(
            f"offload of {', '.join(waiting)}: OpenRLHF takes turns with --colocate_all_models alone "
            "(--deepspeed_enable_sleep, --vllm_enable_sleep); check its memory"
        )
    said = {name: value for name, value in pairs.items() if value is not None and value is not False}
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in said.items()]
    return Emitted("python3 -m openrlhf.cli.train_ppo_ray", tuple(words), tuple(left_out))


def _devices(plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    for role in ("actor", "ref", "critic", "reward"):
        if role in plan.roles:
            nodes, per_node = nodes_of(plan, role)
            yield from ((f"{role}_num_nodes", nodes), (f"{role}_num_gpus_per_node", per_node))
    engine = plan.layout_of("rollout")
    if engine.pp * engine.cp > 1:
        raise EmitError(f"rollout is {engine}: OpenRLHF's engines have tensor parallelism alone")
    yield from (("vllm_num_engines", engine.world // engine.tp), ("vllm_tensor_parallel_size", engine.tp))
    if len(plan.pools) == 1:
        yield "colocate_all_models", True
        return
    for pool in plan.pools:
        roles = tuple(role for role in ("actor", "critic", "rollout", "ref", "reward") if role in pool.roles)
        if roles in _TOGETHER:
            yield _TOGETHER[roles], True
        elif len(roles) > 1:
            raise EmitError(
                f"pool {pool.name!r} holds {', '.join(roles)}: OpenRLHF puts all roles together, or "
                "actor with ref and critic with reward, the rollout alone"
            )


def _cut(plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    sizes = {}
    for role in plan.roles:
        layout = plan.layout_of(role)
        if layout.pp * layout.ep * layout.vpp > 1:
            raise EmitError(f"{role} is {layout}: OpenRLHF has no pipeline and no expert parallelism")
        if role != "rollout":
            sizes[role] = (layout.tp, layout.cp)
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{role} tp={tp} cp={cp}" for role, (tp, cp) in sizes.items())
        raise EmitError(f"OpenRLHF cuts all models alike, the plan does not: {said}")
    tp, cp = sizes["actor"]
    yield from (("ds_tensor_parallel_size", tp), ("ring_attn_size", cp), ("zero_stage", 2))


def _batch(keys: Keys, plan: PlacementPlan, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    batch, run, data = keys["batch"], keys["run"], keys["data"]
    yield "rollout_batch_size", batch["prompts"]
    yield "n_samples_per_prompt", batch["samples_per_prompt"]
    yield "train_batch_size", mini_batch(keys)
    yield "max_epochs", batch["epochs"]
    yield "use_dynamic_batch", True
    yield "train_max_tokens_per_gpu", micro_batch_tokens(keys, "actor")
    scorers = [role for role in ("ref", "reward") if role in plan.roles]
    if scorers:
        yield "rollout_max_tokens_per_gpu", micro_batch_tokens(keys, scorers[0])
    for role, like in (("critic", "actor"), ("reward", "ref")):
        if {role, like} <= set(plan.roles) and micro_batch_tokens(keys, role) != micro_batch_tokens(
            keys, like
        ):
            left_out.append(f"{role}.micro_batch_tokens: {like}'s counts for both")
    yield "freezing_actor_steps", batch["critic_warmup"] or None
    yield "prompt_max_len", data["max_prompt_tokens"]
    yield "generate_max_len", keys["lengths"]["max_response_tokens"]
    yield "prompt_data", ",".join(map(str, data["train_files"]))
    yield "input_key", data["prompt_key"]
    if data["val_files"]:
        yield "eval_dataset", ",".join(map(str, data["val_files"]))
        yield "eval_steps", run["validate_every"] or -1
    yield from (
        ("num_episodes", run["epochs"]),
        ("seed", run["seed"]),
        ("save_steps", run["save_every"] or -1),
    )
    if run["steps"] is not None:
        left_out.append(f"run.steps {run['steps']}: OpenRLHF counts episodes")


def _algorithm(keys: Keys, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    said = keys["algorithm"]
    grouped = {True: "group_norm", False: "dr_grpo"}[said["norm_adv_by_std"]]
    estimator = grouped if said["estimator"] == "grpo" else _ESTIMATORS.get(said["estimator"])
    if estimator is None or said["loss"] not in ("vanilla", "gspo"):
        raise EmitError(f"estimator {said['estimator']} with loss {said['loss']} is not in OpenRLHF")
    yield "advantage_estimator", estimator
    yield "policy_loss_type", "gspo" if said["loss"] == "gspo" else None
    yield from (("gamma", said["gamma"]), ("lambd", said["lam"]), ("value_clip", said["value_clip"]))
    yield "eps_clip_low_high", f"{said['clip_low']} {said['clip_high']}"
    yield "dual_clip", said["dual_clip"] if said["loss"] == "vanilla" else None
    yield "entropy_loss_coef", said["entropy_coef"] or None
    kl = said["kl"]
    yield "init_kl_coef", kl["coef"] if kl["in_"] != "none" else 0
    if kl["in_"] != "none":
        yield "use_kl_loss", kl["in_"] == "loss"
        kind = "k3" if kl["kind"] == "low_var_kl" else kl["kind"]
        if kind == "abs":
            raise EmitError("algorithm.kl.kind is abs: OpenRLHF has k1, k2, k3")
        yield from (("kl_estimator", kind), ("kl_target", kl["target"]), ("kl_horizon", kl["horizon"]))
    yield "dynamic_filtering", bool(said["dynamic_sampling"]["on"])
    if said["loss_agg"] != "token-mean" and said["loss"] == "vanilla":
        left_out.append(f"algorithm.loss_agg {said['loss_agg']}: OpenRLHF takes the mean over tokens")
    if said["overlong"]["buffer_tokens"]:
        left_out.append("algorithm.overlong: put the penalty into the reward function")


def _lora(keys: Keys, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """Adapters of all models alike, as OpenRLHF has them."""
    lora = keys["actor"]["lora"]
    if keys["critic"]["lora"] != lora:
        left_out.append("critic.lora: OpenRLHF gives all models the actor's adapters")
    if lora["rank"]:
        yield from (("lora_rank", lora["rank"]), ("lora_alpha", lora["alpha"]))


def _models(keys: Keys, plan: PlacementPlan, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    actor, optim, rollout = keys["actor"], keys["actor"]["optim"], keys["rollout"]
    yield from (("pretrain", actor["path"]), ("param_dtype", _DTYPES[actor["dtype"]]))
    yield "gradient_checkpointing", actor["recompute"] == "full"
    if actor["recompute"] == "selective":
        left_out.append("actor.recompute selective: OpenRLHF recomputes whole layers or nothing")
    yield from _lora(keys, left_out)
    yield from (
        ("actor_learning_rate", optim["lr"]),
        ("l2", optim["weight_decay"]),
        ("max_norm", optim["clip_grad"]),
    )
    yield "adam_betas", f"{optim['beta1']} {optim['beta2']}"
    tenth = optim["decay"] == "cosine" and abs(optim["min_lr"] - 0.1 * optim["lr"]) <= 1e-3 * optim["lr"]
    yield "lr_scheduler", "cosine_with_min_lr" if tenth else optim["decay"]
    if optim["min_lr"] and not tenth:
        left_out.append("actor.optim.min_lr")
    if optim["warmup_steps"]:
        left_out.append("actor.optim.warmup_steps: give --lr_warmup_ratio")
    if "critic" in plan.roles:
        yield "critic_pretrain", keys["critic"]["path"]
        yield "critic_learning_rate", keys["critic"]["optim"]["lr"]
    yield from (("temperature", rollout["temperature"]), ("top_p", rollout["top_p"]))
    if rollout["top_k"]:
        left_out.append("rollout.top_k")
    yield _reward(keys["reward"])


def _reward(reward: Keys) -> tuple[str, Any]:
    if reward["kind"] == "model":
        return "reward_pretrain", reward["path"]
    if reward["kind"] == "function":
        file, _, name = str(reward["path"]).rpartition(":")
        if name != "reward_func":
            raise EmitError(f"reward.path is {reward['path']}: OpenRLHF calls reward_func of the file")
        return "remote_rm_url", file
    if reward["kind"] == "remote" and reward["protocol"] == "openrlhf":
        return "remote_rm_url", ",".join(reward["endpoints"])
    raise EmitError(
        f"reward.kind is {reward['kind']}: OpenRLHF takes a model, a file, or a service of its protocol"
    )
