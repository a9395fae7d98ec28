"""What a Hugging Face folder holds, read without loading weights or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.launch.fields import RecipeError
from rolemesh.launch.schema import Recipe
from rolemesh.placement.known_models import known_model
from rolemesh.placement.model import ModelError, ModelShape

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A model folder; `tokens` maps token to id, None where the folder has no tokenizer that can be read.

    `quantized` names the method (`fp8`, `gptq`) of weights that are no plain numbers; else empty.
    """

    path: str
    shape: ModelShape
    tokens: Mapping[str, int] | None
    quantized: str = ""

    @property
    def n_tokens(self) -> int | None:
        """One more than the largest token id."""
        return None if self.tokens is None else max(self.tokens.values(), default=-1) + 1


def read_checkpoint(path: str, *, weights: bool = True) -> Checkpoint:
    """Read configuration and tokenizer; `weights` says that its weights have to be there, too.

    Raises RecipeError for a folder that can't be loaded from.
    """
    folder = Path(path)
    if not folder.is_dir():
        parts = Path(path).parts
        raise RecipeError(
            f"no folder {path}; a model of the Hugging Face hub is downloaded first: "
            f"hf download {'/'.join(parts[-2:])} --local-dir {path}"
        )
    config = _read_json(folder / "config.json")
    if weights and (missing := _missing_weights(folder)):
        raise RecipeError(f"{path} lacks {missing}")
    try:
        shape = ModelShape.from_config(config)
    except ModelError as error:
        raise RecipeError(f"{path}: {error}") from error
    quantized = config.get("quantization_config")
    method = str(quantized.get("quant_method", "quantized")) if isinstance(quantized, dict) else ""
    return Checkpoint(path, shape, _read_tokens(folder), method)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"{path.parent} has no {path.name}: not a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path} is not JSON: {error}") from error


def _missing_weights(folder: Path) -> str:
    if (folder / INDEX).is_file():
        wanted = sorted(set(_read_json(folder / INDEX)["weight_map"].values()))
        lost = [name for name in wanted if not (folder / name).is_file()]
        return f"{len(lost)} of its {len(wanted)} weight files, such as {lost[0]}" if lost else ""
    if (folder / "model.safetensors").is_file():
        return ""
    others = sorted(p.name for p in folder.glob("*.bin"))
    hint = f"; {others[0]} is another format: save it again with save_pretrained" if others else ""
    return f"weights: neither model.safetensors nor {INDEX}{hint}"


def _read_tokens(folder: Path) -> dict[str, int] | None:
    if (folder / "tokenizer.json").is_file():
        data = _read_json(folder / "tokenizer.json")
        vocab = data["model"]["vocab"]
        tokens = vocab if isinstance(vocab, dict) else {item[0]: i for i, item in enumerate(vocab)}
        return {**tokens, **{item["content"]: item["id"] for item in data.get("added_tokens", [])}}
    if (folder / "tokenizer.model").is_file():
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    return None


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a Hugging Face folder can write chat messages."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config).get("chat_template"))


def needs_own_code(folder: Path) -> bool:
    """Whether the tokenizer of a folder is a Python class in it, which nothing here runs."""
    config = folder / "tokenizer_config.json"
    settings = _read_json(config) if config.is_file() else {}
    if "AutoTokenizer" not in settings.get("auto_map", {}):
        return False
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(settings.get("tokenizer_class", "")) is None


def read_shapes(recipe: Recipe) -> tuple[dict[str, ModelShape], list[str]]:
    """The models of the roles from their config.json (weights are not needed), and a note for each file that
    is not there.

    Raises RecipeError for a config.json that cannot be read.
    """
    shapes: dict[str, ModelShape] = {}
    without: dict[str, list[str]] = {}  # the roles by what is said of them
    for role in recipe.roles:
        if role == "rollout":
            continue
        path = Path(getattr(recipe, role).path)
        file = path if path.suffix == ".json" else path / "config.json"
        if not file.is_file() and (known := known_model(path.name)):
            shapes[role], source = known
            without.setdefault(f"no {file}, so the built-in shape {path.name} ({source})", []).append(role)
            continue
        if not file.is_file():
            said = f"no {file}, so its layout is not checked against a model"
            without.setdefault(said, []).append(role)
            continue
        try:
            shapes[role] = ModelShape.from_config(json.loads(file.read_text()))
        except (json.JSONDecodeError, ModelError) as error:
            raise RecipeError(f"{role}.path: {file}: {error}") from error
    return shapes, [f"{', '.join(roles)}: {said}" for said, roles in without.items()]
