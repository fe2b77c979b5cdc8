# Every target makes its own virtual environment first: Python 3.11 or newer, git and make are all that a machine needs.
PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
WORKERS ?= 2

STAMP := $(VENV)/stamp-$(shell git hash-object pyproject.toml)
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-exhaustive check lint types layers notebooks clean

demo: $(STAMP)
	$(BIN)/autopar demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(TESTS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow $(TESTS)

test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive $(TESTS)

check: lint types layers notebooks

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Import directions and the examples in docstrings.
layers: $(STAMP)
	$(BIN)/python -m pytest --doctest-modules autopar cost_models tests/test_layers.py

notebooks: $(STAMP)
	$(BIN)/python -m pytest -m notebook tests/test_notebooks.py

# Named after the hash of pyproject.toml: the environment is made again when that changes, and only then.
$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	rm -f $(VENV)/stamp-*
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
