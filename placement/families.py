"""Model families by the `model_type` of their Hugging Face `config.json`, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.placement.modules import Experts, LatentAttention, ModelError, Router


def _router(config: Mapping[str, Any]) -> Router:
    """Softmax over all experts; the chosen ones' scores are made to add up to 1 where the model says so."""
    return Router(norm=bool(config.get("norm_topk_prob", False)))


def _deepseek_v2_router(config: Mapping[str, Any]) -> Router:
    if config.get("norm_topk_prob"):
        raise ModelError("deepseek_v2 with norm_topk_prob is not supported: transformers does not apply it")
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    return Router(
        norm=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        n_groups=config["n_group"] if grouped else 1,
        top_groups=config["topk_group"] if grouped else 1,
    )


def _biased_router(n_groups: int, top_groups: int, scale: float) -> Callable[[Mapping[str, Any]], Router]:
    """DeepSeek-V3's kind; the arguments hold where a configuration leaves them out."""

    def read(config: Mapping[str, Any]) -> Router:
        return Router(
            score="sigmoid",
            norm=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", scale)),
            bias=True,
            n_groups=config.get("n_group") or n_groups,
            top_groups=config.get("topk_group") or top_groups,
            group_best=2,
        )

    return read


@dataclass(frozen=True)
class _Family:
    """What the model type alone decides. `attention_bias` None: the configuration's `bias_key` does.

    `runnable`: the workers can build it; the others can be planned for.
    """

    attention_bias: bool | None = None
    bias_key: str = "attention_bias"
    bias_default: bool = False  # where the configuration leaves it out
    out_bias: bool = True  # the attention bias covers the output projection too
    mlp_bias: bool = False  # the configuration's `mlp_bias` counts
    qk_norm: bool | None = False  # None: the configuration's `use_qk_norm`
    head_dim: int | None = None  # where the configuration leaves it out; None: hidden / heads
    ropes: tuple[str, ...] = ("default", "llama3")
    partial_rope: bool = False  # only a part of each head rotates
    window: int | None = None  # where the configuration leaves it out; for families that always apply it
    windowed: bool = False
    moe: tuple[str, ...] = ()  # keys that a mixture of experts needs
    router: Callable[[Mapping[str, Any]], Router] = _router
    latent: bool = False
    runnable: bool = False


_QWEN_MOE = ("moe_intermediate_size", "num_experts_per_tok")
_DEEPSEEK = (
    *_QWEN_MOE,
    "n_shared_experts",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
)
FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(mlp_bias=True, runnable=True),
    "mistral": _Family(attention_bias=False, windowed=True, window=4096, runnable=True),
    "qwen2": _Family(attention_bias=True, out_bias=False, runnable=True),
    "qwen3": _Family(qk_norm=True, head_dim=128, runnable=True),
    "mixtral": _Family(
        attention_bias=False,
        windowed=True,
        moe=("num_experts_per_tok",),
        router=lambda config: Router(),
        runnable=True,
    ),
    "qwen2_moe": _Family(
        bias_key="qkv_bias",
        bias_default=True,
        out_bias=False,
        moe=(*_QWEN_MOE, "shared_expert_intermediate_size"),
    ),
    "qwen3_moe": _Family(qk_norm=True, moe=_QWEN_MOE, runnable=True),
    "glm4_moe": _Family(
        out_bias=False,
        qk_norm=None,
        partial_rope=True,
        moe=(*_QWEN_MOE, "n_shared_experts"),
        router=_biased_router(1, 1, 1.0),
    ),
    "deepseek_v2": _Family(
        ropes=("default", "yarn"), moe=_DEEPSEEK, router=_deepseek_v2_router, latent=True, runnable=True
    ),
    "deepseek_v3": _Family(
        ropes=("default", "yarn"), moe=_DEEPSEEK, router=_biased_router(8, 4, 2.5), latent=True, runnable=True
    ),
}

