"""What holds for every test."""

import gc

import pytest

# Tests import a million objects that stay: looking through them again and again takes a third of collection.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs, which are in the last files by name, first: then workers side by side end together."""
    items.sort(key=lambda item: item.path.as_posix(), reverse=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
