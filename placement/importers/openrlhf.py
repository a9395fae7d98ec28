"""OpenRLHF's command line (or the shell script that holds it) as a recipe.

Flags that are left out have OpenRLHF's defaults. Each group of models takes `*_num_nodes` x
`*_num_gpus_per_node` devices and the engines `vllm_num_engines` x `vllm_tensor_parallel_size`, unless a
`--colocate_*` flag makes them share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rolemesh.placement.importers.openrlhf_keys import KEYS
from rolemesh.placement.importers.settings import (
    ForeignConfigError,
    Imported,
    Reason,
    Settings,
    placed,
    tidy,
)
from rolemesh.placement.importers.shell import read_script

_GROUPS = ("actor", "ref", "critic", "reward")
ESTIMATORS: Mapping[str, str] = {  # ours for `--advantage_estimator`
    "gae": "ppo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",  # without the standard deviation; its sum is a mean over tokens in OpenRLHF
}
_LOSSES = {"ppo": "vanilla", "gspo": "gspo"}
_OURS = re.compile(r"train_ppo_ray")
_REASONS: tuple[Reason, ...] = (
    (r"^(vllm_|enforce_eager|enable_prefix_caching|rollout_tasks|max_len$)",
     "the engine is planned from model and lengths", True),
    (r"sleep|offload", "what waits in host memory is the planner's choice (pin: ROLE offload=true)", True),
    (r"lora|target_modules|load_in_4bit", "adapters are on every layer, without dropout", False),
    (r"wandb|tensorboard|logging|perf$", "a run logs into its folder", True),
    (r"ckpt|checkpoint$|save_", "a checkpoint holds everything and converts to a Hugging Face folder", True),
    (r"packing_samples|attn_implementation|flash_attn", "always so here", True),
    (r"zpg|overlap_comm|grad_accum|deepcompile|ds_|deepspeed", "DeepSpeed's own: here Megatron trains", True),
    (r"eval_|^label_key|template", "validation is greedy, prompts follow the tokenizer's template", False),
)  # fmt: skip


def import_openrlhf(
    text: str, overrides: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Imported:
    """Read OpenRLHF's flags; `overrides` are further ones (`zero_stage=3`), `variables` those of the shell.

    Raises ForeignConfigError.
    """
    line = read_script(text, _OURS, variables)
    values = _flags(line.words)
    for item in overrides:
        name, _, value = item.lstrip("-").partition("=")
        values[name] = yaml.safe_load(value) if value else True
    said = Settings(values)
    estimator = str(said.take("advantage_estimator", "gae"))
    if estimator not in ESTIMATORS:
        raise ForeignConfigError(
            f"--advantage_estimator is {estimator!r}, which is not in this version (there are: "
            f"{', '.join(ESTIMATORS)}): give another one, such as advantage_estimator=group_norm"
        )
    algorithm = ESTIMATORS[estimator]
    remote = said.first("remote_rm_url", "agent_func_path")
    present = {
        "ref": said.number("init_kl_coef", 0.01) > 0,
        "critic": algorithm == "ppo",
        "reward": remote is None,
    }
    roles = [r for r in ("actor", "rollout", "critic", "ref", "reward") if present.get(r, True)]
    engines, tp = said.count("vllm_num_engines"), said.count("vllm_tensor_parallel_size", 1)
    pools = _pools(said, roles, engines, tp)
    fixed = placed(pools, roles)
    recipe: dict[str, Any] = {"run": _run(said), "cluster": fixed["cluster"], "data": _data(said)}
    recipe["algorithm"] = _algorithm(said, algorithm, estimator, present["ref"])
    recipe |= _batch(said)
    recipe |= _models(said, roles, remote)
    recipe["rollout"] |= {
        "engine": "vllm" if engines else "hf",
        "layout": {"tp": tp} if engines and (tp > 1 or "vllm_tensor_parallel_size" in said) else {},
    }
    recipe["placement"] = fixed["placement"]
    demands = {role: nodes * per_node for held, nodes, per_node in pools for role in held}
    if engines and said.take("async_train"):
        said.ignore("async_train", "generation one step ahead is not in this version")
    absent = [(rf"^{role}_", f"this run has no {role}", True) for role, there in present.items() if not there]
    recipe = tidy(recipe)
    ignored = said.ignored([*absent, *_REASONS])
    mapped, unsaid = said.mapped(KEYS, recipe)
    return Imported(
        recipe,
        {role: demands[role] for role in roles},
        sum(nodes * per_node for _, nodes, per_node in pools),
        (*ignored, *unsaid),
        tuple(mapped),
        said.nothing(),
        line.unset,
    )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Flags by name; several values are a list, none is true."""
    flags: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [_value(value)] if equals else []
        elif name:
            flags[name].append(_value(word))
        else:
            raise ForeignConfigError(
                f"{word!r} stands before the first flag: what is it for? (A script has one command with "
                "`-m openrlhf.cli.train_ppo_ray`, or flags alone)"
            )
    if not flags:
        raise ForeignConfigError("no flags such as --actor_num_nodes 1")
    return {name: True if not got else got[0] if len(got) == 1 else got for name, got in flags.items()}


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(text) if isinstance(value, str) else value  # YAML reads 1e-6 as text
    except (yaml.YAMLError, ValueError):
        return text


