"""What a tokenizer does and which weights a checkpoint holds, in hashes that two machines can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a rank of a model needs no transformers, which takes long to load
    from transformers import PreTrainedTokenizerBase

_MODEL_TABLES = ("vocab", "merges")
_SAMPLED, _SAMPLES = 1 << 16, 64  # bytes read at a time of a file of weights, and how often
_SHOWN = 160  # characters of a part that are sent as they are, to be read in a message


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Hashes and sizes of what turns text into ids, as JSON.

    `vocab_size` (with added tokens), `vocabulary`, `merges`, `special_tokens` (ids by role, and all added
    tokens), `model`, `normalizer`, `pre_tokenizer`. Left out is what ids don't depend on: padding,
    truncation, the chat template, which token pads, and whether bos is put in front.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    parts = _backend(tokenizer)
    model = parts.get("model") or {}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = {
        str(token_id): [token.content, token.lstrip, token.rstrip, token.single_word, token.normalized]
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
    }
    roles = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}
    return {
        "vocab_size": len(tokenizer),
        "vocabulary": {"size": len(vocabulary), "hash": _hash(vocabulary)},
        "merges": {"size": len(merges), "hash": _hash(merges)},
        "special_tokens": {**roles, "added": len(added), "hash": _hash(added)},
        "model": _part({name: value for name, value in model.items() if name not in _MODEL_TABLES}),
        "normalizer": _part(parts.get("normalizer")),
        "pre_tokenizer": _part(parts.get("pre_tokenizer")),
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, a line per part; empty when nothing does."""
    lines = []
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
            shown = [key for key in keys if key != "hash"] or keys
            one, other = (", ".join(f"{key} {side.get(key)}" for key in shown) for side in (one, other))
        lines.append(f"{name}: ours {one}, theirs {other}")
    return lines


def _backend(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The parts of a tokenizer of the `tokenizers` library; of another kind, its class and file's hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return json.loads(backend.to_str())
    model: dict[str, Any] = {"type": type(tokenizer).__name__}
    pieces = getattr(tokenizer, "sp_model", None)
    if pieces is not None:
        model["sentencepiece"] = hashlib.sha256(pieces.serialized_model_proto()).hexdigest()
    return {"model": model}


def _part(value: Any) -> dict[str, Any]:
    return {"is": json.dumps(value, sort_keys=True)[:_SHOWN], "hash": _hash(value)}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def checkpoint_revision(folder: Path) -> str:
    """Which weights a folder holds, as 16 hex digits: another checkpoint of one model gives others.

    Of each safetensors file the header's and some of the tensors' bytes are read, not all of them.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(_SAMPLED, size // _SAMPLES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLED))
    return digest.hexdigest()[:16]
