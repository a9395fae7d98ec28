"""What holds for every test."""

import gc

import pytest

# Tests import a million objects that stay: looking through them again and again takes a third of collection.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
