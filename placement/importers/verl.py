"""verl's configuration (hydra YAML, flat overrides, or the shell script that passes them) as a recipe.

Settings that are left out have verl's defaults. verl puts every role on one pool of `trainer.nnodes` x
`trainer.n_gpus_per_node` devices; a reward model, and a rollout that is not hybrid, may have a pool of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from rolemesh.placement.importers.settings import (
    ForeignConfigError,
    Imported,
    Settings,
    placed,
    tidy,
    words,
)

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_ESTIMATORS = {"gae": "ppo", "grpo": "grpo"}
_KL_KINDS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
_LOSSES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_REASONS = (
    (r"_offload$|offload_policy$",
     "what waits in host memory is the planner's choice (pin: ROLE offload=true)"),
    (r"fsdp|\.strategy$", "models are cut by Megatron's layouts, with its distributed optimizer, not FSDP"),
    (r"lora|target_modules|exclude_modules", "adapters are on every layer of attention and feed-forward"),
    (r"gpu_memory_utilization|max_num_|free_cache|enforce_eager|cudagraph|prefill|prefix_caching|max_model_len",
     "the engine's memory and batches are planned from model and lengths"),
    (r"profiler|\.trace\.", "profiling: a run writes its timeline"),
    (r"trainer\.(logger|project_name|experiment_name|log_val_generations)", "a run logs into its folder"),
    (r"checkpoint|resume|ckpt|hdfs", "a checkpoint always holds everything, on a disk that all nodes share"),
    (r"^ray_kwargs|nccl_timeout|ray_wait", "Ray is started by the run, with run.timeout_s"),
    (r"multi_turn|agent|tool_config|interaction", "several turns and tools are not in this version"),
    (r"use_remove_padding|balance_batch|use_dynamic_bsz", "always so here"),
    (r"micro_batch_size$", "deprecated in verl: per GPU or in tokens"),
    (r"val_kwargs|val_before_train|val_only", "validation is greedy, before and after training"),
    (r"_target_$", "a Python class of verl"),
)  # fmt: skip


def import_verl(text: str, overrides: Sequence[str] = ()) -> Imported:
    """Read verl's configuration. Raises ForeignConfigError."""
    values = _read(text) | _pairs(overrides)
    said = Settings({name: _resolved(name, values) for name in values})
    gae = said.take("algorithm.adv_estimator", "gae")
    algorithm = _ESTIMATORS.get(gae, "grpo")
    if gae not in _ESTIMATORS:
        said.ignore("algorithm.adv_estimator", "not in this version: grpo has the same roles and operations")
    kl = _kl(said)
    reward = _reward(said)
    present = {"critic": algorithm == "ppo", "ref": bool(kl), "reward": "model" in reward}
    roles = [r for r in ("actor", "rollout", "critic", "ref", "reward") if present.get(r, True)]
    pools = _pools(said, roles)
    fixed = placed(pools, roles)
    recipe: dict[str, Any] = {"run": _run(said), "cluster": fixed["cluster"], "data": _data(said)}
    recipe["algorithm"] = _algorithm(said, algorithm, kl)
    recipe |= _batch(said, algorithm)
    recipe |= _models(said, roles, reward)
    recipe["placement"] = fixed["placement"]
    demands = {role: nodes * per_node for held, nodes, per_node in pools for role in held}
    return Imported(
        tidy(recipe),
        {role: demands[role] for role in roles},
        sum(nodes * per_node for _, nodes, per_node in pools),
        said.ignored([*_absent(present, algorithm), *_REASONS]),
    )


def _absent(present: Mapping[str, bool], algorithm: str) -> Iterator[tuple[str, str]]:
    """Why the settings of roles that are not there do not count."""
    sections = {"critic": r"^critic\.", "ref": rf"^{_REF}\.", "reward": r"^reward(_model|\.reward_model)\."}
    reasons = {"critic": f"{algorithm} has no critic", "ref": "no KL term, so no reference"}
    for role, pattern in sections.items():
        if not present[role]:
            yield pattern, reasons.get(role, "rewards come from a function")


