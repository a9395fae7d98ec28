import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILDS = sorted(
    (Path(__file__).parents[2] / "build").glob("cp*/CMakeFiles"), key=lambda at: at.stat().st_mtime
)
OBJECTS = sorted(BUILDS[-1].rglob("*.o")) if BUILDS else []
WITH_AVX2 = [path for path in OBJECTS if "kernels_avx2" in str(path)]
AVX = re.compile(r"%ymm|\tv(movaps|movups|movsd|movss|pxor|xorps|addsd|mulsd)\b")

pytestmark = pytest.mark.skipif(
    not WITH_AVX2 or shutil.which("objdump") is None, reason="needs objdump and the object files of a build"
)


def run(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=True).stdout


def test_only_the_avx2_kernels_hold_avx_instructions():
    assert [path for path in OBJECTS if AVX.search(run("objdump", "-d", path))] == WITH_AVX2


def test_no_other_code_can_be_linked_to_a_function_of_the_avx2_kernels():
    """Of inline functions with one name the linker keeps one: it must not be the one that needs AVX2."""
    for path in WITH_AVX2:
        symbols = [line.split() for line in run("nm", "--defined-only", "--extern-only", path).splitlines()]
        functions = [name for _, kind, name in symbols if kind in "TWiu"]
        assert not [name for name in functions if "8rolemesh4avx2" not in name]
