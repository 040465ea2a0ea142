# make alone lists the commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check clean

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/installed  ## make the environment in .venv

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## run a poisoned file through the service, undefended and defended
	$(BIN)/python -m examples.demo

test: setup  ## run the tests
	$(BIN)/python -m pytest -n 2

soak: setup  ## inject 1,000 faults and 200 kills for each defence; FAULT_SEED=N repeats a run
	SPARD_SOAK=1 $(BIN)/python -m pytest tests/faults

check: setup  ## lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) .demo data build *.egg-info