def _read(text: str) -> dict[str, Any]:
    """The settings by dotted name, from YAML or from a command line."""
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        loaded = None
    if isinstance(loaded, Mapping):
        return dict(_flat(loaded))
    found = _pairs(words(text))
    if not found:
        raise ForeignConfigError("neither a YAML mapping nor settings such as trainer.nnodes=2")
    if any("megatron" in word for word in words(text) if "config" in word):
        found.setdefault(f"{_ACTOR}.strategy", "megatron")
    return found


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _pairs(items: Sequence[str]) -> dict[str, Any]:
    """Overrides such as `+a.b=c`; words of another form are not settings."""
    found = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.lstrip("+")
        if equals and re.fullmatch(r"\w+(\.\w+)+", name):
            try:
                found[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                found[name] = text
    return found


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*(\.?[\w.]+)\s*(?:,(.*))?\}", re.DOTALL)


def _resolved(name: str, values: Mapping[str, Any], depth: int = 0) -> Any:
    """The value of a setting, a reference to another one followed; what cannot be followed stays text."""
    value = values[name]
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > 10:
        return value
    target = match[1]
    if target.startswith("."):
        target = name.rpartition(".")[0] + target
    if target in values:
        return _resolved(target, values, depth + 1)
    return yaml.safe_load(match[2]) if match[2] else value if "." not in target else None


def _pools(said: Settings, roles: Sequence[str]) -> list[tuple[list[str], int, int]]:
    """verl's resource pools as (roles, nodes, devices per node)."""
    nodes, per_node = said.count("trainer.nnodes", 1), said.count("trainer.n_gpus_per_node", 8)
    everyone, own = list(roles), []
    hybrid = said.flag("actor_rollout_ref.hybrid_engine", True)
    apart = [said.count(f"rollout.{name}") for name in ("nnodes", "n_gpus_per_node")]
    if all(apart) or not hybrid:
        if not all(apart):
            raise ForeignConfigError("a rollout that is not hybrid needs rollout.nnodes and n_gpus_per_node")
        everyone.remove("rollout")
        own.append((["rollout"], apart[0], apart[1]))
    for prefix in ("reward_model", "reward.reward_model"):
        pool = said.count(f"{prefix}.nnodes"), said.count(f"{prefix}.n_gpus_per_node")
        if said.flag(f"{prefix}.enable_resource_pool") and "reward" in everyone:
            if not all(pool):
                raise ForeignConfigError(
                    f"{prefix}.enable_resource_pool needs {prefix}.nnodes and n_gpus_per_node"
                )
            everyone.remove("reward")
            own.append((["reward"], *pool))
    return [(everyone, nodes, per_node), *own]


def _run(said: Settings) -> dict[str, Any]:
    folder = said.take("trainer.default_local_dir")
    steps = said.take("trainer.total_training_steps")
    epochs = said.count("trainer.total_epochs", 30)
    if steps is not None:
        said.ignore("trainer.total_epochs", "trainer.total_training_steps says when to stop")
    save_every = max(0, said.count("trainer.save_freq", -1))
    mode, path = said.take("trainer.resume_mode"), said.take("trainer.resume_from_path")
    return {
        "dir": folder if isinstance(folder, str) and "$" not in folder else None,
        "steps": steps,
        "epochs": None if steps is not None else epochs,
        "seed": said.take("data.seed"),
        "validate_every": max(0, said.count("trainer.test_freq", -1)) if "data.val_files" in said else None,
        "save_every": save_every,
        "keep_last": said.take("trainer.max_actor_ckpt_to_keep") if save_every else None,
        "resume": {"auto": "auto", "resume_path": path}.get(mode),
    }


def _data(said: Settings) -> dict[str, Any]:
    truncation = said.take("data.truncation", "error")
    overlong = {"left": "truncate", "error": "error"}.get(truncation)
    if said.flag("data.filter_overlong_prompts"):
        overlong = "filter"
    elif overlong is None:
        said.ignore("data.truncation", "a prompt that is cut keeps its last tokens here (left)")
    val_prompts = said.count("data.val_max_samples", -1)
    return {
        "train_files": said.take("data.train_files", "train.parquet"),
        "val_files": said.take("data.val_files"),
        "prompt_key": said.take("data.prompt_key"),
        "max_prompt_tokens": said.count("data.max_prompt_length", 512),
        "overlong": overlong,
        "shuffle": said.take("data.shuffle"),
        "val_prompts": val_prompts if val_prompts > 0 and "data.val_files" in said else None,
    }


