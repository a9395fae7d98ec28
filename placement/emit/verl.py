"""verl's overrides for a plan: Megatron's sizes by role, one pool for all but rollout and reward model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rolemesh.placement.emit.values import (
    EmitError,
    Emitted,
    Keys,
    files,
    micro_batch_tokens,
    mini_batch,
    nodes_of,
)  # fmt: skip
from rolemesh.placement.layout import Layout
from rolemesh.placement.plan import PlacementPlan

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_PREFIXES = {"actor": _ACTOR, "critic": "critic", "ref": _REF, "reward": "reward_model"}
_ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
_KL_KINDS = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl", "low_var_kl": "low_var_kl"}
_COMMAND = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"


def verl_flags(keys: Keys, plan: PlacementPlan) -> Emitted:
    """verl's overrides. Raises EmitError for pools, rewards and estimators that verl does not have."""
    pairs = dict(
        [
            *_pools(plan),
            *_layouts(plan),
            *_offload(keys, plan),
            *_data(keys),
            *_algorithm(keys),
            *_batch(keys, plan),
            *_models(keys, plan),
        ]
    )
    words = [f"{name}={_text(value)}" for name, value in pairs.items() if value is not None]
    optim = [f"{role}.optim.eps" for role in ("actor", "critic") if role in plan.roles]
    return Emitted(_COMMAND, tuple(words), (*optim, "seeds of sampling, loggers and what checkpoints keep"))


def _text(value: Any) -> str:
    return str(value) if not isinstance(value, float) else f"{value!r}"


