# The two commands of a fresh machine: `make run` (ESPO against PPO, a few minutes) and `make test`.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.PHONY: run test lab bench notebooks export clean

# Installed once; again when the requirements change. torch comes first and pinned, or pip would take a CUDA build of several GB.
$(VENV)/.installed: settings.ini setup.py
	@echo "Installing into $(VENV) (a few minutes, once)"
	command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 or newer, or name one with make PYTHON=python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
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
	@$(BIN)/python -m pytest -n 2 tests

lab: $(VENV)/.installed-dev
	@$(BIN)/jupyter lab nbs

bench: $(VENV)/.installed-dev
	@$(BIN)/python tests/bench.py

export: $(VENV)/.installed-dev
	@$(BIN)/nbdev_clean && $(BIN)/nbdev_export

clean:
	rm -rf runs results/*/ build dist *.egg-info
