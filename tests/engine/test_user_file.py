"""A class of a user's file as a value that processes load."""

import pickle
from pathlib import Path

import pytest

from rolemesh.engine.dispatch import registered_methods
from rolemesh.engine.user_file import UserClass, UserFileError
from rolemesh.engine.worker import Worker

FILE = """
from beside import FACTOR
from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.worker import Worker

class Mine(Worker):
    def random_state(self):
        return {"mine": super().random_state}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def twice(self, x):
        return FACTOR * x

class Other: ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_a_class_is_loaded_once_from_its_file_which_may_import_its_neighbours(file: Path):
    sent = UserClass(f"{file}:Mine", "actor.worker", Worker)
    cls = pickle.loads(pickle.dumps(sent)).load()
    assert cls is sent.load()
    assert issubclass(cls, Worker)
    assert object.__new__(cls).twice(4) == 8


def test_what_it_replaces_stays_registered_and_what_it_adds_is_so_too(file: Path):
    found = registered_methods(UserClass(f"{file}:Mine", "actor.worker", Worker).load())
    assert found["random_state"] == registered_methods(Worker)["random_state"]
    assert "twice" in found


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "mine.py:Other",
            r"actor.worker: Other of .*must be a subclass of Worker \(from rolemesh.engine.worker",
        ),
        ("mine.py:None", "has no class None; it has .*Mine"),
        ("mine.py", "names no class; write file.py:Class"),
        ("no.py:Mine", "actor.worker: no file .*no.py on this node"),
    ],
)
def test_a_class_that_cannot_be_the_worker_is_told_of_with_its_key(file: Path, path: str, told: str):
    with pytest.raises(UserFileError, match=told):
        UserClass(str(file.parent / path), "actor.worker", Worker).load()
