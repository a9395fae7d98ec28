"""Where each of verl's settings that is read stands in a recipe: dotted key (or keys), and the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rolemesh.placement.importers.verl_algorithm import OVERLONG

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_AXES = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_model_parallel_size": "vpp", "sequence_parallel": "sequence_parallel",
}  # fmt: skip
_DYNAMIC = ("", "true: micro-batches in tokens, false: in sequences")
_REWARDS = {"reward_model": "reward", "reward.reward_model": "reward"}


def _roles() -> Iterator[tuple[str, tuple[str, str]]]:
    for prefix, role in {_ACTOR: "actor", "critic": "critic", _REF: "ref", **_REWARDS}.items():
        for name, axis in _AXES.items():
            yield (
                f"{prefix}.megatron.{name}",
                (f"{role}.layout.{axis}", "with tp > 1" if "seq" in name else ""),
            )
        yield f"{prefix}.ulysses_sequence_parallel_size", (f"{role}.layout.cp", "sequence cut by cp")
        yield f"{prefix}.strategy", ("", "says whether Megatron's sizes count, or FSDP's")
        yield (
            f"{prefix}.megatron.override_transformer_config.recompute_granularity",
            (f"{role}.recompute", ""),
        )
    for prefix, role in {_ACTOR: "actor", "critic": "critic"}.items():
        for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
            yield f"{prefix}.optim.{name}", (f"{role}.optim.{name}", "")
        yield f"{prefix}.optim.min_lr_ratio", (f"{role}.optim.min_lr", "x lr")
        yield f"{prefix}.optim.lr_warmup_steps", (f"{role}.optim.warmup_steps", "")
        yield f"{prefix}.optim.betas", (f"{role}.optim.beta1, {role}.optim.beta2", "")
        for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style"):
            yield f"{prefix}.optim.{name}", (f"{role}.optim.decay", "")
        yield f"{prefix}.grad_clip", (f"{role}.optim.clip_grad", "")
        yield f"{prefix}.ppo_max_token_len_per_gpu", (f"{role}.micro_batch_tokens", "")
        yield f"{prefix}.ppo_micro_batch_size_per_gpu", (f"{role}.micro_batch_tokens", _LONGEST)
        yield f"{prefix}.use_dynamic_bsz", _DYNAMIC
    for prefix in _REWARDS:
        yield f"{prefix}.enable", ("reward.path", "true: a model, false: a function")
        yield f"{prefix}.forward_max_token_len_per_gpu", ("reward.micro_batch_tokens", "")
        yield f"{prefix}.micro_batch_size_per_gpu", ("reward.micro_batch_tokens", _LONGEST)
        yield f"{prefix}.use_dynamic_bsz", _DYNAMIC
        yield f"{prefix}.rollout.tensor_model_parallel_size", ("reward.layout.tp", "")
        for name in ("nnodes", "n_gpus_per_node", "enable_resource_pool"):
            yield f"{prefix}.{name}", ("placement.pools", "a pool of its own")
    for prefix in OVERLONG:
        yield f"{prefix}.enable", ("algorithm.overlong.buffer_tokens", "false: 0")
        yield f"{prefix}.len", ("algorithm.overlong.buffer_tokens", "")
        yield f"{prefix}.penalty_factor", ("algorithm.overlong.penalty", "")


_LONGEST = "x (longest prompt + longest response)"
KEYS: Mapping[str, tuple[str, str]] = {
    "trainer.nnodes": ("cluster.nodes", ""),
    "trainer.n_gpus_per_node": ("cluster.per_node", ""),
    "rollout.nnodes": ("placement.pools", "a pool of its own"),
    "rollout.n_gpus_per_node": ("placement.pools", "a pool of its own"),
    "actor_rollout_ref.hybrid_engine": ("placement", "true: the rollout shares the actor's devices"),
    "trainer.default_local_dir": ("run.dir", ""),
    "trainer.total_training_steps": ("run.steps", ""),
    "trainer.total_epochs": ("run.epochs", ""),
    "trainer.save_freq": ("run.save_every", "-1: 0"),
    "trainer.test_freq": ("run.validate_every", "-1: 0"),
    "trainer.max_actor_ckpt_to_keep": ("run.keep_last", ""),
    "trainer.resume_mode": ("run.resume", ""),
    "trainer.resume_from_path": ("run.resume", ""),
    "trainer.critic_warmup": ("batch.critic_warmup", ""),
    "data.seed": ("run.seed", ""),
    "data.truncation": ("data.overlong", "left: truncate"),
    "data.filter_overlong_prompts": ("data.overlong", "true: filter"),
    "data.val_max_samples": ("data.val_prompts", "-1: all"),
    "data.train_files": ("data.train_files", ""),
    "data.val_files": ("data.val_files", ""),
    "data.prompt_key": ("data.prompt_key", ""),
    "data.max_prompt_length": ("data.max_prompt_tokens", ""),
    "data.shuffle": ("data.shuffle", ""),
    "data.train_batch_size": ("batch.prompts", ""),
    "data.max_response_length": ("lengths.max_response_tokens", ""),
    f"{_ROLLOUT}.n": ("batch.samples_per_prompt", ""),
    f"{_ACTOR}.ppo_mini_batch_size": ("batch.mini_batch_samples", f"prompts x {_ROLLOUT}.n"),
    f"{_ACTOR}.ppo_epochs": ("batch.epochs", ""),
    "critic.ppo_mini_batch_size": ("batch.mini_batch_samples", "the actor's"),
    "critic.ppo_epochs": ("batch.epochs", "the actor's"),
    "algorithm.adv_estimator": ("algorithm.name", ""),
    f"{_ACTOR}.policy_loss.loss_mode": ("algorithm.loss, algorithm.name", ""),
    "algorithm.gamma": ("algorithm.gamma", ""),
    "algorithm.lam": ("algorithm.lam", ""),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.norm_adv_by_std", ""),
    "critic.cliprange_value": ("algorithm.value_clip", ""),
    f"{_ACTOR}.clip_ratio": (
        "algorithm.clip_low, algorithm.clip_high",
        "where clip_ratio_low, _high do not say",
    ),
    f"{_ACTOR}.clip_ratio_low": ("algorithm.clip_low", ""),
    f"{_ACTOR}.clip_ratio_high": ("algorithm.clip_high", ""),
    f"{_ACTOR}.clip_ratio_c": ("algorithm.dual_clip", ""),
    f"{_ACTOR}.entropy_coeff": ("algorithm.entropy_coef", ""),
    f"{_ACTOR}.loss_agg_mode": ("algorithm.loss_agg", ""),
    f"{_ACTOR}.loss_scale_factor": ("algorithm.norm_tokens", ""),
    f"{_ACTOR}.tis_imp_ratio_cap": ("algorithm.rollout_correction.max_weight", "weights: token"),
    "algorithm.rollout_correction.rollout_is": ("algorithm.rollout_correction.weights", ""),
    "algorithm.rollout_correction.rollout_is_threshold": ("algorithm.rollout_correction.max_weight", ""),
    "algorithm.filter_groups.enable": ("algorithm.dynamic_sampling.on, algorithm.name", ""),
    "algorithm.filter_groups.max_num_gen_batches": ("algorithm.dynamic_sampling.tries", ""),
    "algorithm.use_kl_in_reward": ("algorithm.kl.in", "true: reward"),
    f"{_ACTOR}.use_kl_loss": ("algorithm.kl.in", "true: loss, unless it is in the reward"),
    "algorithm.kl_penalty": ("algorithm.kl.kind", "kl: k1, mse: k2, low_var_kl: k3"),
    f"{_ACTOR}.kl_loss_type": ("algorithm.kl.kind", "kl: k1, mse: k2, low_var_kl: k3"),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl.coef", ""),
    f"{_ACTOR}.kl_loss_coef": ("algorithm.kl.coef", ""),
    "algorithm.kl_ctrl.type": ("algorithm.kl.target, algorithm.kl.coef", "adaptive: with a target"),
    "algorithm.kl_ctrl.target_kl": ("algorithm.kl.target", ""),
    "algorithm.kl_ctrl.horizon": ("algorithm.kl.horizon", ""),
    "actor_rollout_ref.model.path": ("actor.path", ""),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("actor.recompute", "true: full"),
    "actor_rollout_ref.model.lora_rank": ("actor.lora.rank", ""),
    "actor_rollout_ref.model.lora_alpha": ("actor.lora.alpha", ""),
    "critic.model.path": ("critic.path", ""),
    "critic.model.enable_gradient_checkpointing": ("critic.recompute", "true: full"),
    "critic.model.lora_rank": ("critic.lora.rank", ""),
    "critic.model.lora_alpha": ("critic.lora.alpha", ""),
    f"{_REF}.log_prob_max_token_len_per_gpu": ("ref.micro_batch_tokens", ""),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": ("ref.micro_batch_tokens", _LONGEST),
    f"{_REF}.log_prob_use_dynamic_bsz": _DYNAMIC,
    "reward_model.model.path": ("reward.path", ""),
    "reward.reward_model.model_path": ("reward.path", ""),
    "custom_reward_function.path": ("reward.path", "PATH:NAME"),
    "custom_reward_function.name": ("reward.path", "PATH:NAME"),
    "reward.custom_reward_function.path": ("reward.path", "PATH:NAME"),
    "reward.custom_reward_function.name": ("reward.path", "PATH:NAME"),
    f"{_ROLLOUT}.name": ("rollout.engine", ""),
    f"{_ROLLOUT}.tensor_model_parallel_size": ("rollout.layout.tp", ""),
    f"{_ROLLOUT}.pipeline_model_parallel_size": ("rollout.layout.pp", ""),
    f"{_ROLLOUT}.temperature": ("rollout.temperature", ""),
    f"{_ROLLOUT}.top_p": ("rollout.top_p", ""),
    f"{_ROLLOUT}.top_k": ("rollout.top_k", "-1: 0"),
    **dict(_roles()),
}
