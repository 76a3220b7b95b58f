# `make bench` or `make test` on a fresh checkout does everything, set-up included.
# PYTHON makes the virtual environment (3.11 or newer), and runs `make gpu` with what it already has.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CSRC := $(wildcard csrc/*.cu csrc/*.cuh csrc/*.hpp csrc/*.cpp)

.DEFAULT_GOAL := help
.PHONY: help venv bench bench-all bench-codecs test test-more test-slow test-ranks test-ops test-frameworks test-models test-torch test-debug fuzz soak docs check format gpu gpu-packages clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: $(STAMP)  ## create .venv with the pinned packages and actstore itself

$(STAMP): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("actstore needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Installing the pinned packages into $(VENV); the first time takes some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

bench: $(STAMP)  ## train a small GPT with every store and compare memory, time and gradient error
	@mkdir -p build
	$(BIN)/actstore bench --json build/bench.json --plot build/bench.png $(ARGS)

bench-all: $(STAMP)  ## every workload with every row, scaling, largest batch, loss curves: two hours on two cores; ARGS="--part llama"
	$(BIN)/python -m benchmarks.suite.run $(ARGS)

bench-codecs: $(STAMP)  ## compare ratio, speed and error of the codecs with Tensor.copy_ and bitsandbytes
	@mkdir -p build
	$(BIN)/actstore bench codecs --json build/codecs.json --plot build/codecs.png $(ARGS)

# Worker processes share the cores: threads that wait for work sleep, and do not spin. Each begins with its own part of the
# folders, so that few kernels are compiled twice.
PYTEST = OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
test: $(STAMP)  ## run the tests, some cases of each: at most eight minutes on two cores
	$(PYTEST) $(ARGS)

test-more: $(STAMP)  ## run the cases that `make test` leaves out
	$(PYTEST) -m "more and not slow" $(ARGS)

test-slow: $(STAMP)  ## run the tests that take minutes: all of PyTorch's operators, compiled models, every dtype of every codec
	$(BIN)/python -m pytest -m slow --timeout 900 $(ARGS)

test-ranks: $(STAMP)  ## run all tests of several processes, also those that take minutes
	$(BIN)/python -m pytest tests/distributed tests/session/test_state.py tests/integrations/test_deepspeed.py -m "slow or not slow" --timeout 900 $(ARGS)

test-ops: $(STAMP)  ## run all of PyTorch's operators and modules under stores, in every form: half an hour on two cores
	$(BIN)/python -m pytest tests/operators -m "slow or not slow" -n auto --maxprocesses 4 --dist worksteal $(ARGS)

# A virtual environment of its own for the packages of requirements-models.txt; it takes all others from .venv.
MODELS := build/models
$(MODELS)/.stamp: requirements-models.txt $(STAMP)
	@test -x $(MODELS)/bin/python || $(PYTHON) -m venv $(MODELS)
	@$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-models.txt
	@site='import site; print(site.getsitepackages()[0])'; $(BIN)/python -c "$$site" > "$$($(MODELS)/bin/python -c "$$site")/venv.pth"
	@touch $@

test-frameworks: $(MODELS)/.stamp  ## train by the trainers of docs/guide/trainers.md, and by scripts under `actstore run`, against training without a store
	$(MODELS)/bin/python -m pytest tests/integrations tests/run -m "slow or not slow" --timeout 900 $(ARGS)

test-models: $(MODELS)/.stamp  ## train hundreds of models of Transformers, diffusers, timm and torchvision under exact and lossy policies, against plain training, from where the last run ended
	$(MODELS)/bin/python -m tests.models.sweep --json build/models.jsonl $(ARGS)
	$(MODELS)/bin/python -m pytest tests/models -m "slow or not slow" -n 0

test-torch: BIN := build/torch-$(TORCH)/bin
test-torch:  ## run the tests under another PyTorch: TORCH=2.11.0
	@test -n "$(TORCH)" || { echo "which PyTorch? make test-torch TORCH=2.11.0" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv build/torch-$(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	@grep -vE '^(torch|setuptools)==' requirements-dev.txt | $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r /dev/stdin
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

test-debug: $(STAMP)  ## run the tests of autograd with checked memory and a collector that runs at every chance
	PYTHONMALLOC=debug ACTSTORE_TEST_GC=1 $(BIN)/python -m pytest tests/autograd tests/transfer/test_loans.py -n auto --maxprocesses 4 $(ARGS)

fuzz: $(STAMP)  ## train random models under random policies, others each time, as plain PyTorch; ARGS="--examples 10000" for more
	$(BIN)/python -m tests.autograd.test_random_models $(ARGS)

soak: $(STAMP)  ## train 2,000 steps that go wrong in many ways, and count what is left; ARGS="--steps 100000" for more
	$(BIN)/python -m tests.system.soak $(ARGS)

docs: $(STAMP)  ## build the documentation site into build/site; any warning is an error. To read it, with search: python -m http.server -d build/site
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(STAMP)  ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .
ifneq ($(CSRC),)
	$(BIN)/clang-format --dry-run -Werror $(CSRC)
endif

format: $(STAMP)  ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
ifneq ($(CSRC),)
	$(BIN)/clang-format -i $(CSRC)
endif

# A dry run on a CPU takes the virtual environment, a run on a GPU what PYTHON has.
gpu: $(if $(filter cpu,$(DEVICE)),$(STAMP))  ## run what needs a GPU, with $(PYTHON) as it is, for nine minutes, from where the last run ended; installs nothing. ARGS="--part llama". DEVICE=cpu SCALE=small RESULTS=DIR: a dry run
	PYTHONPATH=. $(if $(filter cpu,$(DEVICE)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.run $(if $(DEVICE),--device $(DEVICE)) $(if $(SCALE),--scale $(SCALE)) $(if $(RESULTS),--results $(RESULTS)) $(ARGS)

# Wheels of the machine's Python, unpacked, without code for other GPUs; DeepSpeed has no wheel.
GPU_PYTHON ?= 3.12
GPU_PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target build/gpu-packages
gpu-packages: $(STAMP)  ## fill build/gpu-packages with what peers need on a machine without a network; GPU_PYTHON=3.12
	$(GPU_PIP) --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -r benchmarks/gpu/packages.txt
	$(GPU_PIP) --no-build-isolation $$(grep ^deepspeed== requirements-dev.txt)
	find build/gpu-packages/bitsandbytes -name '*.so' ! -name '*_cpu.so' ! -name '*_cuda13*' -delete
	rm -rf build/gpu-packages/deepspeed/ops/csrc build/gpu-packages/bin

clean:  ## remove what the targets made, .venv included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
