import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_compiled_kernels_stay_in_their_arrays_and_have_no_undefined_behaviour():
    run = subprocess.run(
        ["make", "sanitize"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "portable: passed" in run.stdout
