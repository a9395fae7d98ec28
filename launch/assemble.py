"""A recipe's numbers as the values that workers and trainer take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from rolemesh.engine.algorithms import AdaptiveKLController, Correction, FixedKLController, SoftOverlong
from rolemesh.engine.checkpoint.saver import TrainedRole
from rolemesh.engine.partial import PartialSpec
from rolemesh.engine.refill import RefillSpec
from rolemesh.engine.remote.http import Limits
from rolemesh.engine.rewards import build
from rolemesh.engine.rewards.judge_answer import Scale
from rolemesh.engine.rewards.judge_forms import Criterion, Scores
from rolemesh.engine.rewards.judge_pairs import Pairwise
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.agent import AgentSpec
from rolemesh.engine.rollout.vllm import EngineSpec, VLLMSpec
from rolemesh.engine.trainer import TrainerSpec
from rolemesh.engine.workers.actor import PolicyLoss
from rolemesh.engine.workers.advantage import AdvantageSpec
from rolemesh.engine.workers.critic import ValueLoss
from rolemesh.engine.workers.judge import JudgeSpec
from rolemesh.engine.workers.megatron import RoleSpec
from rolemesh.engine.workers.remote_reference import RemoteRefSpec
from rolemesh.engine.workers.rollout import RolloutSpec
from rolemesh.engine.workers.vllm_rollout import VLLMRolloutSpec
from rolemesh.launch.arithmetic import updates
from rolemesh.launch.reward_keys import Judge, Reward
from rolemesh.launch.reward_keys import Scorer as ScorerKeys
from rolemesh.launch.roles import Actor, Critic, Lora, Optim, Ref
from rolemesh.launch.schema import Recipe
from rolemesh.launch.tokens import token_of
from rolemesh.parallel.lora import LoraConfig
from rolemesh.parallel.optim import OptimConfig
from rolemesh.placement.model import ModelShape
from rolemesh.placement.plan import PlacementPlan


def trained_roles(recipe: Recipe) -> dict[str, TrainedRole]:
    """The roles that checkpoints hold."""
    sections: dict[str, Actor | Critic] = {"actor": recipe.actor}
    if recipe.has_critic:
        sections["critic"] = recipe.critic
    heads = {"actor": "lm", "critic": "value"}
    return {
        role: TrainedRole(str(section.path), heads[role], section.dtype) for role, section in sections.items()
    }


def role_spec(recipe: Recipe, role: str, steps: int) -> RoleSpec:
    """What the Megatron worker of `role` (actor, critic, ref, reward) loads and how it runs."""
    section: Actor | Critic | Ref | Reward = getattr(recipe, role)
    optim = None
    if isinstance(section, Actor | Critic):
        trained_steps = steps - recipe.batch.critic_warmup if role == "actor" else steps
        optim = optim_config(section.optim, updates(recipe, trained_steps))
    return RoleSpec(
        path=str(section.path),
        head="lm" if role in ("actor", "ref") else "value",
        dtype=section.dtype,
        optim=optim,
        micro_batch_tokens=section.micro_batch_tokens or recipe.batch.micro_batch_tokens,
        new_head=isinstance(section, Critic) and section.new_head,
        recompute=section.recompute if isinstance(section, Actor | Critic) else "none",
        router_loss=section.router_loss if isinstance(section, Actor) else 0.0,
        offload=section.offload,
        lora=_lora(section.lora) if isinstance(section, Actor | Critic) else None,
        temperature=recipe.rollout.temperature,
        random_weights=recipe.smoke,
    )


def _lora(keys: Lora) -> LoraConfig | None:
    return LoraConfig(keys.rank, keys.alpha) if keys.rank else None


def optim_config(optim: Optim, total_steps: int) -> OptimConfig:
    """The optimizer of a trained role whose schedule ends after `total_steps` updates."""
    return OptimConfig(
        lr=optim.lr,
        min_lr=optim.min_lr if optim.decay != "constant" else 0.0,
        schedule=optim.decay,
        warmup_steps=optim.warmup_steps,
        total_steps=total_steps,
        weight_decay=optim.weight_decay,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        clip_grad=optim.clip_grad or None,
    )


def policy_loss(recipe: Recipe) -> PolicyLoss:
    """The actor's objective."""
    algorithm = recipe.algorithm
    return PolicyLoss(
        name=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=algorithm.kl.coef if algorithm.kl.in_ == "loss" else 0.0,
        kl_kind=algorithm.kl.kind,
        loss_agg=algorithm.loss_agg,
        norm_tokens=algorithm.norm_tokens,
        epochs=recipe.batch.epochs,
        end_ids=_left_out_without(recipe),
        file=algorithm.file,
    )


def value_loss(recipe: Recipe) -> ValueLoss:
    """The critic's objective."""
    algorithm = recipe.algorithm
    return ValueLoss(
        value_clip=algorithm.value_clip,
        loss_agg=algorithm.loss_agg,
        norm_tokens=algorithm.norm_tokens,
        epochs=recipe.batch.epochs,
        end_ids=_left_out_without(recipe),
    )


