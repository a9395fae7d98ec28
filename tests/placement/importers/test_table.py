"""No setting is lost: each key of a command line is in the table once."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.launch.algorithm_presets import PRESETS
from rolemesh.launch.config import parse_recipe
from rolemesh.placement.importers import Imported, import_config
from rolemesh.placement.importers.openrlhf_keys import KEYS as FLAGS
from rolemesh.placement.importers.verl_keys import KEYS

UNKNOWN = (
    "trainer.logger", "actor_rollout_ref.rollout.new_key", "actor_rollout_ref.model.lora_rank", "hydra.x.y",
    "actor_rollout_ref.actor.fsdp_config.param_offload", "some_key_without_a_dot", "ray_kwargs.a",
)  # fmt: skip
WORDS = {
    "adv_estimator": ["gae", "grpo", "rloo", "remax", "reinforce_plus_plus", "grpo_vectorized"],
    "loss_mode": ["vanilla", "gspo", "cispo", "clip_cov"],
    "loss_agg_mode": ["token-mean", "seq-mean-token-sum-norm", "other"],
    "strategy": ["fsdp", "megatron"],
    "type": ["fixed", "adaptive"],
    "rollout_is": ["token", "sequence", "null"],
    "name": ["vllm", "sglang", "hf"],
    "truncation": ["left", "right", "error"],
    "betas": ["[0.9, 0.95]"],
    "advantage_estimator": ["gae", "reinforce", "rloo", "group_norm", "dr_grpo", "reinforce_baseline"],
    "policy_loss_type": ["ppo", "gspo"],
    "recompute_granularity": ["full", "selective"],
}
SWITCHES = (
    "enable", "use_", "hybrid_engine", "shuffle", "filter_overlong_prompts", "norm_adv", "sequence_parallel",
    "enable_",
)  # fmt: skip


def value_of(key: str) -> st.SearchStrategy[str]:
    last = key.rpartition(".")[2]
    if last in WORDS:
        return st.sampled_from(WORDS[last])
    if last.startswith(SWITCHES) or "use_dynamic" in last:
        return st.sampled_from(["True", "False"])
    if "path" in last or "files" in last:
        return st.sampled_from(["a/b", "with blank", "$HOME/x"])
    return st.sampled_from(["1", "2", "8"])


def names(found: Imported) -> list[str]:
    return sorted(row.name for row in (*found.mapped, *found.ignored, *found.without_effect))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_key_of_verls_command_line_is_in_the_table_once(data: st.DataObject):
    known = [key for key in KEYS if not key.startswith("rollout.") and not key.endswith("hybrid_engine")]
    known = [key for key in known if "enable_resource_pool" not in key]
    keys = data.draw(st.lists(st.sampled_from([*known, *UNKNOWN]), unique=True, min_size=1, max_size=25))
    parts = []
    for key in keys:
        sign = data.draw(st.sampled_from(["", "+", "++", "~"])) if key in UNKNOWN else ""
        item = f"{sign}{key}" if sign == "~" else f"{sign}{key}={data.draw(value_of(key))}"
        parts.append(shlex.quote(item))
    found = import_config("verl", "python3 -m verl.trainer.main_ppo \\\n " + " \\\n ".join(parts))
    assert sorted(name.lstrip("~") for name in names(found)) == sorted(keys)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_flag_of_openrlhf_is_in_the_table_once(data: st.DataObject):
    sizes = ("_num_nodes", "_num_gpus_per_node", "vllm_num_engines", "vllm_tensor_parallel_size")
    switches = ("colocate", "dynamic_filtering", "no_adv", "use_", "enable", "load_", "bf16", "gradient_")
    texts = ("pretrain", "path", "data", "url", "save_path", "input_key", "eval_dataset")
    flags = [flag for flag in FLAGS if not flag.endswith(sizes)] + ["lora_rank", "packing_samples"]
    drawn = data.draw(st.lists(st.sampled_from(flags), unique=True, max_size=20))
    words = ["--actor_num_nodes 1", "--vllm_num_engines 8"]
    for flag in drawn:
        if flag.startswith(switches):
            words.append(f"--{flag}")
        elif flag in ("kl_estimator", "param_dtype", "lr_scheduler"):
            value = {"kl_estimator": "k2", "param_dtype": "bf16", "lr_scheduler": "cosine"}[flag]
            words.append(f"--{flag} {value}")
        elif flag in ("eps_clip_low_high", "adam_betas"):
            words.append(f"--{flag} 0.2 0.3")
        else:
            value = data.draw(value_of(flag)) if flag in WORDS else "a/b" if flag.endswith(texts) else "1"
            words.append(f"--{flag}={value}")
    if not {"reward_pretrain", "remote_rm_url"} & set(drawn):
        drawn.append("remote_rm_url")
        words.append("--remote_rm_url http://rm:5000/x")
    found = import_config("openrlhf", "python -m openrlhf.cli.train_ppo_ray " + " ".join(words))
    assert names(found) == sorted([*drawn, "actor_num_nodes", "vllm_num_engines"])


VERL = {
    "ppo": "algorithm.adv_estimator=gae",
    "grpo": "algorithm.adv_estimator=grpo",
    "dr_grpo": "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
    "rloo": "algorithm.adv_estimator=rloo",
    "reinforce_plus_plus": "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9",
    "reinforce_plus_plus_baseline": "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    "remax": "algorithm.adv_estimator=remax",
    "dapo": "algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True",
    "gspo": "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "cispo": "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_has_its_words_in_verl(name: str, tmp_path):
    found = import_config("verl", f"{VERL[name]} actor_rollout_ref.rollout.n=4")
    recipe = parse_recipe(found.to_yaml(), tmp_path)
    assert recipe.algorithm.name == name
    assert recipe.algorithm.estimator == PRESETS[name]["estimator"]
    assert (recipe.algorithm.clip_low, recipe.algorithm.clip_high) == (0.2, 0.2)  # verl's, not the name's


def test_whether_results_change_is_said():
    found = import_config(
        "verl",
        "algorithm.adv_estimator=gae trainer.logger=x actor_rollout_ref.rollout.multi_turn.enable=True",
    )
    assert {i.name: i.harmless for i in found.ignored} == {
        "trainer.logger": True, "actor_rollout_ref.rollout.multi_turn.enable": False,
    }  # fmt: skip
