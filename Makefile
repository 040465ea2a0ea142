# make alone lists the commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder  # a file's tests in one process; tests/file_order.py sorts the files
LONG := tests/faults tests/spard/test_isolation.py tests/spard/test_fit.py tests/spard/test_ranks.py \
  tests/spard/test_broken_off.py tests/spard/test_mapped_memory.py tests/spard/test_nf4.py \
  tests/app/inference/test_released.py tests/app/launchers/test_reconcile.py tests/app/test_held_out.py \
  tests/legacy/test_goes_on.py tests/legacy/test_side_by_side.py tests/test_demo.py \
  tests/worker/test_nodes.py

.PHONY: help setup demo test test-fast test-slow lab-test vllm gpu coverage soak clients check docs house sample mutants lock clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(VENV)/installed  ## make the environment in .venv

$(VENV)/installed: pyproject.toml service/pyproject.toml lab/pyproject.toml requirements/dev.lock requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11, 4) <= sys.version_info[:3] < (3, 14))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version); Python 3.11.4 to 3.13 is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps --require-hashes -r requirements/dev.lock
	$(PIP) --no-deps -e . -e ./service -e ./lab
	@touch $@

demo: setup  ## run a poisoned file through the service, undefended and defended; MODEL=real takes SmolLM2-135M
	$(BIN)/python -m examples.demo $(MODEL)

test: setup  ## run the tests of library and service, on real servers; twelve minutes on two cores
	$(BIN)/python -m pytest $(SPREAD) --level test --ignore=tests/lab

test-slow: setup  ## run what make test leaves out: whole services, browsers, kills, packages and jobs that train
	$(BIN)/python -m pytest $(SPREAD) --level slow --ignore=tests/lab

lab-test: setup  ## run the laboratory's tests alone
	$(BIN)/python -m pytest $(SPREAD) tests/lab

test-fast: setup  ## run the tests that need no server, no process of their own and no trained model
	$(BIN)/python -m pytest $(SPREAD) --level fast

soak: setup  ## run the long tests at full length, what `make test` leaves out, and all clients; FAULT_SEED=N repeats a run
	SPARD_SOAK=1 $(BIN)/python -m pytest $(LONG)
	$(BIN)/python -m pytest $(SPREAD) --level soak $(LONG:%=--deselect=%)
	$(BIN)/python -m tests.clients

clients: setup  ## install and run other people's clients against the service; ONLY=KEYS INFERENCE=1 WRITE=1
	$(BIN)/python -m tests.clients $(if $(ONLY),--only $(ONLY)) $(if $(INFERENCE),--with-inference) $(if $(WRITE),--write)

vllm: setup  ## run the serving path through a real vLLM for CPUs, in an environment of its own (downloads 1 GB)
	$(BIN)/python -m tests.vllm_real

gpu: setup  ## run the tests that need a GPU
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python -m pytest -rs tests/spard/test_on_gpu.py tests/app/inference/test_engine_in_bfloat16.py

coverage: setup  ## run the tests and show which lines they miss
	$(BIN)/python -m pytest $(SPREAD) --cov --cov-report=term-missing:skip-covered

lock: setup  ## write the locks anew from the two pyproject.toml
	UV=$(BIN)/uv requirements/lock.sh

check: setup  ## lint, names, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.names
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## write the generated pages anew and build the documentation into build/site, which reads offline
	$(BIN)/python -m tools.references
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

house: setup  ## count modules, imports between folders, circles and the like
	$(BIN)/python -m tools.house

sample: setup  ## draw docstrings, sentences and commit subjects by lot, to be judged by a reader; SEED=1
	@$(BIN)/python -m tools.sample --seed $(or $(SEED),1)

mutants: setup  ## change decisive code at random, see whether tests notice; N=120 SEED=7 JOBS=2
	$(BIN)/python -m tools.mutants $(if $(N),-n $(N)) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS))

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) .demo data build service/build *.egg-info service/*.egg-info
