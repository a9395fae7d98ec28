"""One file of plain data per algorithm; every file of this folder is loaded, and registers its step."""

import importlib
import pkgutil

from rolemesh.placement.steps.registry import register_step, step_graph, step_names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["register_step", "step_graph", "step_names"]
