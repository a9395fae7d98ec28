"""Shapes of published models by name, for plans without any model at hand."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rolemesh.placement.model import ModelShape

_DATA = Path(__file__).with_name("data") / "models.yaml"


def known_model(name: str) -> tuple[ModelShape, str] | None:
    """The shape of a model such as `llama-70b` and where it is from; None for a name that is not known."""
    found = _by_name().get(name.strip().lower())
    return None if found is None else (ModelShape.from_config(found["config"]), str(found["source"]))


def known_names() -> tuple[str, ...]:
    """The names, without their aliases."""
    return tuple(_models())


@functools.cache
def _models() -> Mapping[str, Any]:
    return dict(yaml.safe_load(_DATA.read_text(encoding="utf-8")))


@functools.cache
def _by_name() -> Mapping[str, Any]:
    return {alias: model for name, model in _models().items() for alias in (name, *model["aliases"])}