def _pools(said: Settings, roles: Sequence[str], engines: int, tp: int) -> list[tuple[list[str], int, int]]:
    """OpenRLHF's placement groups as (roles, nodes, devices per node)."""
    size = {
        group: (said.count(f"{group}_num_nodes", 1), said.count(f"{group}_num_gpus_per_node", 8))
        for group in _GROUPS
        if group in roles
    }
    everything, asynchronous = said.flag("colocate_all_models"), said.flag("async_train")
    with_ref, with_critic = said.flag("colocate_actor_ref"), said.flag("colocate_critic_reward")
    shared = ["actor"]
    if everything or with_ref:
        shared += [_same(size, "actor", "ref")] if "ref" in size else []
    aside = ["critic"] if "critic" in size else []
    if aside and with_critic:  # a group of its own, also beside --colocate_all_models
        aside += [_same(size, "critic", "reward")] if "reward" in size else []
    elif everything:
        shared, aside = [*shared, *aside], []
    if everything and "reward" in size and "reward" not in aside:
        shared.append("reward")
    if not engines:
        shared.append("rollout")
    elif everything and not asynchronous:
        devices = size["actor"][0] * size["actor"][1]
        if devices != engines * tp:
            raise ForeignConfigError(
                f"--colocate_all_models needs as many devices for the engines as for the actor: "
                f"{engines} engines x TP {tp} = {engines * tp}, actor {devices}"
            )
        shared.append("rollout")
    groups = [shared, *([aside] if aside else [])]
    taken = {role for group in groups for role in group}
    groups += [[group] for group in size if group not in taken]
    pools = [(group, *size[group[0]]) for group in groups]
    if "rollout" not in shared:
        per_node = max(per_node for _, _, per_node in pools)
        pools.append((["rollout"], *_whole_nodes(engines * tp, max(per_node, tp))))
    return pools


def _same(size: dict[str, tuple[int, int]], one: str, other: str) -> str:
    if size[one] != size[other]:
        raise ForeignConfigError(
            f"{one} and {other} share devices, but {one} has {size[one][0]} nodes x {size[one][1]} and "
            f"{other} {size[other][0]} x {size[other][1]}: they must be equal"
        )
    return other


def _whole_nodes(devices: int, per_node: int) -> tuple[int, int]:
    """Devices as equal nodes of at most `per_node`."""
    nodes = next(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= per_node)
    return nodes, devices // nodes


def _run(said: Settings) -> dict[str, Any]:
    save = said.count("save_steps", -1)
    return {
        "dir": said.take("save_path"),
        "epochs": said.count("num_episodes", 1),
        "seed": said.count("seed", 42),
        "validate_every": max(0, said.count("eval_steps", -1)) if "eval_dataset" in said else None,
        "save_every": max(0, save),
        "keep_last": said.take("max_ckpt_num") if save > 0 else None,
        "resume": "auto" if said.flag("load_checkpoint") else None,
    }


def _data(said: Settings) -> dict[str, Any]:
    return {
        "train_files": said.take("prompt_data", "train.jsonl"),
        "val_files": said.take("eval_dataset"),
        "prompt_key": said.take("input_key", "input"),
        "max_prompt_tokens": said.count("prompt_max_len", 1024),
    }


