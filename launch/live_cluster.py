"""A running Ray cluster as a value."""

from __future__ import annotations

from collections.abc import Callable

from rolemesh.launch.fields import RecipeError
from rolemesh.placement.cluster import ClusterSpec, DeviceKind


def live_cluster(
    address: str,
    device_kind: DeviceKind | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> ClusterSpec:
    """The nodes of the cluster at `address` ("host:port" or "auto"); the connection is closed again.

    `tell` gets a line that says which one it is.
    `device_kind` is as in `read_cluster`. Raises RecipeError when no Ray cluster answers there.
    """
    from rolemesh.engine.ray.cluster import RayStartError, cluster_address, joined_cluster

    try:
        with joined_cluster(address, device_kind=device_kind) as cluster:
            there = f"{len(cluster.nodes)} nodes, {cluster.n_devices} devices ({cluster.device_kind})"
            tell(f"run.address {address} is the Ray cluster at {cluster_address()}: {there}")
            return cluster
    except RayStartError as error:
        raise RecipeError(f"run.address: {error}; is Ray running?") from error
