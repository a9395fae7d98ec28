"""Configurations of other systems as recipes: the workload and the placement they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rolemesh.placement.importers.openrlhf import import_openrlhf
from rolemesh.placement.importers.settings import ForeignConfigError, Ignored, Imported, Mapped
from rolemesh.placement.importers.verl import import_verl

IMPORTERS: Mapping[str, Callable[[str, Sequence[str], Mapping[str, str]], Imported]] = {
    "verl": import_verl,
    "openrlhf": import_openrlhf,
}


def import_config(
    system: str, text: str, overrides: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Imported:
    """The configuration in `text`, and overrides in that system's form, as a recipe of ours.

    `variables` are shell variables by name, whatever the script sets them to.

    Raises ForeignConfigError for an unknown system, and for text and values that cannot be read.
    """
    if system not in IMPORTERS:
        raise ForeignConfigError(f"no importer for {system!r} (there are: {', '.join(IMPORTERS)})")
    return IMPORTERS[system](text, overrides, variables or {})


__all__ = ["IMPORTERS", "ForeignConfigError", "Ignored", "Imported", "Mapped", "import_config"]