def rollout_spec(recipe: Recipe) -> RolloutSpec:
    """The built-in engine's model and how it samples."""
    return RolloutSpec(
        recipe.actor.path,
        recipe.actor.dtype,
        recipe.rollout.max_params,
        sampling_options(recipe),
        agent_spec(recipe),
    )


def agent_spec(recipe: Recipe) -> AgentSpec | None:
    """Who answers the model's turns."""
    rollout = recipe.rollout
    if rollout.agent is None:
        return None
    return AgentSpec(rollout.agent, recipe.actor.path, rollout.agent_turns, rollout.agent_timeout_s)


def vllm_spec(recipe: Recipe, plan: PlacementPlan) -> VLLMRolloutSpec:
    """vLLM's engines; where other roles share their devices, they sleep between their turns."""
    rollout, pool = recipe.rollout, plan.pool_of("rollout")
    engine = EngineSpec(
        path=recipe.actor.path,
        dtype=recipe.actor.dtype,
        sampling=sampling_options(recipe),
        max_tokens=recipe.data.max_prompt_tokens + recipe.lengths.max_response_tokens,
        tp=plan.layout_of("rollout").tp,
        device=pool.device_kind,
        max_seqs=rollout.max_seqs,
        kv_tokens=rollout.max_batch_tokens if rollout.memory_share is None else None,
        memory_share=rollout.memory_share or EngineSpec.memory_share,
        eager=rollout.eager,
        sleeps=len(pool.roles) > 1,
        partial=rollout.partial,
    )
    return VLLMRolloutSpec(engine, rollout.engine_restarts, agent_spec(recipe))


