"""Roles at work: batches, workers, the controller of a step, rewards, rollouts, and what Ray or SPMD adds."""

from rolemesh.parallel import plain_imports

plain_imports.install()
