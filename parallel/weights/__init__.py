"""Hugging Face weights in and out of one role's ranks."""

from rolemesh.parallel.weights.checkpoint import CheckpointError
from rolemesh.parallel.weights.export import broadcast_hf, export_hf, fingerprint
from rolemesh.parallel.weights.load import load_hf
from rolemesh.parallel.weights.plan import Head, export_plan, stage_plan
from rolemesh.parallel.weights.save import save_hf

__all__ = [
    "CheckpointError",
    "Head",
    "broadcast_hf",
    "export_hf",
    "export_plan",
    "fingerprint",
    "load_hf",
    "save_hf",
    "stage_plan",
]
