"""A running Ray cluster as a value, without waiting minutes for one that isn't there."""

from __future__ import annotations

import socket

from rolemesh.launch.fields import RecipeError
from rolemesh.placement.cluster import ClusterSpec

ANSWER_S = 5.0  # Ray itself tries for five minutes


def live_cluster(address: str) -> ClusterSpec:
    """The nodes of the cluster at `address` ("host:port" or "auto"); the connection is closed again.

    Raises RecipeError when nothing listens there, RayStartError when what listens isn't Ray.
    """
    from rolemesh.engine.ray.cluster import joined_cluster

    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except OSError as error:
            raise RecipeError(
                f"run.address: nothing answers at {address} ({error}); is Ray running?"
            ) from error
    with joined_cluster(address) as cluster:
        return cluster
