"""Checkpoints that verl's trainers have written, as Hugging Face folders."""

from rolemesh.launch.verl.convert import convert_verl, find_role

__all__ = ["convert_verl", "find_role"]
