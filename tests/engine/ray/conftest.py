"""One local Ray per test file, and worker classes of test files sent by value."""

from collections.abc import Iterator

import pytest
import ray

from rolemesh.engine.ray.cluster import local_cluster
from rolemesh.placement.cluster import ClusterSpec

SLOTS = 24


@pytest.fixture(scope="module", autouse=True)
def _workers_of_this_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes cannot import test files."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSpec]:
    with local_cluster(SLOTS, object_store_bytes=2**30) as spec:
        yield spec
