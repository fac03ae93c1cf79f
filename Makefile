# `make bench` and `make test` each make .venv, install what they need, and run.
UV := $(shell command -v uv 2>/dev/null)
PYTHON ?= python3
BIN := .venv/bin
# A process per core, up to eight, of one thread each: the tests are many and small. Each takes tests that stand
# together, so that what a module sets up or compiles once is there once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: bench test integration compatibility mutants commands lint docs clean

.venv/bin/python:
ifdef UV
	uv venv --python $(PYTHON) .venv
else
	$(PYTHON) -m venv .venv
endif

# One stamp for each set of extras, renewed when pyproject.toml changes.
.venv/installed-%: pyproject.toml | .venv/bin/python
ifdef UV
	uv pip install --python $(BIN)/python -e '.[$*]'
else
	$(BIN)/python -m pip install -e '.[$*]'
endif
	touch $@

bench: .venv/installed-bench
	$(BIN)/python -m benchmarks bench

test: .venv/installed-test
	$(PYTEST)

# Tests with the packages of others, which are many: Lightning, Accelerate, transformers, timm, Opacus, the rivals.
integration: .venv/installed-integration
	$(PYTEST) -m integration

compatibility: .venv/installed-integration
	$(BIN)/python -m tests.integration.compatibility

# In a clone, since cosmic-ray changes files where they are; prints what no test has noticed. It takes hours.
mutants: .venv/installed-mutants
	rm -rf build/mutants && git clone --quiet . build/mutants
	cd build/mutants && export PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 && config=tests/mutants/cosmic-ray.toml && \
	cosmic-ray init $$config session.sqlite && cr-filter-operators session.sqlite $$config && \
	cosmic-ray exec $$config session.sqlite && cr-report --show-diff --surviving-only session.sqlite

# The commands of README and benchmarks/README, in clones of what is committed.
commands: .venv/installed-test
	$(BIN)/python -m tests.commands

lint: .venv/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: .venv/installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

clean:
	rm -rf .venv build *.egg-info .cache runs
