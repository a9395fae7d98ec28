"""Tiny models and tokenizers, saved and loaded by tests as checkpoints: `from tests.tiny import ...`."""

import string
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Family = Literal["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
CONFIGS: dict[Family, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
"""Families that differ in little: what is tested of one kind of layer is tested of these."""

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
OWN_SETTINGS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "deepseek_v2": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": 28,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": _YARN,
    },
}
"""What further families have of their own: attention with a window, experts, latent attention."""
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0, 1, 2, 3


def char_tokenizer(vocab: int = 128, *, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token per printable character, as many characters as fit into `vocab` ids.

    `add_bos`: encoding with special tokens puts one bos in front, as Llama's tokenizers do.
    """
    tokens = [*SPECIAL_TOKENS, *string.printable][:vocab]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokens.index("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_config(
    family: Family = "llama",
    *,
    tied: bool = False,
    vocab: int = 128,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    **settings: object,
) -> PreTrainedConfig:
    """A config of `family` with grouped-query attention; Qwen3's head_dim is not hidden / heads.

    `settings` are further ones of its `config.json`, before all others.
    """
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("qwen3", "qwen3_moe"):
        sizes["head_dim"] = 2 * hidden // heads
    return AutoConfig.for_model(family, **sizes | OWN_SETTINGS.get(family, {}) | settings)


def tiny_model(
    config: PreTrainedConfig, *, head: Literal["lm", "score"] = "lm", seed: int = 0
) -> torch.nn.Module:
    """An fp32 model in eval mode, every parameter random (norm weights and biases too), so that a
    parameter left out or put in the wrong place changes the output."""
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if head == "score":
        config.num_labels = 1
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.data.copy_(1 + 0.1 * noise if is_norm else 0.1 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def tiny_checkpoint(
    directory: Path | str,
    family: Family = "llama",
    *,
    tied: bool = False,
    head: Literal["lm", "score"] = "lm",
    vocab: int = 128,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **settings: object,
) -> Path:
    """Save a tiny model (Hugging Face safetensors and config.json) with its tokenizer; returns `directory`.

    `head` "score" is a one-label sequence classifier, the form of a reward model. `max_shard_size`
    such as "50KB" cuts the weights into several files.
    """
    config = tiny_config(
        family,
        tied=tied,
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        **settings,
    )
    tiny_model(config, head=head, seed=seed).to(dtype).save_pretrained(
        directory, max_shard_size=max_shard_size
    )
    char_tokenizer(vocab).save_pretrained(directory)
    return Path(directory)
