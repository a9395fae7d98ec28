"""A running Ray cluster as a value."""

from __future__ import annotations

from rolemesh.launch.fields import RecipeError
from rolemesh.placement.cluster import ClusterSpec, DeviceKind


def live_cluster(address: str, device_kind: DeviceKind | None = None) -> ClusterSpec:
    """The nodes of the cluster at `address` ("host:port" or "auto"); the connection is closed again.

    `device_kind` is as in `read_cluster`. Raises RecipeError when no Ray cluster answers there.
    """
    from rolemesh.engine.ray.cluster import RayStartError, joined_cluster

    try:
        with joined_cluster(address, device_kind=device_kind) as cluster:
            return cluster
    except RayStartError as error:
        raise RecipeError(f"run.address: {error}; is Ray running?") from error
