"""What vLLM is told of a model beside its own configuration. The engines' answers: test_vllm_families.py."""

from types import SimpleNamespace

from rolemesh.engine.rollout.vllm_config import as_transformers_computes


def test_deepseeks_routers_choose_as_transformers_has_them():
    third = as_transformers_computes(SimpleNamespace(model_type="deepseek_v3", n_group=8))
    assert (third.topk_method, third.scoring_func, third.n_group) == ("noaux_tc", "sigmoid", 8)
    for method, groups in (("greedy", 1), ("group_limited_greedy", 4)):
        config = SimpleNamespace(model_type="deepseek_v2", topk_method=method, n_group=4, topk_group=4)
        second = as_transformers_computes(config)
        assert (second.n_group, second.topk_group) == (groups, groups)


def test_other_configurations_stay_as_they_are():
    config = SimpleNamespace(model_type="llama")
    assert vars(as_transformers_computes(config)) == {"model_type": "llama"}
