"""Where each of OpenRLHF's flags that is read stands in a recipe: dotted keys, and the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

_LONGEST = "x (longest prompt + longest response)"
_SHARED = ("placement", "roles that share devices")
KEYS: Mapping[str, tuple[str, str]] = {
    **{
        f"{role}_num_nodes": ("cluster.nodes", f"pool of {role}")
        for role in ("actor", "critic", "ref", "reward")
    },
    **{
        f"{role}_num_gpus_per_node": ("cluster.per_node", f"pool of {role}")
        for role in ("actor", "critic", "ref", "reward")
    },
    "vllm_num_engines": ("placement", "x vllm_tensor_parallel_size: devices of the rollout"),
    "vllm_tensor_parallel_size": ("rollout.layout.tp", ""),
    "colocate_all_models": _SHARED,
    "colocate_actor_ref": _SHARED,
    "colocate_critic_reward": _SHARED,
    "advantage_estimator": ("algorithm.name", ""),
    "policy_loss_type": ("algorithm.loss, algorithm.name", ""),
    "dynamic_filtering": ("algorithm.dynamic_sampling.on, algorithm.name", ""),
    "no_advantage_std_norm": ("algorithm.norm_adv_by_std", "true: false"),
    "init_kl_coef": ("algorithm.kl.coef, algorithm.kl.in", "0: no KL term and no reference"),
    "use_kl_loss": ("algorithm.kl.in", "true: loss, false: reward"),
    "kl_estimator": ("algorithm.kl.kind", ""),
    "kl_target": ("algorithm.kl.target", ""),
    "kl_horizon": ("algorithm.kl.horizon", ""),
    "gamma": ("algorithm.gamma", ""),
    "lambd": ("algorithm.lam", ""),
    "value_clip": ("algorithm.value_clip", ""),
    "eps_clip": ("algorithm.clip_low, algorithm.clip_high", "where eps_clip_low_high does not say"),
    "eps_clip_low_high": ("algorithm.clip_low, algorithm.clip_high", ""),
    "dual_clip": ("algorithm.dual_clip", ""),
    "entropy_loss_coef": ("algorithm.entropy_coef", ""),
    "enable_vllm_is_correction": ("algorithm.rollout_correction.weights", "true: token"),
    "vllm_is_truncated_threshold": ("algorithm.rollout_correction.max_weight", ""),
    "save_path": ("run.dir", ""),
    "num_episodes": ("run.epochs", ""),
    "seed": ("run.seed", ""),
    "eval_steps": ("run.validate_every", "-1: 0"),
    "save_steps": ("run.save_every", "-1: 0"),
    "max_ckpt_num": ("run.keep_last", ""),
    "load_checkpoint": ("run.resume", "true: auto"),
    "prompt_data": ("data.train_files", ""),
    "eval_dataset": ("data.val_files", ""),
    "input_key": ("data.prompt_key", ""),
    "prompt_max_len": ("data.max_prompt_tokens", ""),
    "generate_max_len": ("lengths.max_response_tokens", ""),
    "rollout_batch_size": ("batch.prompts", ""),
    "n_samples_per_prompt": ("batch.samples_per_prompt", ""),
    "train_batch_size": ("batch.mini_batch_samples", "samples, as here"),
    "max_epochs": ("batch.epochs", ""),
    "freezing_actor_steps": ("batch.critic_warmup", ""),
    "micro_train_batch_size": ("actor.micro_batch_tokens", _LONGEST),
    "micro_rollout_batch_size": ("ref.micro_batch_tokens, reward.micro_batch_tokens", _LONGEST),
    "train_max_tokens_per_gpu": ("actor.micro_batch_tokens", ""),
    "rollout_max_tokens_per_gpu": ("ref.micro_batch_tokens, reward.micro_batch_tokens", ""),
    "use_dynamic_batch": ("", "true: micro-batches in tokens, false: in sequences"),
    "ds_tensor_parallel_size": ("actor.layout.tp", ""),
    "ring_attn_size": ("actor.layout.cp", ""),
    "param_dtype": ("actor.dtype", ""),
    "bf16": ("actor.dtype", ""),
    "zero_stage": ("actor.layout", "Megatron's distributed optimizer takes its place"),
    "gradient_checkpointing": ("actor.recompute", "true: full"),
    "lora_rank": ("actor.lora.rank, critic.lora.rank", ""),
    "lora_alpha": ("actor.lora.alpha, critic.lora.alpha", ""),
    "pretrain": ("actor.path", ""),
    "critic_pretrain": ("critic.path", ""),
    "reward_pretrain": ("reward.path, critic.path", ""),
    "remote_rm_url": ("reward.endpoints, reward.path", ""),
    "temperature": ("rollout.temperature", ""),
    "top_p": ("rollout.top_p", ""),
    "actor_learning_rate": ("actor.optim.lr", ""),
    "critic_learning_rate": ("critic.optim.lr", ""),
    "adam_betas": ("actor.optim.beta1, actor.optim.beta2", ""),
    "lr_scheduler": ("actor.optim.decay", "cosine_with_min_lr: cosine down to a tenth of lr"),
    "l2": ("actor.optim.weight_decay", ""),
    "max_norm": ("actor.optim.clip_grad", ""),
}
