"""verl's configurations as recipes: devices as verl takes them, settings in our words, the rest listed."""

from pathlib import Path

import pytest

from rolemesh.placement.importers import ForeignConfigError, import_config

EXAMPLES = Path(__file__).parents[3] / "examples" / "imports"

MEGATRON_PPO = (EXAMPLES / "verl_ppo.yml").read_text()

FSDP_GRPO = r"""
set -x
MODEL=Qwen/Qwen2.5-7B-Instruct
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files="['/data/gsm8k/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    +actor_rollout_ref.rollout.my_new_key=3 \
    custom_reward_function.path=rewards/gsm8k.py \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=15 "$@"
"""


def test_ppo_on_two_nodes_with_megatron_is_one_pool_of_16_devices():
    found = import_config("verl", MEGATRON_PPO)
    assert found.n_devices == 16
    assert found.demands == dict.fromkeys(("actor", "rollout", "critic", "ref", "reward"), 16)
    assert found.recipe["cluster"] == {"nodes": 2, "per_node": 8}
    assert found.recipe["placement"] == {"strategy": "colocate"}


def test_ppo_settings_are_said_in_our_words():
    recipe = import_config("verl", MEGATRON_PPO).recipe
    assert recipe["algorithm"] == {
        "name": "ppo", "gamma": 1.0, "lam": 0.95, "value_clip": 0.4,
        "kl": {"in": "reward", "kind": "k1", "coef": 0.002, "target": 0.1, "horizon": 20000.0},
        "clip_low": 0.15, "clip_high": 0.15, "dual_clip": 3.0, "entropy_coef": 0.001,
        "loss_agg": "token-mean",
    }  # fmt: skip
    assert recipe["batch"] == {
        "prompts": 512, "samples_per_prompt": 1, "mini_batch_samples": 128, "epochs": 2, "critic_warmup": 0,
    }  # fmt: skip
    assert recipe["lengths"] == {"max_response_tokens": 2048}
    assert recipe["data"]["max_prompt_tokens"] == 1024
    assert recipe["data"]["overlong"] == "truncate"
    actor, critic = recipe["actor"], recipe["critic"]
    assert actor["layout"] == {"tp": 8, "pp": 2, "sequence_parallel": True}
    assert (actor["recompute"], actor["micro_batch_tokens"]) == ("full", 2 * 3072)
    assert (actor["optim"]["lr"], critic["optim"]["lr"]) == (1e-6, 1e-5)
    assert critic["layout"] == {"tp": 4, "pp": 4, "sequence_parallel": True}
    assert recipe["ref"] == {
        "layout": {"tp": 8, "pp": 2, "sequence_parallel": True}, "micro_batch_tokens": 4 * 3072,
    }  # fmt: skip
    assert recipe["reward"]["path"] == "/models/llama-3-70b-rm"
    assert recipe["rollout"] == {
        "engine": "vllm", "layout": {"tp": 8}, "temperature": 0.9, "top_p": 1.0, "top_k": 0,
    }  # fmt: skip
    assert recipe["run"] == {"epochs": 3, "validate_every": 10, "save_every": 50}


def test_every_setting_that_is_not_in_the_recipe_is_listed():
    found = {entry.name: entry for entry in import_config("verl", MEGATRON_PPO).ignored}
    assert set(found) == {
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "actor_rollout_ref.actor.megatron.param_offload",
        "actor_rollout_ref.actor.megatron.optimizer_offload",
        "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method",
        "actor_rollout_ref.actor.profiler.enable",
        "actor_rollout_ref.ref.megatron.param_offload",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "trainer.logger",
        "trainer.project_name",
    }
    assert found["actor_rollout_ref.ref.megatron.param_offload"].value is True
    assert "planner's choice" in found["actor_rollout_ref.ref.megatron.param_offload"].reason
    assert str(found["trainer.project_name"]) == "trainer.project_name = hh: a run logs into its folder"


