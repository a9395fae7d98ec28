"""OpenRLHF's command lines as recipes: devices as OpenRLHF takes them, the rest listed."""

from pathlib import Path

import pytest

from rolemesh.launch.config import parse_recipe
from rolemesh.launch.import_command import written
from rolemesh.placement.importers import ForeignConfigError, import_config

EXAMPLES = Path(__file__).parents[3] / "examples" / "imports"

HYBRID = (EXAMPLES / "openrlhf_ppo.sh").read_text() + "echo done\n"


COLOCATE_ALL = """
set -x
MODEL="Qwen/Qwen3-4B-Instruct"
python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 2 --ref_num_gpus_per_node 8 --actor_num_nodes 2 \\
   --actor_num_gpus_per_node 8 --vllm_num_engines 8 --vllm_tensor_parallel_size 2 --colocate_all_models \\
   --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep --deepspeed_enable_sleep --pretrain $MODEL \\
   --remote_rm_url /openrlhf/math_reward.py --micro_train_batch_size 1 --train_batch_size 1024 \\
   --rollout_batch_size 128 --n_samples_per_prompt 8 --prompt_max_len 2048 --generate_max_len 8192 \\
   --zero_stage 3 --ring_attn_size 2 --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 \\
   --init_kl_coef 1e-3 --eps_clip_low_high 0.2 0.28 --actor_learning_rate=1e-6 --input_key prompt \\
   --prompt_data data/math.jsonl --use_dynamic_batch --train_max_tokens_per_gpu 16384 > train.log
"""


def with_flags(*extra: str) -> str:
    return HYBRID.replace("--use_wandb {wandb_token}", " ".join(extra))


def test_actor_with_reference_critic_with_reward_and_engines_take_24_devices():
    found = import_config("openrlhf", HYBRID)
    assert found.n_devices == 24
    assert found.demands == {"actor": 8, "rollout": 8, "critic": 8, "ref": 8, "reward": 8}
    assert found.recipe["cluster"] == {"nodes": 3, "per_node": 8}
    assert found.recipe["placement"]["pools"] == {
        "actor_ref": {"roles": ["actor", "ref"], "nodes": 1, "per_node": 8},
        "critic_reward": {"roles": ["critic", "reward"], "nodes": 1, "per_node": 8},
        "rollout": {"roles": ["rollout"], "nodes": 1, "per_node": 8},
    }


def test_without_colocation_it_is_40_and_with_all_of_it_8():
    alone = HYBRID.replace("--colocate_critic_reward", "").replace("--colocate_actor_ref", "")
    assert import_config("openrlhf", alone).n_devices == 40
    everything = alone.replace("--bf16", "--bf16 --colocate_all_models")
    assert import_config("openrlhf", everything).n_devices == 8
    assert import_config("openrlhf", everything).recipe["placement"] == {"strategy": "colocate"}
    asynchronous = everything.replace("--bf16", "--bf16 --async_train")
    assert import_config("openrlhf", asynchronous).n_devices == 16  # the engines stay outside


def test_critic_with_reward_is_a_group_of_its_own_even_beside_colocate_all_models():
    text = HYBRID.replace("--colocate_actor_ref", "--colocate_all_models")
    assert import_config("openrlhf", text).n_devices == 16


def test_ppo_settings_are_said_in_our_words():
    recipe = import_config("openrlhf", HYBRID).recipe
    assert recipe["algorithm"] == {
        "name": "ppo", "gamma": 1.0, "lam": 1.0, "value_clip": 0.5,
        "kl": {"in": "reward", "kind": "k1", "coef": 0.01},
        "clip_low": 0.2, "clip_high": 0.2, "entropy_coef": 0.0,
    }  # fmt: skip
    assert recipe["batch"] == {
        "prompts": 1024, "samples_per_prompt": 1, "mini_batch_samples": 128, "epochs": 1,
    }  # fmt: skip
    assert recipe["actor"]["micro_batch_tokens"] == 8 * 2048
    assert recipe["ref"]["micro_batch_tokens"] == 32 * 2048
    assert recipe["actor"]["optim"] == {
        "lr": 5e-7, "min_lr": pytest.approx(5e-8), "decay": "cosine", "weight_decay": 0.0,
        "beta1": 0.9, "beta2": 0.95, "clip_grad": 1.0,
    }  # fmt: skip
    assert recipe["critic"]["path"] == recipe["reward"]["path"] == "OpenRLHF/Llama-3-8b-rm-700k"
    assert recipe["rollout"] == {"temperature": 1.0, "top_p": 1.0, "engine": "vllm", "layout": {"tp": 2}}


