"""Checkpoints to be served: where they lie, and a reward head that is really there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rolemesh.launch.services.backend import ServeError


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
    tensors = stored_tensors(folder)
    name = reward_head(folder, tensors, head)
    auto: Any = AutoModelForSequenceClassification
    with torch.device("meta"):
        empty = auto.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    own = next((name for name in ("score", "classifier") if hasattr(empty, name)), "")
    if own == "score":
        model = _complete(auto, folder, dtype, device, new=("score.weight", "score.bias"), num_labels=1)
        model.score = _linear(tensors, name).to(device=model.device, dtype=model.dtype)
        return model.eval()
    if head != own:  # an encoder's head may have several layers, which only its own class knows
        raise ServeError(f"--head {head}: this architecture's head is {own or 'of another kind'}")
    return _complete(auto, folder, dtype, device, new=(), num_labels=1)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, on the CPU, in its file's dtype."""
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder's safetensors files, by name. Raises ServeError when there are none."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name] = Stored(name, file, tuple(opened.get_slice(name).get_shape()))
    if not tensors:
        raise ServeError(f"{folder} has no *.safetensors: weights are served in that form alone")
    return tensors


def reward_head(folder: Path, tensors: Mapping[str, Stored], head: str) -> str:
    """The name of the head's last weight, [1, hidden]. Raises ServeError for none, or another size."""
    weights = {name: one.shape for name, one in tensors.items() if name.endswith("weight")}
    two_d = {name: shape for name, shape in weights.items() if len(shape) == 2}
    found = {name: shape for name, shape in two_d.items() if name.startswith(f"{head}.")}
    if not found:
        small = [name for name, shape in two_d.items() if shape[0] <= 16]
        hint = f"Tensors that might be one: {_listed(small)}; name theirs with --head" if small else ""
        raise ServeError(
            f"{folder} has no {head}.weight: a reward model without its head would give random "
            f"rewards. {hint or 'It looks like a language model, or a backbone alone'}."
        )
    name = min(found, key=lambda name: found[name][0])
    if found[name][0] != 1:
        raise ServeError(
            f"{folder}: {name} is {list(found[name])}; a reward head has 1 output, not {found[name][0]}"
        )
    return name


def _linear(tensors: Mapping[str, Stored], name: str) -> nn.Linear:
    """The layer of a weight [1, hidden], with its bias where the checkpoint has one."""
    weight, bias = tensors[name].read(), tensors.get(name.removesuffix("weight") + "bias")
    layer = nn.Linear(weight.shape[1], 1, bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias.read())
    return layer


def _complete(
    auto: Any, folder: Path, dtype: str, device: str, *, new: tuple[str, ...], **options: Any
) -> PreTrainedModel:
    """Load a model; only weights of `new` may be missing."""
    stored_tensors(folder)  # transformers would also take pickled weights
    model, loading = auto.from_pretrained(
        folder, trust_remote_code=False, dtype=dtype, output_loading_info=True, **options
    )
    if missing := set(loading["missing_keys"]) - set(new):
        raise ServeError(f"{folder} lacks {_listed(missing)}; they would be random, so it is not served")
    return model.to(device).eval()


def _listed(names: Iterable[str], most: int = 8) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
