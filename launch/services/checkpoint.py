"""Checkpoints to be served: where they lie, and a reward head that is really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rolemesh.launch.services.backend import ServeError
from rolemesh.parallel.weights.checkpoint import Checkpoint, CheckpointError, listed

DTYPES = ("auto", "float32", "bfloat16", "float16")


def find_folder(model: str, revision: str | None) -> Path:
    """The folder of a model: one here, or a repository of the Hugging Face hub, fetched or from the cache.

    Raises ServeError.
    """
    folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ServeError(f"--revision is for models of the hub; {folder} is a folder")
        if not (folder / "config.json").is_file():
            raise ServeError(f"{folder} has no config.json: it is no checkpoint in Hugging Face form")
        return folder
    if folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ServeError(f"there is no folder {model}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise ServeError(f"there is no folder {model}, and the hub does not give it: {error}") from error


def load_causal_model(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The causal model, in eval mode. Raises ServeError when weights are missing."""
    return _complete(AutoModelForCausalLM, folder, dtype, device, new=())


def load_reward_model(folder: Path, head: str, dtype: str, device: str) -> PreTrainedModel:
    """The sequence classifier with one output, its head read from the tensors under `head`, in eval mode.

    Raises ServeError when the head or other weights are missing, or the head has another output size.
    """
    with _checkpoint(folder) as checkpoint:
        weight = reward_head(checkpoint, head)
        with torch.device("meta"):
            classes: Any = AutoModelForSequenceClassification
            own = next(
                (name for name in ("score", "classifier") if hasattr(_empty(classes, folder), name)), ""
            )
        if own != "score":  # an encoder: its head may have several layers, which only its own class knows
            if head != own:
                raise ServeError(f"--head {head}: this architecture's head is {own or 'of another kind'}")
            return _complete(classes, folder, dtype, device, new=(), num_labels=1)
        model = _complete(classes, folder, dtype, device, new=("score.weight", "score.bias"), num_labels=1)
        model.score = _linear(checkpoint, weight).to(device=model.device, dtype=model.dtype)
    return model.eval()


def reward_head(checkpoint: Checkpoint, head: str) -> str:
    """The name of the head's last weight, [1, hidden]. Raises ServeError for none, or another size."""
    two_d = {name: checkpoint.shape(name) for name in checkpoint.names if name.endswith("weight")}
    two_d = {name: shape for name, shape in two_d.items() if len(shape) == 2}
    found = {name: shape for name, shape in two_d.items() if name.startswith(f"{head}.")}
    if not found:
        small = [name for name, shape in two_d.items() if shape[0] <= 16]
        hint = f"Tensors that might be one: {listed(small)}; name theirs with --head" if small else ""
        raise ServeError(
            f"{checkpoint.path} has no {head}.weight: a reward model without its head would give random "
            f"rewards. {hint or 'It looks like a language model, or a backbone alone'}."
        )
    name = min(found, key=lambda name: found[name][0])
    if found[name][0] != 1:
        raise ServeError(
            f"{checkpoint.path}: {name} is {list(found[name])}; a reward head has 1 output, not "
            f"{found[name][0]}"
        )
    return name


def _linear(checkpoint: Checkpoint, name: str) -> nn.Linear:
    """The layer of a weight [1, hidden], with its bias where the checkpoint has one."""
    bias = name.removesuffix("weight") + "bias"
    weight = checkpoint.read(name, (slice(None), slice(None)))
    layer = nn.Linear(weight.shape[1], 1, bias=bias in checkpoint.names, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(checkpoint.read(bias, (slice(None),)))
    return layer


def _checkpoint(folder: Path) -> Checkpoint:
    try:
        return Checkpoint(folder)
    except CheckpointError as error:
        raise ServeError(str(error)) from error


def _empty(auto: Any, folder: Path) -> nn.Module:
    from transformers import AutoConfig

    return auto.from_config(AutoConfig.from_pretrained(folder))


def _complete(
    auto: Any, folder: Path, dtype: str, device: str, *, new: tuple[str, ...], **options: Any
) -> PreTrainedModel:
    """Load a model; only weights of `new` may be missing."""
    _checkpoint(folder)
    model, loading = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    if missing := set(loading["missing_keys"]) - set(new):
        raise ServeError(f"{folder} lacks {listed(missing)}; they would be random, so it is not served")
    return model.to(device).eval()