def test_every_flag_that_is_not_in_the_recipe_is_listed():
    found = {entry.name: entry for entry in import_config("openrlhf", HYBRID).ignored}
    assert set(found) == {
        "max_samples", "zero_stage", "apply_chat_template", "normalize_reward", "packing_samples",
        "adam_offload", "use_wandb",
    }  # fmt: skip
    assert (
        str(found["zero_stage"]) == "zero_stage = 3: weights are cut by tp and pp here, not over all devices"
    )
    assert found["normalize_reward"].reason == "has no counterpart here"


def test_grpo_with_everything_colocated_takes_the_actors_16_devices():
    found = import_config("openrlhf", COLOCATE_ALL)
    recipe = found.recipe
    assert found.n_devices == 16
    assert found.demands == {"actor": 16, "rollout": 16, "ref": 16}
    assert recipe["placement"] == {"strategy": "colocate"}
    assert recipe["cluster"] == {"nodes": 2, "per_node": 8}
    assert recipe["algorithm"]["kl"] == {"in": "loss", "kind": "k3", "coef": 0.001}
    assert (recipe["algorithm"]["clip_low"], recipe["algorithm"]["clip_high"]) == (0.2, 0.28)
    assert recipe["algorithm"]["norm_adv_by_std"] is True
    assert recipe["batch"]["mini_batch_samples"] == 1024
    assert recipe["actor"]["layout"] == {"cp": 2}
    assert recipe["actor"]["micro_batch_tokens"] == 16384
    assert recipe["actor"]["path"] == "Qwen/Qwen3-4B-Instruct"
    assert recipe["reward"] == {"path": "/openrlhf/math_reward.py:reward_func"}


def test_engines_that_do_not_match_the_actor_are_refused_as_openrlhf_does():
    text = COLOCATE_ALL.replace("--vllm_num_engines 8", "--vllm_num_engines 4")
    with pytest.raises(ForeignConfigError, match="4 engines x TP 2 = 8, actor 16"):
        import_config("openrlhf", text)
    text = HYBRID.replace("--ref_num_gpus_per_node 8", "--ref_num_gpus_per_node 4")
    with pytest.raises(ForeignConfigError, match="actor has 1 nodes x 8 and ref 1 x 4"):
        import_config("openrlhf", text)


def test_no_reference_without_kl_and_generation_by_the_actor_without_engines():
    text = HYBRID.replace("--init_kl_coef 0.01", "--init_kl_coef 0").replace("engines 4", "engines 0")
    found = import_config("openrlhf", text)
    assert "ref" not in found.demands
    assert found.n_devices == 16
    assert found.recipe["rollout"]["engine"] == "hf"
    ignored = {entry.name: entry.reason for entry in found.ignored}
    assert ignored["ref_num_nodes"] == "this run has no ref"


def test_a_remote_reward_and_overrides():
    found = import_config(
        "openrlhf",
        HYBRID,
        ["remote_rm_url=http://rm:5000/get_reward", "--zero_stage=2", "colocate_all_models"],
    )
    ignored = {entry.name: entry for entry in found.ignored}
    assert "remote_rm_url" not in ignored
    assert found.recipe["reward"] == {
        "kind": "remote",
        "protocol": "openrlhf",
        "endpoints": ["http://rm:5000/get_reward"],
        "on_failure": "raise",
    }
    assert ignored["zero_stage"].value == 2
    assert "reward" not in found.demands


def test_text_without_flags_is_refused():
    with pytest.raises(ForeignConfigError, match="no flags such as --actor_num_nodes 1"):
        import_config("openrlhf", "python3 -m openrlhf.cli.train_ppo_ray")


def test_with_adapters_the_reference_stays_a_model_of_its_own_as_there():
    found = import_config("openrlhf", with_flags("--lora_rank 8"))
    assert found.recipe["actor"]["lora"] == found.recipe["critic"]["lora"] == {"rank": 8, "alpha": 16.0}
    assert found.recipe["ref"]["kind"] == "model"
    assert found.recipe["critic"]["optim"]["min_lr"] == 9e-7
    parse_recipe(found.to_yaml(), Path())


def test_a_secret_is_in_neither_the_table_nor_the_recipe():
    found = import_config("openrlhf", with_flags("--use_wandb abcd1234"))
    assert {entry.name: entry.value for entry in found.ignored}["use_wandb"] == "***"
    assert "abcd1234" not in written("openrlhf", Path("run.sh"), found)
