# Each target sets up what it needs: an own virtual environment, with CPU torch where no GPU is.
# PYTHON=/path/to/python3.12 picks the interpreter; otherwise the first fitting one is used.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-failed test-vllm test-agents test-launch plan costs mutants \
  requirements size lint docs dist install clean

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCHVISION := $(shell sed -n 's/^torchvision==//p' constraints.txt)
PIP_INSTALL := -m pip install --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP_INSTALL) --constraint constraints.txt
CPU_INDEX := --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu
# Bytecode is written, whatever the shell says: compiling all modules takes each process nine seconds.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# Minutes for costly tests: for what the change touches, of these further off, and by turn.
BUDGET := 1,0.7,0.3
export BASE

# vLLM pins what it needs, other versions than ours: it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

# Frameworks whose environments are played: some with what hone needs, some with their own pins.
ENVS_VENV := .venv-envs
ENVS_BIN := $(ENVS_VENV)/bin
ENVS_EXTRAS := .[data,envs]
FREE_VENV := .venv-envs-free
FREE_BIN := $(FREE_VENV)/bin

# What reads the files for schedulers, and checks a release: it adds to $(VENV).
LAUNCH_VENV := .venv-launch
LAUNCH_BIN := $(LAUNCH_VENV)/bin

help:
	@echo "make quickstart   train a tiny model on this machine and draw its report"
	@echo "make test         run all cheap tests, and the costly ones that your change touches most"
	@echo "                  (BASE=commit: what the change is compared with; BUDGET=minutes for"
	@echo "                  costly tests that the change touches, of these further off, by turn)"
	@echo "make test-all     run every test"
	@echo "make test-failed  run those that failed last, one after the other"
	@echo "make plan         list the costly tests, and which of them make test would run, and why"
	@echo "make costs        measure what tests cost (TESTS=files; all by default)"
	@echo "make test-vllm    run the tests that need vLLM, on a CPU, in $(VLLM_VENV)"
	@echo "make test-agents  run the tests that need other frameworks' environments, in $(ENVS_VENV)"
	@echo "                  and $(FREE_VENV)"
	@echo "make test-launch  run the tests that need the parsers of Kubernetes, SkyPilot and others, in"
	@echo "                  $(LAUNCH_VENV)"
	@echo "make mutants      plant each known mistake and say which test kills it (ONLY=text, JOBS=2;"
	@echo "                  SLICE=1/6: every sixth, which takes about an hour)"
	@echo "make requirements say which tests and planted mistakes hold up each requirement"
	@echo "make size         count files, lines by kind and keys"
	@echo "make lint         run the linters and the type checker"
	@echo "make docs         build the documentation in build/docs"
	@echo "make dist         build the wheel and the sdist of a release in dist, and check them"
	@echo "make install      set up $(VENV) only"
	@echo "make clean        remove $(VENV), $(VLLM_VENV), $(ENVS_VENV), $(FREE_VENV),"
	@echo "                  $(LAUNCH_VENV) and caches; run folders stay"

quickstart: $(VENV)/.installed
	@$(BIN)/hone quickstart

test: $(VENV)/.installed-dev
	@$(PYTEST) -n 2 --budget $(BUDGET) $(if $(MINUTES),--minutes $(MINUTES))

test-all: $(VENV)/.installed-dev
	@$(PYTEST) -n 2

plan: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.selection show --budget $(BUDGET)

costs: $(VENV)/.installed-dev
	@$(PYTEST) -n 2 --measure-costs=tests/selection/costs.json $(TESTS)

test-failed: $(VENV)/.installed-dev
	@$(PYTEST) --last-failed --last-failed-no-failures none

test-vllm: $(VLLM_VENV)/.installed
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m vllm tests/engine/test_vllm.py \
	  tests/engine/test_vllm_experts.py tests/vision/test_loaded_elsewhere.py

test-agents: $(ENVS_VENV)/.installed $(FREE_VENV)/.installed
	@OMP_NUM_THREADS=1 $(ENVS_BIN)/python -m pytest -m envs tests/envs/shapes
	@OMP_NUM_THREADS=1 $(FREE_BIN)/python -m pytest -m envs --noconftest \
	  tests/envs/shapes/test_verifiers.py tests/envs/shapes/test_openenv.py

test-launch: $(LAUNCH_VENV)/.installed
	@OMP_NUM_THREADS=1 $(LAUNCH_BIN)/python -m pytest -m launch tests/launch/test_parsers.py

mutants: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.mutants.run --only "$(ONLY)" --area "$(AREA)" --jobs $(or $(JOBS),1) \
	  --slice $(or $(SLICE),1/1)

requirements: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.mutants.requirements

size: $(VENV)/.installed-dev
	@$(BIN)/python benchmarks/size.py

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-docs
	@$(BIN)/python docs/site/build.py

