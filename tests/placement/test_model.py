"""Shapes read from configurations, against transformers' own models on the meta device."""

import pytest
import torch
import transformers

from rolemesh.placement.model import ModelError, ModelShape, padded_vocab, stage_layers

SIZES = {
    "vocab_size": 1009,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS = [
    transformers.LlamaConfig(**SIZES),
    transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=32),
    transformers.Qwen2Config(**SIZES),
    transformers.Qwen3Config(**SIZES),
    transformers.Qwen3Config(**SIZES, attention_bias=True, head_dim=24),
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
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, qwen2, qwen3"),
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
