"""Hugging Face weights in and out of one role's ranks."""

from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.weights.convert import convert
from rolemesh.parallel.weights.export import export_hf
from rolemesh.parallel.weights.load import load_hf, stored_tensors
from rolemesh.parallel.weights.plan import Head, export_plan, stage_plan
from rolemesh.parallel.weights.save import save_hf

__all__ = [
    "CheckpointError",
    "Head",
    "convert",
    "export_hf",
    "export_plan",
    "load_hf",
    "save_hf",
    "stage_plan",
    "stored_tensors",
]
