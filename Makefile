# Each target sets up what it needs: a virtual environment in .venv, made once and after a change of pyproject.toml or constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# The rooms of the algorithm: their tests train little, and few of them start other processes.
FAST := tests/common tests/problems tests/trees tests/losses tests/optim tests/config tests/engine

.PHONY: demo test fast full bench bits mutants check lint clean

demo: $(READY)
	$(BIN)/mheads demo

# Two processes share the tests. Those of ranks, which start several processes of their own, come after the others.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --ignore tests/distributed
	$(BIN)/python -m pytest -n 2 tests/distributed

# While you work on the rooms that FAST lists: some 105 seconds of CPU time, shared by two processes.
fast: $(READY)
	$(BIN)/python -m pytest -n 2 $(FAST)

# The full-size checks that `make test` leaves out.
full: $(READY)
	$(BIN)/python -m pytest -m full

# The benchmarks of benchmarks/README.md, all of them.
bench: $(READY)
	$(BIN)/python -m benchmarks all

# Whether runs have the bits that they had at an earlier commit: tests/bits/BASE names it.
bits: $(READY)
	$(BIN)/python tests/bits/run.py

# Whether the tests would notice bugs: puts some two hundred into a copy, one at a time.
mutants: $(READY)
	$(BIN)/python tests/mutants/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mheads needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
