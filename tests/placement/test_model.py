"""Shapes read from configurations, against transformers' own models on the meta device."""

import pytest
import torch
import transformers

from rolemesh.placement.layout import Layout, LayoutError
from rolemesh.placement.model import (
    Experts,
    LatentAttention,
    ModelError,
    ModelShape,
    Router,
    padded_vocab,
    stage_layers,
)

SIZES = {
    "vocab_size": 1009,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3}
SHARED = {"moe_intermediate_size": 40, "n_routed_experts": 7, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
}
CONFIGS = [
    transformers.LlamaConfig(**SIZES),
    transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=32),
    transformers.Qwen2Config(**SIZES),
    transformers.Qwen3Config(**SIZES),
    transformers.Qwen3Config(**SIZES, attention_bias=True, head_dim=24),
    transformers.MistralConfig(**SIZES, head_dim=20),
    transformers.MixtralConfig(**SIZES, num_local_experts=5),
    transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=56, mlp_only_layers=[1]),
    transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2, attention_bias=True, head_dim=24),
    transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=56, qkv_bias=False),
    transformers.Glm4MoeConfig(**SIZES, **SHARED, attention_bias=True, use_qk_norm=True),
    transformers.Glm4MoeConfig(**SIZES, **SHARED, head_dim=24, first_k_dense_replace=0, n_shared_experts=3),
    transformers.DeepseekV3Config(**SIZES | LATENT, first_k_dense_replace=1, n_shared_experts=2),
    transformers.DeepseekV3Config(**SIZES | LATENT | {"q_lora_rank": None}, attention_bias=True),
]
HEADS = [
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_n_params_equals_transformers(config, tied, head, tmp_path):
    if type(config) not in head._model_mapping:
        pytest.skip(f"transformers has no {head.__name__} of {config.model_type}")
    config.tie_word_embeddings = tied
    config.num_labels = 2 if head is HEADS[1] else 5
    with torch.device("meta"):
        model = head.from_config(config)
    model.config.architectures = [type(model).__name__]
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.n_params == sum(parameter.numel() for parameter in model.parameters())
    assert shape.n_labels == (None if head is HEADS[0] else config.num_labels)
    model.config.save_pretrained(tmp_path)
    assert ModelShape.from_config(transformers.PretrainedConfig.get_config_dict(tmp_path)[0]) == shape


REAL = {  # the published configurations, and the parameters that their makers state, in 1e9
    "Llama-3-70B": (
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
        (70.6, 70.6),
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        (46.7, 12.9),
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        (14.3, 2.7),
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        (30.5, 3.3),
    ),
    "GLM-4.5-Air": (
        {
            "model_type": "glm4_moe",
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        (106.9, 13.4),  # "106B-A12B": 12.2 without embedding and head
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129_280,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 163_840,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_nextn_predict_layers": 1,
            "rope_theta": 10_000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        (671.0, 37.5),  # 37 without the embedding
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_published_models_have_their_published_size(name):
    config, (total, active) = REAL[name]
    shape = ModelShape.from_config(config)
    assert shape.n_params == pytest.approx(total * 1e9, rel=0.002)
    assert shape.active_params == pytest.approx(active * 1e9, rel=0.02)
    model_type, sizes = (
        config["model_type"],
        {key: size for key, size in config.items() if key != "model_type"},
    )
    with torch.device("meta"):
        model = HEADS[0].from_config(transformers.AutoConfig.for_model(model_type, **sizes))
    assert shape.n_params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_every_part_equals_transformers(config):
    with torch.device("meta"):
        model = HEADS[0].from_config(config)
    shape = ModelShape.from_config(config.to_dict())

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    for n, layer in enumerate(model.model.layers):
        sparse = n in shape.moe_layers
        assert count(layer) == (shape.moe_layer_params if sparse else shape.layer_params)
        assert count(layer.self_attn) == shape.attention_params
        experts = shape.moe.n * shape.expert_params + shape.shared_params if sparse else shape.ffn_params
        assert count(layer.mlp) == experts
    assert count(model.model.embed_tokens) == shape.embedding_params
    assert count(model.model.norm) == shape.norm_params


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_shapes_equal_transformers(tied):
    config = transformers.GPT2Config(
        vocab_size=1009,
        n_positions=128,
        n_embd=96,
        n_layer=3,
        n_head=6,
        n_inner=200,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    shape = ModelShape.gpt(3, 96, 6, 1009, 128, ffn=200, tied=tied)
    assert shape.n_params == sum(parameter.numel() for parameter in model.parameters())
    # Brown et al. 2020, table 2.1: 175.0e9 parameters.
    assert ModelShape.gpt(96, 12_288, 96, 50_257, 2048).n_params == pytest.approx(175e9, rel=0.005)


def test_the_cache_of_latent_attention_is_small():
    deepseek = ModelShape.from_config(REAL["DeepSeek-V3"][0])
    assert deepseek.cached_values == 576  # DeepSeek-V2, section 2.1.4: kv_rank + rope_dim
    assert deepseek.head_dim == 192
    assert ModelShape.from_config(REAL["Llama-3-70B"][0]).cached_values == 2 * 8 * 128


def test_layers_with_experts_follow_every_familys_rule():
    sizes = {**SIZES, "num_hidden_layers": 6}
    qwen = ModelShape.from_config(
        {**sizes, **EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert qwen.moe_layers == (1, 5)
    assert qwen.n_dense_layers == 4
    deepseek = ModelShape.from_config({**sizes, **LATENT, "model_type": "deepseek_v3", "n_shared_experts": 2})
    assert deepseek.moe_layers == (0, 1, 2, 3, 4, 5)
    router = Router("sigmoid", scale=2.5, bias=True, n_groups=2, top_groups=1, group_best=2)
    assert deepseek.moe == Experts(8, 2, 40, shared_ffn=80, router=router)
    assert deepseek.latent == LatentAttention(28, 12, 20, 18, 36)


def test_mistral_looks_back_a_window():
    mistral = {**SIZES, "model_type": "mistral"}
    assert ModelShape.from_config(mistral).window == 4096
    assert ModelShape.from_config({**mistral, "sliding_window": None}).window is None


@pytest.mark.parametrize(
    ("family", "config"),
    [("qwen2_moe", REAL["Qwen1.5-MoE-A2.7B"][0]), ("glm4_moe", REAL["GLM-4.5-Air"][0])],
)
def test_models_that_can_only_be_planned_for_are_not_run(family, config):
    shape = ModelShape.from_config(config)
    message = f"{family} models can be planned for but not run yet: the workers build llama, mistral, qwen2"
    with pytest.raises(ModelError, match=message):
        shape.check_runnable()
    with pytest.raises(LayoutError, match=message):
        Layout().check(shape)
    with pytest.raises(ModelError, match="llama with a mixture of experts cannot be run"):
        ModelShape("llama", 2, 8, 16, 2, 2, 4, 32, 64, moe=Experts(4, 2, 16)).check_runnable()
    for runs in ("Llama-3-70B", "Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3"):
        ModelShape.from_config(REAL[runs][0]).check_runnable()


def test_biases_that_no_layer_here_has_are_refused_by_name():
    with pytest.raises(ModelError, match="llama with biases of its output or feed-forward cannot be run"):
        ModelShape.from_config({**SIZES, "model_type": "llama", "mlp_bias": True}).check_runnable()
    latent = {**SIZES, **LATENT, "model_type": "deepseek_v3", "n_shared_experts": 1, "attention_bias": True}
    with pytest.raises(ModelError, match="biases of latent attention cannot be run"):
        ModelShape.from_config(latent).check_runnable()


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (transformers.Gemma2Config(), "soft-capped attention scores and logits"),
        (transformers.Gemma3TextConfig(), "norms around each part"),
        (transformers.GptOssConfig(), "attention sinks"),
        (transformers.GemmaConfig(), "norms that multiply by 1"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_families_with_other_maths_are_refused_naming_it(config, feature):
    with pytest.raises(
        ModelError, match=f"model_type '{config.model_type}' is not supported: it has.*{feature}"
    ):
        ModelShape.from_config(config.to_dict())


def test_routers_follow_every_familys_rule():
    mixtral = ModelShape.from_config(REAL["Mixtral-8x7B"][0])
    assert mixtral.moe.router == Router()
    qwen = {**SIZES, **EXPERTS, "model_type": "qwen3_moe"}
    assert not ModelShape.from_config(qwen).moe.router.norm
    assert ModelShape.from_config({**qwen, "norm_topk_prob": True}).moe.router.norm
    v2 = {
        **SIZES,
        **LATENT,
        "model_type": "deepseek_v2",
        "n_shared_experts": 1,
        "routed_scaling_factor": 16.0,
    }
    assert ModelShape.from_config(v2).moe.router == Router(norm=False, scale=16.0)
    grouped = ModelShape.from_config({**v2, "topk_method": "group_limited_greedy"}).moe.router
    assert (grouped.n_groups, grouped.top_groups, grouped.group_best) == (2, 1, 1)
    for keys, message in (
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"norm_topk_prob": True}, "deepseek_v2 with norm_topk_prob"),
        ({"rope_interleave": False}, "rope_interleave false"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, "3 groups do not divide the 8 experts"),
    ):
        with pytest.raises(ModelError, match=message):
            ModelShape.from_config({**v2, **keys})


def test_experts_that_cannot_be_are_refused():
    with pytest.raises(ModelError, match="top_k=3 of 2 experts"):
        Experts(2, 3, 16)
    with pytest.raises(ModelError, match=r"dense layers \(0, 2\) are not among the 2"):
        ModelShape("mixtral", 2, 8, 16, 2, 2, 4, 32, 64, moe=Experts(4, 2, 16, dense_layers=(0, 2)))
    with pytest.raises(ModelError, match="lacks num_experts_per_tok, num_experts or num_local_experts"):
        ModelShape.from_config({**SIZES, "model_type": "mixtral"})


def test_older_configurations_keep_rope_at_the_top_level():
    older = {**SIZES, "model_type": "llama", "rope_theta": 500_000.0, "rms_norm_eps": "1e-5"}
    shape = ModelShape.from_config(older)
    assert (shape.rope_theta, shape.rope_scaling, shape.norm_eps) == (500_000.0, None, 1e-5)
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = ModelShape.from_config({**older, "rope_scaling": llama3}).rope_scaling
    assert scaled == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


def test_sizes_left_out_take_the_familys_defaults():
    bare = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    llama = ModelShape.from_config({**bare, "model_type": "llama"})
    assert (llama.n_kv_heads, llama.head_dim, llama.rope_theta) == (6, 16, 10_000.0)
    assert ModelShape.from_config({**SIZES, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3, "),
        ({"model_type": None}, "supported: llama"),
        ({"hidden_act": "gelu"}, "only silu"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "'yarn' is not supported; supported: default, llama3",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding-window"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4 KV heads"),
        ({"vocab_size": 0}, "vocab must be a whole number"),
    ],
)
def test_what_is_not_supported_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelShape.from_config({**SIZES, "model_type": "llama", **change})


def test_a_missing_size_is_named():
    with pytest.raises(ModelError, match="lacks vocab_size, hidden_size"):
        ModelShape.from_config({"model_type": "llama", **dict(list(SIZES.items())[2:])})


def test_stages_take_every_layer_once():
    assert stage_layers(7, 2) == [4, 3]
    for n_layers in range(1, 12):
        for pp in range(1, n_layers + 1):
            stages = stage_layers(n_layers, pp)
            assert sum(stages) == n_layers
            assert max(stages) - min(stages) <= 1
            assert len(stages) == pp
    with pytest.raises(ModelError, match="3 layers cannot fill 4"):
        stage_layers(3, 4)


def test_the_vocabulary_is_padded_once():
    assert padded_vocab(151_936, 2, multiple=1) // 2 == 75_968
    assert padded_vocab(5, 4, multiple=1) == 8
    assert padded_vocab(32_001, 2) == 32_256