def sampling_options(recipe: Recipe) -> SamplingOptions:
    """How responses are drawn; reads the actor's tokenizer for end and padding."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.actor.path, trust_remote_code=False)
    rollout = recipe.rollout
    return SamplingOptions(
        max_response_tokens=recipe.lengths.max_response_tokens,
        eos_ids=() if recipe.smoke else end_tokens(recipe.actor.path, tokenizer.eos_token_id),
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_batch_tokens=rollout.max_batch_tokens,
        seed=recipe.run.seed,
    )


def end_tokens(path: str, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a response: the folder's generation settings' and config's, and the tokenizer's.

    Raises ValueError when there is none: every response would be as long as allowed.
    """
    found = {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found |= set(ids) if isinstance(ids, list) else {ids}
    if not (known := sorted(i for i in found if i is not None)):
        raise ValueError(f"{path} names no end token (eos_token_id): no response could end")
    return tuple(known)


def advantage_spec(recipe: Recipe) -> AdvantageSpec:
    """How advantages are computed."""
    algorithm = recipe.algorithm
    return AdvantageSpec(
        estimator=algorithm.estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        kl_kind=algorithm.kl.kind if algorithm.kl.in_ == "reward" else None,
        norm_adv_by_std=algorithm.norm_adv_by_std,
        overlong=_soft_overlong(recipe),
        correction=_correction(recipe),
        end_ids=_left_out_without(recipe),
        file=algorithm.file,
    )


def _soft_overlong(recipe: Recipe) -> SoftOverlong | None:
    overlong = recipe.algorithm.overlong
    if not overlong.buffer_tokens:
        return None
    return SoftOverlong(recipe.lengths.max_response_tokens, overlong.buffer_tokens, overlong.penalty)


def _correction(recipe: Recipe) -> Correction | None:
    keys = recipe.algorithm.rollout_correction
    mask, reject = ((b[0], b[1]) if b else None for b in (keys.mask, keys.reject))
    correction = Correction(keys.weights or "none", keys.max_weight, mask, reject, keys.reject_by)
    return None if correction.is_off else correction


def _left_out_without(recipe: Recipe) -> tuple[int, ...] | None:
    """The end tokens without which a response of the longest length is left out; None: none is."""
    if not recipe.algorithm.overlong.leave_out:
        return None
    tokenizer = AutoTokenizer.from_pretrained(recipe.actor.path, trust_remote_code=False)
    return end_tokens(recipe.actor.path, tokenizer.eos_token_id)


def kl_controller(recipe: Recipe) -> FixedKLController | AdaptiveKLController:
    """The weight of the KL penalty in the reward."""
    kl = recipe.algorithm.kl
    if kl.target is not None and kl.horizon is not None:
        return AdaptiveKLController(kl.coef, kl.target, kl.horizon)
    return FixedKLController(kl.coef)


def trainer_spec(recipe: Recipe, steps: int, order: Mapping[str, Sequence[str]] | None = None) -> TrainerSpec:
    """The loop around the step; `order` is the plan's."""
    apart = recipe.has_ref and recipe.ref.kind != "actor"
    return TrainerSpec(
        steps=steps,
        samples_per_prompt=recipe.batch.samples_per_prompt,
        mini_batch_samples=recipe.batch.mini_batch,
        advantage=advantage_spec(recipe),
        validate_every=recipe.run.validate_every,
        save_every=recipe.run.save_every,
        best_metric=recipe.run.best_metric if recipe.run.keep_best else None,
        critic_warmup=recipe.batch.critic_warmup,
        overlap=recipe.schedule.overlap,
        staleness=recipe.schedule.staleness,
        refill=_refill(recipe),
        partial=_partial(recipe),
        expect_initial_kl=recipe.ref.expect_initial_kl if apart else None,
        order=order or {},
        export=not recipe.smoke,
    )


def _partial(recipe: Recipe) -> PartialSpec | None:
    rollout = recipe.rollout
    return PartialSpec(rollout.partial_share, recipe.lengths.max_response_tokens) if rollout.partial else None


def _refill(recipe: Recipe) -> RefillSpec | None:
    keys = recipe.algorithm.dynamic_sampling
    return RefillSpec(recipe.batch.prompts, keys.tries, keys.at_limit) if keys.on else None


def scorer(recipe: Recipe) -> build.Scorer:
    """What scores text (every kind of reward but model). Raises RecipeError for a token that is not there."""
    reward = recipe.reward
    if reward.kind != "composite":
        return _scorer(recipe, "reward", reward, str(reward.kind))
    return build.Composite(
        {
            name: (part.weight, _scorer(recipe, f"reward.parts.{name}", part, str(part.kind)))
            for name, part in reward.parts.items()
        }
    )


def _scorer(
    recipe: Recipe, section: str, keys: ScorerKeys, kind: str
) -> build.Function | build.Remote | build.Judge:
    special: build.Special = "strip" if keys.strips_special_tokens else "keep"
    match kind:
        case "function":
            return build.Function(str(keys.path), keys.limit_s, keys.workers, special)
        case "remote":
            service = _service(recipe, section, keys)
            text = keys.text
            return build.Remote(
                service,
                keys.protocol,
                keys.score_key,
                text.template,
                special,
                text.tokenizer,
                keys.send_ids,
            )
        case "judge":
            return _judge(_service(recipe, section, keys), str(keys.model), keys.judge, special)
    raise ValueError(f"{section}.kind {kind} scores no text")


def _judge(service: build.Service, model: str, judge: Judge, special: build.Special) -> build.Judge:
    if judge.form == "pairwise":
        form: Scores | Pairwise = Pairwise(judge.against, judge.opponents, judge.reasoning)
    else:
        criteria = {name: Criterion(one.weight, one.text) for name, one in judge.criteria.items()}
        low, high = judge.scale
        form = Scores(Scale(low, high, judge.step, judge.clamp), criteria, judge.reasoning)
    return build.Judge(
        service,
        model,
        form,
        template=judge.template,
        system=judge.system,
        sampling={"temperature": judge.temperature, "max_tokens": judge.max_tokens},
        constraint=judge.constraint,
        retries=judge.retries,
        cache_dir=judge.cache_dir,
        special_tokens=special,
    )


def judge_spec(recipe: Recipe, plan: PlacementPlan) -> JudgeSpec:
    """A judge that the plan places; where other roles share its devices, its engines sleep between turns."""
    reward, pool, layout = recipe.reward, plan.pool_of("reward"), plan.layout_of("reward")
    config = json.loads((Path(str(reward.path)) / "config.json").read_text())
    positions = ModelShape.from_config(config).max_positions
    engine = VLLMSpec(
        path=str(reward.path),
        dtype=reward.dtype,
        max_tokens=min(positions, reward.max_batch_tokens),
        tp=layout.tp,
        device=pool.device_kind,
        max_seqs=-(-reward.limits.in_flight // layout.dp),
        kv_tokens=reward.max_batch_tokens,
        sleeps=len(pool.roles) > 1,
    )
    judge = scorer(recipe)
    assert isinstance(judge, build.Judge)
    return JudgeSpec(engine, judge, recipe.actor.path)


def _service(recipe: Recipe, section: str, keys: ScorerKeys) -> build.Service:
    policy = keys.on_failure
    assert policy is not None
    assert policy.do is not None  # `rules` refuses the recipe otherwise
    return build.Service(
        section,
        keys.endpoints,
        Limits(**vars(keys.limits)),
        policy.do,
        policy.value,
        policy.stop_above,
        window=recipe.batch.samples,
        token=token_of(section, keys),
    )


def remote_ref_spec(recipe: Recipe) -> RemoteRefSpec:
    """Where the reference is (ref.kind remote). Raises RecipeError for a token that is not there."""
    ref = recipe.ref
    return RemoteRefSpec(
        ref.endpoints,
        Limits(**vars(ref.limits)),
        actor=recipe.actor.path,
        temperature=recipe.rollout.temperature,
        longest_tokens=recipe.data.max_prompt_tokens + recipe.lengths.max_response_tokens,
        token=token_of("ref", ref),
    )