def _kl(said: Settings) -> dict[str, Any]:
    """The KL term; empty where there is none, and so no reference."""
    in_reward = said.flag("algorithm.use_kl_in_reward")
    in_loss = said.flag(f"{_ACTOR}.use_kl_loss")
    reward_names, loss_names = (
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"),
        (f"{_ACTOR}.kl_loss_type", f"{_ACTOR}.kl_loss_coef"),
    )
    for names, used in ((reward_names, in_reward), (loss_names, in_loss and not in_reward)):
        for name in names if not used else ():
            said.ignore(
                name, "this KL term is off" if not (in_reward and in_loss) else "one KL term, in the reward"
            )
    if not in_reward:
        for name in ("type", "target_kl", "horizon"):
            said.ignore(f"algorithm.kl_ctrl.{name}", "no KL term in the reward")
    if not (in_reward or in_loss):
        return {}
    kind_name, coef_name = reward_names if in_reward else loss_names
    kind = str(said.take(kind_name, "kl" if in_reward else "low_var_kl")).rstrip("+")
    if kind not in _KL_KINDS:
        said.ignore(kind_name, "not in this version: k1 stands for it")
    kl = {
        "in": "reward" if in_reward else "loss",
        "kind": _KL_KINDS.get(kind, "k1"),
        "coef": said.number(coef_name, 0.001),
    }
    if in_reward and said.take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        kl["target"] = said.number("algorithm.kl_ctrl.target_kl", 0.1)
        kl["horizon"] = said.number("algorithm.kl_ctrl.horizon", 10000)
    else:
        for name in ("target_kl", "horizon"):
            said.ignore(f"algorithm.kl_ctrl.{name}", "the weight of the KL is fixed")
    return kl


def _algorithm(said: Settings, name: str, kl: Mapping[str, Any]) -> dict[str, Any]:
    both = said.number(f"{_ACTOR}.clip_ratio", 0.2)
    loss = said.take(f"{_ACTOR}.loss_agg_mode", "token-mean")
    if loss not in _LOSSES:
        said.ignore(f"{_ACTOR}.loss_agg_mode", f"not in this version (there are: {', '.join(_LOSSES)})")
    keys: dict[str, Any] = {"name": name}
    if name == "ppo":
        keys |= {"gamma": said.number("algorithm.gamma", 1.0), "lam": said.number("algorithm.lam", 1.0)}
        keys["value_clip"] = said.number("critic.cliprange_value", 0.5)
        said.ignore("algorithm.norm_adv_by_std_in_grpo", "ppo has no groups")
    else:
        keys["norm_adv_by_std"] = said.flag("algorithm.norm_adv_by_std_in_grpo", True)
        for unused in ("gamma", "lam"):
            said.ignore(f"algorithm.{unused}", "counts only with a critic")
    keys["kl"] = dict(kl)
    return keys | {
        "clip_low": said.number(f"{_ACTOR}.clip_ratio_low", both),
        "clip_high": said.number(f"{_ACTOR}.clip_ratio_high", both),
        "dual_clip": said.number(f"{_ACTOR}.clip_ratio_c", 3.0),
        "entropy_coef": said.number(f"{_ACTOR}.entropy_coeff", 0.0),
        "loss_agg": loss if loss in _LOSSES else None,
    }


def _batch(said: Settings, algorithm: str) -> dict[str, Any]:
    prompts, samples = said.count("data.train_batch_size", 1024), said.count(f"{_ROLLOUT}.n", 1)
    mini = said.count(f"{_ACTOR}.ppo_mini_batch_size", 256)  # verl counts prompts here
    if said.take("critic.ppo_mini_batch_size", mini) != mini:
        said.ignore("critic.ppo_mini_batch_size", "actor and critic learn from the same mini-batches")
    if said.take("critic.ppo_epochs", 1) != said.count(f"{_ACTOR}.ppo_epochs", 1):
        said.ignore("critic.ppo_epochs", "actor and critic learn from the same mini-batches")
    return {
        "batch": {
            "prompts": prompts,
            "samples_per_prompt": samples,
            "mini_batch_samples": min(mini, prompts) * samples,
            "epochs": said.count(f"{_ACTOR}.ppo_epochs", 1),
            "critic_warmup": said.count("trainer.critic_warmup") if algorithm == "ppo" else None,
        },
        "lengths": {"max_response_tokens": said.count("data.max_response_length", 512)},
    }


