# make demo    set everything up in .venv and run the main job
# make test    set everything up, then lint, types, tests, docs: what CI runs
# Both work from a clean clone, twice in a row, and offline the second time.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.torchcrew-setup
CONSTRAINTS := constraints/dev.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The first of the two that starts: a version manager's shim may exist and still refuse.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
CODE := $(wildcard src tests examples benchmarks tools docs/snippets)
# `make test PYTEST_ARGS="-k lease -x"` narrows a run.
PYTEST_ARGS ?=
# Another project's suite, and a checkout or archive of it, for `make peer`; see tools/peer_suites.py.
SUITE ?= torchdata-dataloader
CHECKOUT ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo lint format test test-faults bench docs peer clean

help:
	@echo "make setup | demo | test | lint | format | test-faults | bench | docs | peer SUITE=name CHECKOUT=path | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c $(CONSTRAINTS) "$(TORCH)"
	$(PIP) install -c $(CONSTRAINTS) -e ".[demo,dev,docs,frameworks,notebook]"
	touch $@

demo: setup
	$(BIN)/torchcrew demo

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict src

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

test: lint
	$(BIN)/python tools/run_tests.py $(PYTEST_ARGS)
	$(MAKE) docs

test-faults: setup
	$(BIN)/python -m pytest -m faults --timeout 900 -o faulthandler_timeout=900 $(PYTEST_ARGS)

bench: setup
	$(BIN)/python -m benchmarks

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

peer: setup
	$(PIP) install -q -c $(CONSTRAINTS) -e ".[peer]"
	$(BIN)/python tools/peer_suites.py $(SUITE) $(CHECKOUT)

clean:
	rm -rf $(VENV) site build dist out torchcrew-demo.png .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
