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
    Ignored,
    Imported,
    Reason,
    Settings,
    placed,
    tidy,
)
from rolemesh.placement.importers.shell import read_script
from rolemesh.placement.importers.verl_algorithm import algorithm_keys, kl_keys, name_of
from rolemesh.placement.importers.verl_keys import KEYS

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_REASONS: tuple[Reason, ...] = (
    (r"_offload$|offload_policy$",
     "what waits in host memory is the planner's choice (pin: ROLE offload=true)", True),
    (r"fsdp|\.strategy$", "Megatron's layouts cut models, with its distributed optimizer, not FSDP", True),
    (r"lora|target_modules|exclude_modules", "adapters are on every linear layer", False),
    (r"gpu_memory_utilization|max_num_|free_cache|enforce_eager|cudagraph|prefill|prefix_caching|max_model_len",
     "the engine's memory and batches are planned from model and lengths", True),
    (r"profiler|\.trace\.", "profiling: a run writes its timeline", True),
    (r"trainer\.(logger|project_name|experiment_name|log_val)", "a run logs into its folder", True),
    (r"checkpoint|resume|ckpt|hdfs", "a checkpoint always holds everything, on a shared disk", True),
    (r"^ray_kwargs|nccl_timeout|ray_wait", "Ray is started by the run, with run.timeout_s", True),
    (r"^config-(name|path|dir)$",
     "a configuration of your own: its settings are not read; import that file as well", False),
    (r"^hydra\.|^(cfg|package|multirun|resolve|info|job)$", "hydra's own", True),
    (r"multi_turn|agent|tool_config|interaction", "several turns and tools: see rollout.agent", False),
    (r"use_remove_padding|balance_batch|use_dynamic_bsz", "always so here", True),
    (r"micro_batch_size$", "deprecated in verl: per GPU or in tokens", True),
    (rf"^{_ROLLOUT}\.log_prob_", "the actor computes them, in its own micro-batches", True),
    (r"recompute_(method|num_layers|modules)", "recomputation is of whole layers or none", True),
    (r"val_kwargs|val_before_train|val_only", "validation is greedy, before and after training", False),
    (r"_target_$", "a Python class of verl", False),
)  # fmt: skip
_SHORT = {"cn": "config-name", "cp": "config-path", "cd": "config-dir", "c": "cfg", "m": "multirun"}
_VERLS_OWN = (
    r"(ppo_trainer|ppo_megatron_trainer)(\.ya?ml)?"  # configurations whose settings are verl's defaults
)
_OURS = re.compile(r"^verl\.(trainer|experimental|recipe)|^recipe\.|(^|/)main_\w+\.py$")


