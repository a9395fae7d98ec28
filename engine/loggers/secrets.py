"""Tokens, keys and passwords, hidden from what a run writes."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "***"
MORE = "ROLEMESH_SECRETS"
"""Variable that names more places of secrets: other variables, and files (absolute paths)."""
SHORTEST = 8  # of a value that is searched for in texts: shorter ones stand in innocent words too
_SECRET = (
    r"(?:access|api|auth|private|secret)[_-]?key|(?:access|api|auth|bearer)?[_-]?token|secret|password|passwd"
    r"|passphrase|credentials?|authorization"
)
_NAME = re.compile(rf"(?:^|[_.\-]|(?<=[a-z]))(?:{_SECRET})$", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(\w+://)[^/\s@]+@"), rf"\1{HIDDEN}@"),
    (
        re.compile(r"(\bBearer\s+|\bAuthorization[\"']?\s?[=:]\s?[\"']?\w+\s+)(?!\$\{)[^\s&\"',;}]+", re.I),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(rf"((?:^|[\W_])(?:{_SECRET})[\"']?\s?[=:]\s?[\"']?)(?!\$\{{)[^\s&\"',;}}]+", re.I),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w\-]{12,}"), HIDDEN),
)


def is_secret(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret (`api_key`, `HF_TOKEN`)."""
    return _NAME.search(name) is not None


def hide(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text without values of secret environment variables, passwords in URLs and known kinds of keys."""
    for value in sorted({*_values(environ), *_in_files(environ)}, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text


def without_secrets(value: Any, environ: Mapping[str, str] = os.environ, name: str = "") -> Any:
    """A tree of settings that holds no secret, and is as usable as before where that can be.

    A secret that an environment variable holds becomes `${oc.env:VARIABLE}`, which a recipe reads from there
    again; one that was written out becomes `***`.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(item, environ, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, environ, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    for secret, variable in sorted(_values(environ).items(), key=lambda item: -len(item[0])):
        value = value.replace(secret, f"${{oc.env:{variable}}}")
    if is_secret(name) and "${" not in value:
        by_value = {held: variable for variable, held in environ.items()}
        return f"${{oc.env:{by_value[value]}}}" if value in by_value else HIDDEN
    for secret in _in_files(environ):
        value = value.replace(secret, HIDDEN)
    return hide(value, {})


def _values(environ: Mapping[str, str]) -> dict[str, str]:
    """Value to name of the environment's secrets."""
    more = environ.get(MORE, "").split(os.pathsep)
    names = [name for name in environ if name in more or is_secret(name)]
    return {environ[name]: name for name in names if len(environ[name]) >= SHORTEST}


def _in_files(environ: Mapping[str, str]) -> set[str]:
    """The secrets of the files that the environment names; of those that are there."""
    found = set()
    for place in environ.get(MORE, "").split(os.pathsep):
        if os.path.isabs(place):
            try:
                found.add(Path(place).read_text(encoding="utf-8").strip())
            except (OSError, UnicodeDecodeError):
                continue
    return {secret for secret in found if len(secret) >= SHORTEST}