def _reward(said: Settings) -> dict[str, Any]:
    """`model` with the path of a reward model, or `path` of a function."""
    for prefix, path in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        if said.flag(f"{prefix}.enable"):
            return {"model": said.first(f"{prefix}.{path}", default="reward-model"), "prefix": prefix}
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if path := said.take(f"{prefix}.path"):
            return {"path": f"{path}:{said.take(f'{prefix}.name', 'compute_score')}"}
    said.ignore(
        "reward_model.reward_manager", "rewards by data source: write them as reward.py:compute_score"
    )
    return {"path": "reward.py:compute_score"}


def _models(said: Settings, roles: Sequence[str], reward: Mapping[str, Any]) -> dict[str, Any]:
    longest = said.count("data.max_prompt_length", 512) + said.count("data.max_response_length", 512)
    actor_path = said.take("actor_rollout_ref.model.path", "~/models/deepseek-llm-7b-chat")
    dynamic = said.flag(f"{_ACTOR}.use_dynamic_bsz")
    most = said.count(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384) if dynamic else 0
    models: dict[str, Any] = {
        "actor": {
            "path": actor_path,
            "optim": _optim(said, f"{_ACTOR}.optim", 1e-6, f"{_ACTOR}.grad_clip"),
            "layout": _layout(said, _ACTOR),
            "recompute": _recompute(said, _ACTOR, "actor_rollout_ref.model"),
            "lora": _lora(said, "actor_rollout_ref.model"),
            "micro_batch_tokens": _tokens(
                said, f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
                longest, dynamic, 16384,
            ),
        },
        "rollout": _rollout(said),
    }  # fmt: skip
    if "critic" in roles:
        models["critic"] = {
            "path": said.take("critic.model.path", "~/models/deepseek-llm-7b-chat"),
            "optim": _optim(said, "critic.optim", 1e-5, "critic.grad_clip"),
            "layout": _layout(said, "critic"),
            "recompute": _recompute(said, "critic", "critic.model"),
            "lora": _lora(said, "critic.model"),
            "micro_batch_tokens": _tokens(
                said, "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size_per_gpu",
                longest, said.flag("critic.use_dynamic_bsz", dynamic), 32768,
            ),
        }  # fmt: skip
    if "ref" in roles:
        models["ref"] = {
            "layout": _layout(said, _REF),
            "micro_batch_tokens": _tokens(
                said, f"{_REF}.log_prob_max_token_len_per_gpu", f"{_REF}.log_prob_micro_batch_size_per_gpu",
                longest, said.flag(f"{_REF}.log_prob_use_dynamic_bsz", dynamic), most,
            ),
        }  # fmt: skip
    if "model" not in reward:
        return models | {"reward": {"path": reward["path"]}}
    prefix = reward["prefix"]
    layout = _layout(said, prefix)
    if served := said.count(f"{prefix}.rollout.tensor_model_parallel_size"):
        layout["tp"] = served
    return models | {
        "reward": {
            "path": reward["model"],
            "layout": layout,
            "micro_batch_tokens": _tokens(
                said, f"{prefix}.forward_max_token_len_per_gpu", f"{prefix}.micro_batch_size_per_gpu",
                longest, said.flag(f"{prefix}.use_dynamic_bsz", dynamic), 32768,
            ),
        }
    }  # fmt: skip


