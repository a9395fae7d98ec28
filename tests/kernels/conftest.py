import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` is skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=["", "portable", "reference"], ids=["device's choice", "portable", "reference"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form that runs on a CPU without Triton's interpreter, in turn."""
    monkeypatch.setenv("ROLEMESH_KERNELS", request.param)
    return request.param