dist: $(LAUNCH_VENV)/.installed
	@rm -rf dist
	@version=$$($(BIN)/python -m hatchling version); \
	grep -q "^## $$version - 2" CHANGELOG.md \
	  || { echo "CHANGELOG.md has no section '## $$version - DATE'" >&2; exit 1; }
	@$(BIN)/python -m hatchling build
	@$(LAUNCH_BIN)/twine check --strict dist/*

install: $(VENV)/.installed

clean:
	@rm -rf $(VENV) $(VLLM_VENV) $(ENVS_VENV) $(FREE_VENV) $(LAUNCH_VENV) dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A step that fails shows the end of its log; a step that succeeds is silent.
quietly = ( $(1) ) > $(@D)/install.log 2>&1 || { tail -n 30 $(@D)/install.log >&2; exit 1; }

$(BIN)/python $(VLLM_BIN)/python $(ENVS_BIN)/python $(FREE_BIN)/python: %/bin/python:
	@python=$$(for name in $(PYTHON) python3.12 python3.13 python3.11 python3 python; do \
	  "$$name" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	    2> /dev/null && { echo "$$name"; break; }; done || true); \
	if [ -z "$$python" ]; then \
	  echo "No Python 3.11, 3.12 or 3.13 with venv found; install one (Debian: python3-venv)," \
	    "or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	echo "Setting up $* with $$("$$python" --version); this takes 1.5 minutes or more, once."; \
	"$$python" -m venv $*

# Without a GPU the CPU build is wanted, ten times smaller. It has its own index; where that cannot
# be reached, or has no build for this system, whatever the configured indices offer is taken.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@$(call quietly, if nvidia-smi -L; then $(INSTALL) "torch==$(TORCH)"; else \
	  $(INSTALL) $(CPU_INDEX) "torch==$(TORCH)+cpu" \
	  || $(INSTALL) "torch==$(TORCH)"; fi)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@$(call quietly, $(INSTALL) --editable .)
	@touch $@

# torchao and fla-core have places of their own, where just the tests of float8 and of their kernels
# look: transformers imports them wherever it finds them. That of torchao takes half a second and
# warns about kernels for GPUs; with fla-core it computes recurrent layers otherwise.
$(VENV)/.installed-dev: $(VENV)/.installed
	@$(call quietly, $(INSTALL) --editable ".[dev]")
	@$(call quietly, $(INSTALL) --no-deps --upgrade --target $(VENV)/fp8 torchao)
	@$(call quietly, $(INSTALL) --no-deps --upgrade --target $(VENV)/fla "fla-core<0.7" einops)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(call quietly, $(INSTALL) --editable ".[docs]")
	@touch $@

# Of what vLLM requires two packages are left out: torchaudio and torchcodec, which text and images
# do not need. torchvision's builds outside the index above want CUDA: without it they can be imported
# with the operators that a file of the tests declares.
$(VLLM_VENV)/.installed: constraints-vllm.txt pyproject.toml | $(VLLM_BIN)/python
	@$(call quietly, \
	  $(VLLM_BIN)/python $(PIP_INSTALL) --no-deps $(CPU_INDEX) "torch==$(TORCH)+cpu" \
	  || $(VLLM_BIN)/python $(PIP_INSTALL) "torch==$(TORCH)")
	@$(call quietly, $(VLLM_BIN)/python $(PIP_INSTALL) --no-deps --requirement constraints-vllm.txt)
	@$(call quietly, $(VLLM_BIN)/python $(PIP_INSTALL) --no-deps $(CPU_INDEX) "torchvision==$(TORCHVISION)")
	@$(call quietly, $(VLLM_BIN)/python -c "import torchvision" \
	  || cp tests/vision/torchvision_operators.py \
	    "$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sitecustomize.py")
	@$(call quietly, $(VLLM_BIN)/python $(PIP_INSTALL) --no-deps --editable .)
	@touch $@

# Of openrlhf, skyrl, trl and verl only the loops are run, so what they require for GPUs is left out.
$(ENVS_VENV)/.installed: constraints.txt constraints-envs.txt pyproject.toml | $(ENVS_BIN)/python
	@$(call quietly, \
	  $(ENVS_BIN)/python $(PIP_INSTALL) --no-deps $(CPU_INDEX) "torch==$(TORCH)+cpu" \
	  || $(ENVS_BIN)/python $(PIP_INSTALL) "torch==$(TORCH)")
	@$(call quietly, $(ENVS_BIN)/python $(PIP_INSTALL) --constraint constraints.txt \
	  --constraint constraints-envs.txt --editable "$(ENVS_EXTRAS)" accelerate aiohttp loguru pytest pytest-timeout)
	@$(call quietly, $(ENVS_BIN)/python $(PIP_INSTALL) --constraint constraints-envs.txt --no-deps \
	  openrlhf skyrl trl verl)
	@touch $@

# hone goes in without what it requires: just its sessions are run there.
$(FREE_VENV)/.installed: constraints-envs.txt pyproject.toml | $(FREE_BIN)/python
	@$(call quietly, $(FREE_BIN)/python $(PIP_INSTALL) --constraint constraints-envs.txt \
	  verifiers openenv pytest pytest-timeout)
	@$(call quietly, $(FREE_BIN)/python $(PIP_INSTALL) --no-deps --editable .)
	@touch $@

# It sees what $(VENV) has. Of SkyPilot only the reading of tasks is run, so it goes in without most of
# what it requires, among which are other versions than hone's.
SKYPILOT_READS_WITH := aiosqlite alembic cachetools casbin colorama fastapi greenlet httpx ijson paramiko \
  passlib prettytable prometheus-client psycopg2-binary sqlalchemy sqlalchemy-adapter
$(LAUNCH_VENV)/.installed: constraints-launch.txt $(VENV)/.installed-dev
	@echo "Setting up $(LAUNCH_VENV); this takes half a minute or more, once."
	@$(BIN)/python -m venv $(LAUNCH_VENV)
	@$(call quietly, \
	  purelib='import sysconfig; print(sysconfig.get_path("purelib"))' \
	  && base=$$($(BIN)/python -c "$$purelib") \
	  && echo "import site; site.addsitedir('$$base')" > "$$($(LAUNCH_BIN)/python -c "$$purelib")/base.pth" \
	  && $(LAUNCH_BIN)/python $(PIP_INSTALL) --constraint constraints.txt \
	    --constraint constraints-launch.txt kubernetes-validate "ray[default]" twine uv $(SKYPILOT_READS_WITH) \
	  && $(LAUNCH_BIN)/python $(PIP_INSTALL) --constraint constraints-launch.txt --no-deps skypilot)
	@touch $@
