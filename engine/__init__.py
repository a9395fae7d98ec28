"""Roles at work: batches, workers, the step's controller, rewards, rollouts, and the Ray and SPMD back ends."""

from rolemesh.parallel import plain_imports

plain_imports.install()