def _algorithm(said: Settings, name: str, estimator: str, has_ref: bool) -> dict[str, Any]:
    both, loss = said.number("eps_clip", 0.2), _loss(said)
    low, high = said.take("eps_clip_low_high", (both, both))
    refilled = said.flag("dynamic_filtering")
    said.ignore("dynamic_filtering_reward_range", "here a prompt counts if its samples have unequal scores")
    if refilled and name not in ("grpo", "rloo"):
        said.ignore("dynamic_filtering", f"{name} does not refill a batch")
        refilled = False
    keys: dict[str, Any] = {"name": _name(name, loss, refilled)}
    keys["loss"] = loss if loss not in ("vanilla", keys["name"]) else None
    if name in ("ppo", "reinforce_plus_plus"):
        keys["gamma"] = said.number("gamma", 1.0)
    if name == "ppo":
        keys |= {"lam": said.number("lambd", 1.0), "value_clip": said.number("value_clip", 0.5)}
    unused = [
        key for key, ours in (("gamma", "gamma"), ("lambd", "lam"), ("value_clip",) * 2) if ours not in keys
    ]
    for key in unused:
        said.ignore(key, f"{name} does not read it", harmless=True)
    if name == "grpo":
        keys["norm_adv_by_std"] = estimator == "group_norm" and not said.flag("no_advantage_std_norm")
    else:
        said.ignore(
            "no_advantage_std_norm", f"{name} divides by no group's standard deviation", harmless=True
        )
    keys["kl"] = _kl(said) if has_ref else {"in": "none"}
    keys |= {"clip_low": float(low), "clip_high": float(high)}
    if loss == "vanilla":
        keys["dual_clip"] = said.take("dual_clip")
    keys["entropy_coef"] = said.number("entropy_loss_coef", 0.0)
    if refilled:
        keys |= {"dynamic_sampling": {"on": True}, "overlong": {"buffer_tokens": 0}}
    if said.flag("enable_vllm_is_correction"):
        most = said.number("vllm_is_truncated_threshold", 2.0)
        keys["rollout_correction"] = {"weights": "token", "max_weight": most}
    return keys


def _name(name: str, loss: str, refilled: bool) -> str:
    """Ours for an estimator with this loss: grpo's variants have names of their own."""
    if name != "grpo":
        return name
    return loss if loss != "vanilla" else "dapo" if refilled else name


def _loss(said: Settings) -> str:
    given = str(said.take("policy_loss_type", "ppo"))
    if given not in _LOSSES:
        said.ignore(
            "policy_loss_type", f"not in this version: ppo stands for it (there are: {', '.join(_LOSSES)})"
        )
    return _LOSSES.get(given, "vanilla")


def _kl(said: Settings) -> dict[str, Any]:
    in_loss = said.flag("use_kl_loss")
    kl = {
        "in": "loss" if in_loss else "reward",
        "kind": said.take("kl_estimator", "k1"),
        "coef": said.number("init_kl_coef", 0.01),
    }
    if in_loss or "kl_target" not in said:
        for name in ("kl_target", "kl_horizon"):
            said.ignore(name, "the weight of the KL is fixed", harmless=True)
        return kl
    return kl | {"target": said.number("kl_target"), "horizon": said.number("kl_horizon", 10000)}


def _batch(said: Settings) -> dict[str, Any]:
    prompts, samples = said.count("rollout_batch_size", 1024), said.count("n_samples_per_prompt", 1)
    warmup = said.count("freezing_actor_steps", -1)
    return {
        "batch": {
            "prompts": prompts,
            "samples_per_prompt": samples,
            "mini_batch_samples": min(said.count("train_batch_size", 128), prompts * samples),
            "epochs": said.count("max_epochs", 1),
            "critic_warmup": warmup
            if warmup > 0 and said.take("advantage_estimator", "gae") == "gae"
            else None,
        },
        "lengths": {"max_response_tokens": said.count("generate_max_len", 1024)},
    }