def _pools(plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    nodes, per_node = nodes_of(plan, "actor")
    yield from (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", per_node))
    for pool in plan.pools:
        if "actor" in pool.roles:
            continue
        if pool.roles not in (("rollout",), ("reward",)):
            raise EmitError(
                f"pool {pool.name!r} holds {', '.join(pool.roles)} apart from the actor: verl gives devices "
                "of their own to the rollout or the reward model alone"
            )
        nodes, per_node = nodes_of(plan, pool.roles[0])
        prefix = "rollout" if pool.roles == ("rollout",) else "reward_model"
        switch = ("actor_rollout_ref.hybrid_engine", False) if prefix == "rollout" else (
            "reward_model.enable_resource_pool", True)  # fmt: skip
        yield from (switch, (f"{prefix}.nnodes", nodes), (f"{prefix}.n_gpus_per_node", per_node))


def _layouts(plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    for role, prefix in _PREFIXES.items():
        if role not in plan.roles:
            continue
        layout: Layout = plan.layout_of(role)
        yield f"{prefix}.strategy", "megatron"
        sizes = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp if layout.ep > 1 else None,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "sequence_parallel": layout.sequence_parallel,
        }
        yield from ((f"{prefix}.megatron.{name}", size) for name, size in sizes.items())
    rollout = plan.layout_of("rollout")
    if rollout.cp > 1:
        raise EmitError(f"rollout has cp={rollout.cp}: verl's engines have no context parallelism")
    yield f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tp
    yield f"{_ROLLOUT}.pipeline_model_parallel_size", rollout.pp


def _offload(keys: Keys, plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    """What waits in host memory between a role's turns: without it the plan would not fit."""
    for role, prefix in _PREFIXES.items():
        if role in plan.roles and keys[role]["offload"]:
            states = ("param", "grad", "optimizer") if role in ("actor", "critic") else ("param",)
            yield from ((f"{prefix}.megatron.{state}_offload", True) for state in states)


def _data(keys: Keys) -> Iterator[tuple[str, Any]]:
    data, run = keys["data"], keys["run"]
    yield "data.train_files", files(data["train_files"])
    if data["val_files"]:
        yield "data.val_files", files(data["val_files"])
        yield "trainer.test_freq", run["validate_every"] or -1
    yield "data.prompt_key", data["prompt_key"]
    yield "data.max_prompt_length", data["max_prompt_tokens"]
    yield "data.max_response_length", keys["lengths"]["max_response_tokens"]
    yield "data.filter_overlong_prompts", data["overlong"] == "filter"
    yield "data.truncation", "left" if data["overlong"] == "truncate" else "error"
    yield "data.shuffle", data["shuffle"]
    yield "data.seed", run["seed"]
    yield "trainer.total_training_steps", run["steps"]
    yield "trainer.total_epochs", run["epochs"] if run["steps"] is None else None
    yield "trainer.save_freq", run["save_every"] or -1


def _algorithm(keys: Keys) -> Iterator[tuple[str, Any]]:
    said = keys["algorithm"]
    if said["estimator"] not in _ESTIMATORS or said["loss"] not in ("vanilla", "gspo", "cispo"):
        raise EmitError(f"estimator {said['estimator']} with loss {said['loss']} is not in verl")
    yield "algorithm.adv_estimator", said["estimator"]
    yield f"{_ACTOR}.policy_loss.loss_mode", said["loss"]
    yield "algorithm.gamma", said["gamma"]
    yield "algorithm.lam", said["lam"]
    yield "algorithm.norm_adv_by_std_in_grpo", said["norm_adv_by_std"]
    yield f"{_ACTOR}.clip_ratio_low", said["clip_low"]
    yield f"{_ACTOR}.clip_ratio_high", said["clip_high"]
    yield f"{_ACTOR}.clip_ratio_c", said["dual_clip"]
    yield f"{_ACTOR}.entropy_coeff", said["entropy_coef"]
    yield f"{_ACTOR}.loss_agg_mode", said["loss_agg"]
    yield f"{_ACTOR}.loss_scale_factor", said["norm_tokens"]
    kl = said["kl"]
    yield "algorithm.use_kl_in_reward", kl["in_"] == "reward"
    yield f"{_ACTOR}.use_kl_loss", kl["in_"] == "loss"
    if kl["in_"] == "reward":
        yield "algorithm.kl_penalty", _KL_KINDS[kl["kind"]]
        yield "algorithm.kl_ctrl.kl_coef", kl["coef"]
        yield "algorithm.kl_ctrl.type", "adaptive" if kl["target"] else "fixed"
        yield "algorithm.kl_ctrl.target_kl", kl["target"]
        yield "algorithm.kl_ctrl.horizon", kl["horizon"]
    elif kl["in_"] == "loss":
        yield f"{_ACTOR}.kl_loss_type", _KL_KINDS[kl["kind"]]
        yield f"{_ACTOR}.kl_loss_coef", kl["coef"]
    if said["dynamic_sampling"]["on"]:
        yield "algorithm.filter_groups.enable", True
        yield "algorithm.filter_groups.max_num_gen_batches", said["dynamic_sampling"]["tries"]
    if buffer := said["overlong"]["buffer_tokens"]:
        prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
        yield from (
            (f"+{prefix}.enable", True), (f"+{prefix}.len", buffer),
            (f"+{prefix}.penalty_factor", said["overlong"]["penalty"]),
        )  # fmt: skip


def _batch(keys: Keys, plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    batch, mini = keys["batch"], mini_batch(keys)
    prompts, rest = divmod(mini, batch["samples_per_prompt"])
    if rest:
        raise EmitError(
            f"batch.mini_batch_samples is {mini}, no multiple of {batch['samples_per_prompt']} samples per "
            "prompt: verl counts prompts"
        )
    yield "data.train_batch_size", batch["prompts"]
    yield f"{_ROLLOUT}.n", batch["samples_per_prompt"]
    for role in ("actor", "critic"):
        if role in plan.roles:
            prefix = _PREFIXES[role]
            yield f"{prefix}.ppo_mini_batch_size", prompts
            yield f"{prefix}.ppo_epochs", batch["epochs"]
            yield f"{prefix}.use_dynamic_bsz", True
            yield f"{prefix}.ppo_max_token_len_per_gpu", micro_batch_tokens(keys, role)
    if "critic" in plan.roles:
        yield "trainer.critic_warmup", batch["critic_warmup"]
        yield "critic.cliprange_value", keys["algorithm"]["value_clip"]
    if "ref" in plan.roles:
        yield f"{_REF}.log_prob_use_dynamic_bsz", True
        yield f"{_REF}.log_prob_max_token_len_per_gpu", micro_batch_tokens(keys, "ref")
    if "reward" in plan.roles:
        yield "reward_model.use_dynamic_bsz", True
        yield "reward_model.forward_max_token_len_per_gpu", micro_batch_tokens(keys, "reward")


def _models(keys: Keys, plan: PlacementPlan) -> Iterator[tuple[str, Any]]:
    yield "actor_rollout_ref.model.path", keys["actor"]["path"]
    rollout = keys["rollout"]
    yield f"{_ROLLOUT}.name", rollout["engine"]
    for name in ("temperature", "top_p"):
        yield f"{_ROLLOUT}.{name}", rollout[name]
    yield f"{_ROLLOUT}.top_k", rollout["top_k"] or -1
    for role in ("actor", "critic"):
        if role not in plan.roles:
            continue
        section, prefix = keys[role], _PREFIXES[role]
        optim = section["optim"]
        for name in ("lr", "weight_decay", "clip_grad"):
            yield f"{prefix}.optim.{name}", optim[name]
        yield f"{prefix}.optim.lr_warmup_steps", optim["warmup_steps"]
        yield f"{prefix}.optim.lr_decay_style", optim["decay"]
        yield f"{prefix}.optim.min_lr", optim["min_lr"] or None
        yield f"+{prefix}.optim.betas", f"[{optim['beta1']},{optim['beta2']}]"
        if section["recompute"] != "none":
            name = f"+{prefix}.megatron.override_transformer_config.recompute_granularity"
            yield name, section["recompute"]
        if section["lora"]["rank"]:
            model = "actor_rollout_ref.model" if role == "actor" else "critic.model"
            yield from (
                (f"{model}.lora_rank", section["lora"]["rank"]),
                (f"{model}.lora_alpha", section["lora"]["alpha"]),
            )
    if "critic" in plan.roles:
        yield "critic.model.path", keys["critic"]["path"]
    yield from _reward(keys["reward"])


def _reward(reward: Keys) -> Iterator[tuple[str, Any]]:
    path = str(reward["path"] or "")
    if reward["kind"] == "model":
        yield from (("reward_model.enable", True), ("reward_model.model.path", path))
    elif reward["kind"] == "function":
        file, _, name = path.rpartition(":")
        yield from (("custom_reward_function.path", file), ("custom_reward_function.name", name))
    else:
        raise EmitError(
            f"reward.kind is {reward['kind']}: verl takes a model or a function that asks the service"
        )
