# Every target sets up what it needs. Needs Python 3.11+, make, a C compiler and Debian's usual tools.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The overrides that `make demo` adds, for example: make demo ARGS="strategy=fsdp precision=bf16"
ARGS ?=

.PHONY: demo test test-slow lint parity-table benchmarks slow-link clean

demo: $(VENV)/.installed  ## two processes on scikit-learn's digits: no account, no download
	$(BIN)/python train.py launch.device=cpu launch.nproc=2 $(ARGS)

test: $(VENV)/.installed-dev  ## everything but the long walks; under 15 minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-dev  ## the long walks: whole products, kills
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

parity-table: $(VENV)/.installed-dev  ## measure the README's tables of combinations and write them there
	$(BIN)/python -m pytest tests/test_parity.py tests/test_products.py -m slow --write-parity-table

benchmarks: $(VENV)/.installed-bench  ## what the README quotes; MNIST=<folder with the four files>
	PYTHONPATH=. $(BIN)/python benchmarks/step_overhead.py
	PYTHONPATH=. $(BIN)/python benchmarks/startup.py
	PYTHONPATH=. $(BIN)/python benchmarks/mnist_epoch.py $(MNIST)
	PYTHONPATH=. $(BIN)/python benchmarks/pipeline.py
	PYTHONPATH=. $(BIN)/python benchmarks/checkpoint.py
	PYTHONPATH=. $(BIN)/python benchmarks/memory.py --every 29

slow-link: $(VENV)/.installed-bench  ## what compression is worth between two hosts; Linux, root, iproute2; 15 minutes
	PYTHONPATH=. $(BIN)/python benchmarks/slow_link.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shardlab needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# --prefer-binary: a source package where a wheel exists would ask for compilers.
$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --prefer-binary -r requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --prefer-binary -r requirements-dev.txt
	touch $@

$(VENV)/.installed-bench: requirements-bench.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --prefer-binary -r requirements-bench.txt
	touch $@

clean:  ## the environment and the caches, never the runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