def _rollout(said: Settings) -> dict[str, Any]:
    name = said.take(f"{_ROLLOUT}.name", "vllm")
    if name not in ("vllm", "hf"):
        said.ignore(f"{_ROLLOUT}.name", "planned as vllm, whose costs are of the same kind")
    axes = {
        "tp": said.count(f"{_ROLLOUT}.tensor_model_parallel_size", 2),
        "pp": said.count(f"{_ROLLOUT}.pipeline_model_parallel_size", 1),
    }
    if name == "hf":
        said.ignore(f"{_ROLLOUT}.tensor_model_parallel_size", "engine hf keeps a whole model in each process")
        axes = {}
    return {
        "engine": "hf" if name == "hf" else "vllm",
        "layout": {axis: size for axis, size in axes.items() if size > 1},
        "temperature": said.number(f"{_ROLLOUT}.temperature", 1.0),
        "top_p": said.number(f"{_ROLLOUT}.top_p", 1.0),
        "top_k": max(0, said.count(f"{_ROLLOUT}.top_k", -1)),
    }


def _layout(said: Settings, prefix: str) -> dict[str, Any]:
    """Megatron's sizes, or the sequence cut of FSDP as context parallelism."""
    megatron = said.take(f"{prefix}.strategy") == "megatron" or said.under(f"{prefix}.megatron")
    if not megatron:
        ulysses = said.count(f"{prefix}.ulysses_sequence_parallel_size", 1)
        return {"cp": ulysses} if ulysses > 1 else {}
    sizes = {axis: said.count(f"{prefix}.megatron.{name}", 1) for axis, name in _AXES.items()}
    layout: dict[str, Any] = {axis: size for axis, size in sizes.items() if size > 1}
    if said.flag(f"{prefix}.megatron.sequence_parallel", True) and sizes["tp"] > 1:
        layout["sequence_parallel"] = True
    return layout


def _optim(said: Settings, prefix: str, lr: float, clip: str) -> dict[str, Any]:
    shapes = ("lr_decay_style", "lr_scheduler_type", "warmup_style")
    decay = str(said.first(*(f"{prefix}.{name}" for name in shapes), default="constant"))
    if decay not in ("constant", "linear", "cosine"):
        said.ignore(f"{prefix}.lr_decay_style", "not in this version: constant stands for it")
        decay = "constant"
    warmup = said.count(f"{prefix}.lr_warmup_steps", -1)
    if warmup < 0 and said.number(f"{prefix}.lr_warmup_steps_ratio"):
        said.ignore(f"{prefix}.lr_warmup_steps_ratio", "warm-up is given in updates: optim.warmup_steps")
    rate = said.number(f"{prefix}.lr", lr)
    floor = said.number(f"{prefix}.min_lr") or said.number(f"{prefix}.min_lr_ratio") * rate
    betas = said.take(f"{prefix}.betas", (0.9, 0.999))
    return {
        "lr": rate,
        "min_lr": floor if decay != "constant" and floor else None,
        "warmup_steps": warmup if warmup > 0 else None,
        "decay": decay if decay != "constant" else None,
        "weight_decay": said.number(f"{prefix}.weight_decay", 0.01),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "clip_grad": said.number(f"{prefix}.clip_grad", said.number(clip, 1.0)),
    }


def _lora(said: Settings, model: str) -> dict[str, Any]:
    rank, alpha = said.count(f"{model}.lora_rank"), said.number(f"{model}.lora_alpha", 16.0)
    return {"rank": rank, "alpha": alpha} if rank else {}


def _recompute(said: Settings, prefix: str, model: str) -> str:
    """FSDP recomputes unless told otherwise, Megatron when it is told how."""
    name = f"{prefix}.megatron.override_transformer_config.recompute_granularity"
    granularity = said.take(name)
    megatron = said.take(f"{prefix}.strategy") == "megatron" or said.under(f"{prefix}.megatron")
    whole = said.flag(f"{model}.enable_gradient_checkpointing", not megatron)
    if megatron and granularity in ("selective", "full"):
        return str(granularity)
    return "full" if whole else "none"


def _tokens(
    said: Settings, tokens: str, sequences: str, longest: int, dynamic: bool, default: int
) -> int | None:
    """Tokens of a micro-batch: as such, or as sequences of the greatest length; None where none is said."""
    if dynamic:
        said.ignore(sequences, "micro-batches are counted in tokens")
        return said.count(tokens, default)
    said.ignore(tokens, "micro-batches are counted in sequences")
    count = said.count(sequences)
    return count * longest if count else None
