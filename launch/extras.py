"""Which extra of the package brings a library: the planner and the command line need none of them."""

from __future__ import annotations

from collections.abc import Mapping

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": (
        "torch", "megatron", "ray", "transformers", "tensordict", "safetensors", "sentencepiece", "pyarrow",
        "psutil", "einops", "fastapi", "uvicorn", "httpx2", "prometheus_client", "jinja2",
    ),
    "loggers": ("tensorboard", "wandb", "mlflow"),
    "vllm": ("vllm",),
    "gpu": ("transformer_engine",),
}  # fmt: skip


def extra_of(module: str) -> str:
    """The extra that brings a module, such as `train` for `torch.nn`; empty where none does."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in _EXTRAS.items() if top in modules), "")