def import_verl(
    text: str, overrides: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Imported:
    """Read verl's configuration; `variables` are those of the shell. Raises ForeignConfigError."""
    values, removed, unset = _read(text, variables or {}, overrides)
    said = Settings({name: _resolved(name, values) for name in values})
    if re.fullmatch(_VERLS_OWN, str(values.get("config-name"))) and "config-path" not in values:
        said.ignore("config-name", "verl's own, whose settings are its defaults", harmless=True)
    algorithm = name_of(said)
    kl = kl_keys(said)
    reward = _reward(said)
    present = {"critic": algorithm == "ppo", "ref": bool(kl), "reward": "model" in reward}
    roles = [r for r in ("actor", "rollout", "critic", "ref", "reward") if present.get(r, True)]
    pools = _pools(said, roles)
    fixed = placed(pools, roles)
    recipe: dict[str, Any] = {"run": _run(said), "cluster": fixed["cluster"], "data": _data(said)}
    recipe["algorithm"] = algorithm_keys(said, algorithm, kl)
    recipe |= _batch(said, algorithm)
    recipe |= _models(said, roles, reward)
    recipe["placement"] = fixed["placement"]
    demands = {role: nodes * per_node for held, nodes, per_node in pools for role in held}
    recipe = tidy(recipe)
    adapters = [(rf"^{_REF}\.", "with adapters the reference is the actor without them", True)]
    ignored = said.ignored([*_absent(present, algorithm), *adapters * ("lora" in recipe["actor"]), *_REASONS])
    mapped, unsaid = said.mapped(KEYS, recipe)
    return Imported(
        recipe,
        {role: demands[role] for role in roles},
        sum(nodes * per_node for _, nodes, per_node in pools),
        (*ignored, *unsaid),
        tuple(mapped),
        (*said.nothing(), *removed),
        unset,
    )


def _absent(present: Mapping[str, bool], algorithm: str) -> Iterator[Reason]:
    """Why the settings of roles that are not there do not count."""
    sections = {"critic": r"^critic\.", "ref": rf"^{_REF}\.", "reward": r"^reward(_model|\.reward_model)\."}
    reasons = {"critic": f"{algorithm} has no critic", "ref": "no KL term, so no reference"}
    for role, pattern in sections.items():
        if not present[role]:
            yield pattern, reasons.get(role, "rewards come from a function"), True


def _read(
    text: str, variables: Mapping[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[Ignored], tuple[str, ...]]:
    """Settings by dotted name from YAML or a command line, those taken out, variables that are not set."""
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        loaded = None
    if isinstance(loaded, Mapping):
        values, removed = _pairs(overrides, dict(_flat(loaded)))
        return values, removed, ()
    line = read_script(text, _OURS, variables)
    values, removed = _pairs([*line.words, *overrides], {})
    if not values:
        raise ForeignConfigError("neither a YAML mapping nor settings such as trainer.nnodes=2")
    engine = str(values.get("model_engine", "")) + str(values.get("config-name", ""))
    if "megatron" in engine:
        values.setdefault(f"{_ACTOR}.strategy", "megatron")
    return values, removed, line.unset


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _pairs(words: Sequence[str], start: Mapping[str, Any]) -> tuple[dict[str, Any], list[Ignored]]:
    """Hydra's overrides in order over `start`: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, and its own flags."""
    values, removed = dict(start), list[Ignored]()
    option = ""
    for word in words:
        name, equals, text = word.partition("=")
        if option and not word.startswith("-") and not equals:
            values[option] = word
            option = ""
        elif name.startswith("-"):
            flag = name.lstrip("-")
            flag = _SHORT.get(flag, flag)
            option = "" if equals else flag
            values[flag] = text if equals else True
        elif name.startswith("~"):
            gone = name[1:]
            values.pop(gone, None)
            reason = "taken out of verl's configuration; here its default counts"
            removed.append(Ignored(name, text or None, reason))
        elif equals:
            values |= _flat({name.lstrip("+"): _value(text)})
        else:
            raise ForeignConfigError(
                f"{word!r} is no setting such as trainer.nnodes=2: what is it for? (A script has one "
                "command with `-m verl.trainer.main_ppo` or the like, or settings alone)"
            )
    return values, removed


def _value(text: str) -> Any:
    """A value in hydra's words: YAML, but `{a:1}` needs no blank."""
    if text.startswith("{"):
        text = re.sub(r"(?<=[{,\s])(\w+):(?=\S)", r"\1: ", text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
        said.ignore("trainer.total_epochs", "trainer.total_training_steps says when to stop", harmless=True)
    if isinstance(folder, str) and "$" in folder:
        said.ignore("trainer.default_local_dir", "holds a variable: give run.dir", harmless=True)
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


def _batch(said: Settings, algorithm: str) -> dict[str, Any]:
    prompts, samples = said.count("data.train_batch_size", 1024), said.count(f"{_ROLLOUT}.n", 1)
    mini = said.count(f"{_ACTOR}.ppo_mini_batch_size", 256)  # verl counts prompts here
    if algorithm == "ppo" and said.take("critic.ppo_mini_batch_size", mini) != mini:
        said.ignore("critic.ppo_mini_batch_size", "actor and critic learn from the same mini-batches")
    if algorithm == "ppo" and said.take("critic.ppo_epochs", 1) != said.count(f"{_ACTOR}.ppo_epochs", 1):
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
    if "ref" in roles and not models["actor"]["lora"]:
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
        said.ignore(f"{_ROLLOUT}.name", "planned as vllm, whose costs are of the same kind", harmless=True)
    tp, pp = (f"{_ROLLOUT}.{_AXES[axis]}" for axis in ("tp", "pp"))
    axes = {"tp": said.count(tp, 2)} | ({"pp": said.count(pp, 1)} if pp in said else {})
    if name == "hf":
        for key in (tp, pp):
            said.ignore(key, "engine hf keeps a whole model in each process", harmless=True)
        axes = {}
    return {
        "engine": "hf" if name == "hf" else "vllm",
        "layout": axes,
        "temperature": said.number(f"{_ROLLOUT}.temperature", 1.0),
        "top_p": said.number(f"{_ROLLOUT}.top_p", 1.0),
        "top_k": max(0, said.count(f"{_ROLLOUT}.top_k", -1)),
    }


def _layout(said: Settings, prefix: str) -> dict[str, Any]:
    """Megatron's sizes, or the sequence cut of FSDP as context parallelism."""
    megatron = said.take(f"{prefix}.strategy") == "megatron" or said.under(f"{prefix}.megatron")
    if not megatron:
        name = f"{prefix}.ulysses_sequence_parallel_size"
        ulysses = said.count(name, 1)
        return {"cp": ulysses} if ulysses > 1 or name in said else {}
    names = {axis: f"{prefix}.megatron.{name}" for axis, name in _AXES.items()}
    layout: dict[str, Any] = {
        axis: size for axis, name in names.items() if (size := said.count(name, 1)) > 1 or name in said
    }
    if (cut := f"{prefix}.megatron.sequence_parallel") in said or layout.get("tp", 1) > 1:
        layout["sequence_parallel"] = said.flag(cut, True) and layout.get("tp", 1) > 1
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
        "warmup_steps": warmup if warmup >= 0 else None,
        "decay": decay,
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
        said.ignore(sequences, "micro-batches are counted in tokens", harmless=True)
        return said.count(tokens, default)
    said.ignore(tokens, "micro-batches are counted in sequences", harmless=True)
    count = said.count(sequences)
    return count * longest if count else None
