"""Checkpoints of a run: written aside, verified, kept or removed, found again."""
