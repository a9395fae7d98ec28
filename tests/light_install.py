"""The command line as `pip install rolemesh` without extras has it: `python tests/light_install.py plan ...`.

With `--each` every argument is a command line of its own, and their results are printed as JSON.
Packages that its dependencies do not bring are not found, as in an environment that lacks them.
"""

import importlib.metadata
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def brought() -> set[str]:
    """Names of the distributions that the project's dependencies come to."""
    todo = list(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    names: set[str] = {"rolemesh"}
    while todo:
        wanted = Requirement(todo.pop())
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in names or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        todo += importlib.metadata.requires(name) or []
    return names


def missing() -> set[str]:
    """Top-level modules of all other distributions that are installed here."""
    names = brought()
    there: dict[bool, set[str]] = {True: set(), False: set()}
    for module, distributions in importlib.metadata.packages_distributions().items():
        light = any(re.sub(r"[-_.]+", "-", name).lower() in names for name in distributions)
        there[light].add(module)
    return there[False] - there[True]


class Without:
    """A finder that does not find some modules."""

    def __init__(self, finder: Any, modules: set[str]) -> None:
        self.finder, self.modules = finder, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.modules:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hide_what_is_missing() -> None:
    """From now on this process is as one of an environment with the light install."""
    gone = missing()
    assert {"torch", "ray", "megatron", "transformers", "pyarrow", "psutil", "jinja2"} <= gone
    for loaded in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[loaded]
    sys.meta_path = [Without(finder, gone) for finder in sys.meta_path]
    sys.path_importer_cache.clear()


def each(lines: list[str]) -> list[dict[str, Any]]:
    """Exit code and output of several command lines in one process."""
    from typer.testing import CliRunner

    from rolemesh.launch.cli import main

    results = [CliRunner().invoke(main, shlex.split(line)) for line in lines]
    return [{"code": done.exit_code, "said": done.output} for done in results]


if __name__ == "__main__":
    hide_what_is_missing()
    if sys.argv[1] == "--each":
        print(json.dumps(each(sys.argv[2:])))
    else:
        from rolemesh.launch.cli import main

        main()