REFUSED: Mapping[str, str] = {
    "gemma": "norms that multiply by 1 + weight, scaled embeddings and a GELU feed-forward",
    "gemma2": "soft-capped attention scores and logits (attn_logit_softcapping, final_logit_softcapping)",
    "gemma3": "images, norms around each part, and rope settings per kind of layer",
    "gemma3_text": "norms around each part, and rope settings per kind of layer (sliding and full attention)",
    "gpt_oss": "attention sinks and experts with biases and a clamped activation",
}
"""Model types that are known and refused, and what they have that is not built here."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # one thing, by family and generation


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelShape` that a configuration stands for; raises ModelError as `from_config`."""
    family = _family(config)
    _refuse_other_maths(config)
    rope = _rope(config, family)
    n_labels, label_bias = _head(config)
    hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
    attention_bias = family.attention_bias
    if attention_bias is None:
        attention_bias = bool(config.get(family.bias_key, family.bias_default))
    latent = _latent(config) if family.latent else None
    head_dim = config.get("head_dim") or family.head_dim or hidden // n_heads
    return {
        "family": config["model_type"],
        "n_layers": config["num_hidden_layers"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "n_heads": n_heads,
        "n_kv_heads": config.get("num_key_value_heads") or n_heads,
        "head_dim": latent.nope_dim + latent.rope_dim if latent else head_dim,
        "vocab": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias and family.out_bias,
        "mlp_bias": family.mlp_bias and bool(config.get("mlp_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm")) if family.qk_norm is None else family.qk_norm,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "n_labels": n_labels,
        "label_bias": label_bias,
        "window": config.get("sliding_window", family.window) if family.windowed else None,
        "moe": _experts(config, family) if family.moe else None,
        "latent": latent,
    }


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type"))
    if model_type in REFUSED:
        raise ModelError(
            f"model_type {model_type!r} is not supported: it has {REFUSED[model_type]}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    if model_type not in FAMILIES:
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    missing = [key for key in (*_REQUIRED, *family.moe) if key not in config]
    if family.moe and not any(key in config for key in _N_EXPERTS):
        missing.append(" or ".join(_N_EXPERTS))
    if missing:
        raise ModelError(f"the {model_type} configuration lacks {', '.join(missing)}")
    return family


def _experts(config: Mapping[str, Any], family: _Family) -> Experts:
    n_layers = config["num_hidden_layers"]
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    gated = "shared_expert_intermediate_size" in family.moe
    shared = config["shared_expert_intermediate_size"] if gated else config.get("n_shared_experts", 0) * ffn
    only_dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    first = config.get("first_k_dense_replace") or 0
    dense = [n for n in range(n_layers) if n < first or n in only_dense or (n + 1) % step]
    return Experts(
        n=next(config[key] for key in _N_EXPERTS if key in config),
        top_k=config["num_experts_per_tok"],
        ffn=ffn,
        shared_ffn=shared,
        shared_gate=gated,
        dense_layers=tuple(dense),
        router=family.router(config),
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    if config.get("rope_interleave") is False:
        raise ModelError("rope_interleave false is not supported: pairs of neighbours rotate")
    return LatentAttention(
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        v_dim=config["v_head_dim"],
        q_rank=config.get("q_lora_rank"),
    )


def _refuse_other_maths(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported: only silu is")
    windowed = config.get("use_sliding_window") and (
        config.get("sliding_window") is not None
        and config.get("max_window_layers", 0) < config["num_hidden_layers"]
    )
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("sliding-window attention is not supported: set use_sliding_window to false")


def _rope(config: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    """Rope parameters with `rope_type` and `rope_theta`, from either generation of transformers."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if rope["rope_type"] not in family.ropes:
        raise ModelError(
            f"rope scaling {rope['rope_type']!r} is not supported; supported: {', '.join(family.ropes)}"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0 and not family.partial_rope:
        raise ModelError(
            f"partial_rotary_factor {partial} is not supported: every head dimension must rotate"
        )
    return rope


def _head(config: Mapping[str, Any]) -> tuple[int | None, bool]:
    """(n_labels, label_bias) of the head in `architectures`; transformers writes no list for 2 labels."""
    architecture = (config.get("architectures") or ["ForCausalLM"])[0]
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None, False
    n_labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    return n_labels, architecture.endswith("ForTokenClassification")
