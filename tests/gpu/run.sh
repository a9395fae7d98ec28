#!/usr/bin/env bash
# Runs every test that needs a GPU, and prints the kernels' figures, on a machine with torch and Triton.
#
#   PYTHON=python3 WHEELS=wheels OUT=runs/gpu tests/gpu/run.sh [options of pytest]
#
# Needs no network: packages that are missing are taken from the folder WHEELS, where it is given. The C++ part is
# built here, or is in a wheel of rolemesh among them. Exits with 1 when a test fails.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
mkdir -p "$OUT"
export PYTORCH_NVML_BASED_CUDA_CHECK=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" -c 'import torch; assert torch.cuda.device_count(), "torch sees no GPU"'
if [[ -n ${WHEELS:-} ]]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl
fi
if ! "$PYTHON" -c 'import rolemesh.kernels._cpu' 2> /dev/null; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
fi
"$PYTHON" - <<'PYTHON_END' | tee "$OUT/machine.txt"
import importlib.util
import torch

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
for i in range(torch.cuda.device_count()):
    print(f"GPU {i}: {torch.cuda.get_device_name(i)}")
for name in ("triton", "megatron.core", "transformer_engine", "apex", "ray", "vllm"):
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    print(f"{name}: {'here' if found else 'missing, its tests are skipped'}")
PYTHON_END

failed=0
# Kernels use CUDA in the test's own process, models in forked ones: they are runs apart.
"$PYTHON" -m pytest -m gpu tests/kernels "$@" 2>&1 | tee "$OUT/kernels.txt" || failed=1
if "$PYTHON" -c 'import megatron.core' 2> /dev/null; then
  "$PYTHON" -m pytest -m gpu tests/gpu "$@" 2>&1 | tee "$OUT/models.txt" || failed=1
else
  echo "megatron-core is missing: tests/gpu was left out"
fi
"$PYTHON" benchmarks/kernels.py --device cuda 2>&1 | tee "$OUT/benchmark.txt" || failed=1
exit $failed
