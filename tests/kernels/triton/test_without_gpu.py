"""What is known of the Triton kernels without a GPU: results in the interpreter, and that they compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*command: str | Path, **environment: str) -> str:
    """Run Python without a GPU; fails with all that it wrote unless it ends well."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_kernels_are_right_in_the_interpreter():
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", HERE,
        f"--ignore={__file__}", TRITON_INTERPRET="1")  # fmt: skip


@pytest.mark.full
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path):
    compiled = run(HERE / "compile_offline.py", "--brief", "90", **compiler(tmp_path))
    assert len(compiled.splitlines()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("sm", ["80", "90"])
def test_every_kernel_compiles_with_every_type_and_flag(sm: str, tmp_path: Path):
    compiled = run(HERE / "compile_offline.py", sm, **compiler(tmp_path))
    assert len(compiled.splitlines()) > 90
    assert "fp64" in compiled
    assert "bf16" in compiled


@pytest.mark.full
def test_without_a_gpu_the_interpreter_is_chosen_unless_it_is_too_late():
    choose = "import rolemesh.kernels.triton, os; print(os.environ['TRITON_INTERPRET'])"
    late = f"import triton.language\ntry: {choose}\nexcept RuntimeError as error: print(error)"
    assert "set TRITON_INTERPRET=1 before Python starts" in run("-c", late, TRITON_INTERPRET="")
    assert run("-c", choose, TRITON_INTERPRET="").split() == ["1"]


def compiler(cache: Path) -> dict[str, str]:
    return {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