def _models(said: Settings, roles: Sequence[str], remote: str | None) -> dict[str, Any]:
    longest = said.count("prompt_max_len", 1024) + said.count("generate_max_len", 1024)
    trained = _tokens(said, "train_max_tokens_per_gpu", "micro_train_batch_size", longest, 4)
    scored = _tokens(said, "rollout_max_tokens_per_gpu", "micro_rollout_batch_size", longest, 8)
    layout = {"tp": said.count("ds_tensor_parallel_size", 1), "cp": said.count("ring_attn_size", 1)}
    said_axes = {"tp": "ds_tensor_parallel_size", "cp": "ring_attn_size"}
    layout = {axis: size for axis, size in layout.items() if size > 1 or said_axes[axis] in said}
    dtype = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.get(
        str(said.take("param_dtype", "bf16"))
    )
    said.take("bf16")
    said.ignore("zero_stage", _zero(said.count("zero_stage", 2)), harmless=True)
    said.ignore("lr_warmup_ratio", "warm-up is given in updates: optim.warmup_steps")
    rank, alpha = said.count("lora_rank"), said.number("lora_alpha", 16.0)
    both = {
        "recompute": "full" if said.flag("gradient_checkpointing") else None,
        "layout": layout,
        "dtype": dtype if dtype != "float16" else None,
        "micro_batch_tokens": trained,
        "lora": {"rank": rank, "alpha": alpha} if rank else {},
    }
    actor, scorer = said.take("pretrain", "model"), said.take("reward_pretrain")
    models: dict[str, Any] = {
        "actor": {"path": actor, "optim": _optim(said, "actor_learning_rate", 1e-6), **both},
        "rollout": {"temperature": said.number("temperature", 1.0), "top_p": said.number("top_p", 1.0)},
    }
    scoring = {"layout": layout, "micro_batch_tokens": scored}
    if "critic" in roles:
        given = said.take("critic_pretrain")
        path = given or (str(scorer).split(",")[0] if scorer and remote is None else actor)
        fresh = True if path == actor else None  # the actor's checkpoint has no value head
        optim = _optim(said, "critic_learning_rate", 9e-6)
        models["critic"] = {"path": path, "new_head": fresh, "optim": optim, **both}
    if "ref" in roles:
        models["ref"] = {"kind": "model" if rank else None, **scoring}  # not the actor without its adapters
    models["reward"] = _reward(said, remote, scorer, scoring)
    return models


def _reward(said: Settings, remote: str | None, scorer: Any, scoring: dict[str, Any]) -> dict[str, Any]:
    if remote is None:
        if scorer is None:
            raise ForeignConfigError("no rewards: give --reward_pretrain or --remote_rm_url")
        return {"path": str(scorer).split(",")[0], **scoring}
    said.ignore("reward_pretrain", "rewards come from --remote_rm_url", harmless=True)
    if str(remote).endswith(".py") and "agent_func_path" not in said:
        return {"path": f"{remote}:reward_func"}
    if "agent_func_path" in said:
        reason = "not in this version: call it from a function, reward.py:compute_score"
        said.ignore("agent_func_path", reason)
        return {"path": "reward.py:compute_score"}
    return {
        "kind": "remote",
        "protocol": "openrlhf",
        "endpoints": [url.strip() for url in str(remote).split(",")],
        "on_failure": "raise",
    }


def _optim(said: Settings, name: str, default: float) -> dict[str, Any]:
    rate, betas = said.number(name, default), said.take("adam_betas", (0.9, 0.95))
    scheduler = str(said.take("lr_scheduler", "cosine_with_min_lr"))
    decay = next((kind for kind in ("cosine", "linear", "constant") if scheduler.startswith(kind)), None)
    if decay is None:
        said.ignore("lr_scheduler", "not in this version: constant stands for it")
    return {
        "lr": rate,
        "min_lr": float(f"{rate / 10:.6g}") if scheduler == "cosine_with_min_lr" else None,
        "decay": decay or "constant",
        "weight_decay": said.number("l2", 0.0),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "clip_grad": said.number("max_norm", 1.0),
    }


def _tokens(said: Settings, tokens: str, sequences: str, longest: int, default: int) -> int:
    """Tokens of a micro-batch: as such with dynamic batches, else sequences of the greatest length."""
    if said.flag("use_dynamic_batch"):
        said.ignore(sequences, "micro-batches are counted in tokens", harmless=True)
        return said.count(tokens, said.count("train_max_tokens_per_gpu", 16192))
    said.ignore(tokens, "micro-batches are counted in sequences", harmless=True)
    return said.count(sequences, default) * longest


def _zero(stage: int) -> str:
    if stage >= 3:
        return "weights are cut by tp and pp here, not over all devices"
    return "Megatron's distributed optimizer shares the optimizer's state in the same way"
