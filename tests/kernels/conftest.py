import pytest


@pytest.fixture(params=["", "portable", "reference"], ids=["device's choice", "portable", "reference"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form that runs on a CPU without Triton's interpreter, in turn."""
    monkeypatch.setenv("ROLEMESH_KERNELS", request.param)
    return request.param
