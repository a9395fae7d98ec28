"""Bearer tokens, in an environment variable or a file: reading them, and keeping them out of logs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Protocol

from rolemesh.engine.loggers.secrets import MORE
from rolemesh.launch.fields import RecipeError, key

ENV, FILE = "token_env", "token_file"


class HasToken(Protocol):
    """A section of a recipe that may name where a token is."""

    @property
    def token_env(self) -> str | None: ...

    @property
    def token_file(self) -> str | None: ...


class TokenError(ValueError):
    """A token that is not where it should be."""


def token_env_key(kinds: str) -> str | None:
    """The key of the variable, for sections of these kinds."""
    return key(None, f"Environment variable that holds the bearer token ({kinds}).", shown="no token")


def token_file_key(kinds: str) -> str | None:
    """The key of the file, for sections of these kinds."""
    return key(None, f"File that holds the bearer token ({kinds}).", path=True, shown="no token")


def check_one_place(keys: HasToken) -> None:
    """Raise RecipeError where a section names two places."""
    if keys.token_env is not None and keys.token_file is not None:
        raise RecipeError(f"{ENV} and {FILE} are both given: one of them holds the token")


def read_token(
    env: str | None, file: str | Path | None, env_key: str = ENV, file_key: str = FILE
) -> str | None:
    """The token in a variable or a file; None where neither is named. Raises TokenError naming the key."""
    if env and file is not None:
        raise TokenError(f"give {env_key} or {file_key}, not both")
    if env:
        if env not in os.environ:
            raise TokenError(f"{env_key}: the environment variable {env} is not set")
        token, where = os.environ[env], f"{env_key}: the environment variable {env}"
    elif file is not None:
        try:
            token, where = Path(file).read_text(encoding="utf-8"), f"{file_key}: the file {file}"
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{file_key}: {error}") from error
    else:
        return None
    token = token.strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise TokenError(f"{where} holds no token: printable ASCII without blanks is needed")
    return token


def read_by_others(file: str | Path) -> str | None:
    """What to do about a file of a token that more than its owner may read; None where that is not so."""
    mode = Path(file).stat().st_mode & 0o777
    if not mode & 0o077:
        return None
    return f"others than its owner may read {file} (mode {mode:03o}): chmod 600 {file}"


def token_problems(sections: Iterable[tuple[str, HasToken]]) -> Iterator[str]:
    """What is wrong with the tokens of a recipe's sections."""
    for section, keys in sections:
        try:
            token_of(section, keys)
        except RecipeError as error:
            yield str(error)


def token_notes(sections: Iterable[tuple[str, HasToken]]) -> Iterator[str]:
    """Files of tokens that others may read."""
    for section, keys in sections:
        file = keys.token_file
        if file is not None and Path(file).is_file() and (told := read_by_others(file)):
            yield f"{section}.{FILE}: {told}"


def token_of(section: str, keys: HasToken) -> str | None:
    """The token that a section names, if any. Raises RecipeError where it is not there."""
    try:
        return read_token(keys.token_env, keys.token_file, f"{section}.{ENV}", f"{section}.{FILE}")
    except TokenError as error:
        raise RecipeError(str(error)) from error


def hide_tokens(
    sections: Iterable[tuple[str, HasToken]], environ: MutableMapping[str, str] | None = None
) -> None:
    """Have these tokens hidden in what this process, and those that it starts, print from now on."""
    environ = os.environ if environ is None else environ
    places = [place for _, keys in sections for place in (keys.token_env, keys.token_file) if place]
    known = [place for place in environ.get(MORE, "").split(os.pathsep) if place]
    if places:
        environ[MORE] = os.pathsep.join(dict.fromkeys([*known, *places]))