def test_grpo_with_fsdp_from_a_shell_script():
    found = import_config("verl", FSDP_GRPO)
    recipe = found.recipe
    assert found.n_devices == 8
    assert found.demands == {"actor": 8, "rollout": 8, "ref": 8}
    assert "critic" not in recipe
    assert recipe["algorithm"]["name"] == "grpo"
    assert recipe["algorithm"]["kl"] == {"in": "loss", "kind": "k3", "coef": 0.001}
    assert recipe["batch"]["samples_per_prompt"] == 5
    assert recipe["batch"]["mini_batch_samples"] == 256 * 5  # verl counts prompts
    assert recipe["actor"]["path"] == "Qwen/Qwen2.5-7B-Instruct"
    assert recipe["actor"]["layout"] == {"cp": 2}
    assert recipe["actor"]["micro_batch_tokens"] == recipe["ref"]["micro_batch_tokens"] == 24000
    assert recipe["rollout"]["layout"] == {"tp": 2}
    assert recipe["reward"] == {"path": "rewards/gsm8k.py:compute_score"}
    assert recipe["data"]["overlong"] == "filter"
    ignored = {entry.name: entry.reason for entry in found.ignored}
    assert ignored["actor_rollout_ref.rollout.my_new_key"] == "has no counterpart here"
    assert ignored["actor_rollout_ref.rollout.name"].startswith("planned as vllm")
    assert {"trainer.critic_warmup", "actor_rollout_ref.actor.fsdp_config.param_offload"} <= set(ignored)


def test_overrides_come_last():
    found = import_config("verl", MEGATRON_PPO, ["trainer.nnodes=4", "++actor_rollout_ref.rollout.n=2"])
    assert found.n_devices == 32
    assert found.recipe["batch"]["mini_batch_samples"] == 256


@pytest.mark.parametrize("prefix", ["reward_model", "reward.reward_model"])
def test_a_reward_model_with_a_pool_of_its_own_takes_further_devices(prefix):
    path = "model.path" if prefix == "reward_model" else "model_path"
    said = ["enable=True", "enable_resource_pool=True", "nnodes=1", "n_gpus_per_node=4", f"{path}=/rm"]
    found = import_config("verl", MEGATRON_PPO, [f"{prefix}.{item}" for item in said])
    assert found.n_devices == 20
    assert found.demands["reward"] == 4
    assert found.recipe["placement"]["pools"]["reward"] == {"roles": ["reward"], "nodes": 1, "per_node": 4}
    assert found.recipe["reward"]["path"] == "/rm"


def test_a_rollout_that_is_not_hybrid_has_devices_of_its_own():
    said = ["actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=8"]
    found = import_config("verl", FSDP_GRPO, said)
    assert found.n_devices == 16
    assert found.recipe["placement"]["pools"]["rollout"]["per_node"] == 8
    with pytest.raises(ForeignConfigError, match=r"not hybrid needs rollout\.nnodes"):
        import_config("verl", FSDP_GRPO, said[:1])


def test_the_defaults_of_verl_hold_for_what_is_left_out():
    found = import_config("verl", "algorithm.adv_estimator=gae")
    assert found.n_devices == 8
    assert found.recipe["batch"]["prompts"] == 1024
    assert found.recipe["rollout"]["layout"] == {"tp": 2}
    assert found.ignored == ()


def test_an_estimator_that_is_not_here_is_refused_by_name():
    with pytest.raises(ForeignConfigError, match="adv_estimator is 'gpg', which is not in this version"):
        import_config("verl", "algorithm.adv_estimator=gpg")


def test_a_configuration_of_the_users_own_is_told_as_changing_results():
    own = import_config("verl", "python -m verl.trainer.main_ppo --config-path cfg -cn mine trainer.nnodes=1")
    told = {entry.name: (entry.value, entry.harmless) for entry in own.ignored}
    assert told == {"config-path": ("cfg", False), "config-name": ("mine", False)}
    known = import_config(
        "verl", "python -m verl.trainer.main_ppo --config-name=ppo_trainer --multirun trainer.nnodes=1"
    )
    assert {entry.name: entry.harmless for entry in known.ignored} == {"config-name": True, "multirun": True}
    assert known.recipe["cluster"]["nodes"] == 1


def test_with_adapters_the_reference_is_the_actor_and_its_settings_do_not_count():
    said = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.use_kl_loss=True"]
    found = import_config("verl", FSDP_GRPO, said)
    assert "ref" not in found.recipe
    told = [entry for entry in found.ignored if entry.name.startswith("actor_rollout_ref.ref.")]
    assert told
    assert all(entry.harmless for entry in told)


def test_text_without_settings_is_refused():
    with pytest.raises(ForeignConfigError, match="'hello' is no setting such as"):
        import_config("verl", "hello")
    with pytest.raises(ForeignConfigError, match=r"trainer\.nnodes must be a whole number, got '\$NNODES'"):
        import_config("verl", "trainer.nnodes=${NNODES}")
