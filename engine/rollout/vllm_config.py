"""A model's configuration as vLLM has to read it, to compute what transformers and the trainer do."""

from __future__ import annotations

from typing import Any


def as_transformers_computes(config: Any) -> Any:
    """`config` with what transformers takes for granted of DeepSeek's routers, and vLLM asks it for.

    Without these vLLM would choose by softmax and without the correction bias (V3), or in groups (V2).
    """
    if config.model_type == "deepseek_v3":
        config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
    elif config.model_type == "deepseek_v2" and config.topk_method == "greedy":
        config.n_group = config.topk_group = 1
    return config
