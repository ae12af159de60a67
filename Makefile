# Two commands for a newcomer: `make lab` and `make test`. All of them may be run again, also after
# being killed.
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
UV_VERSION := 0.13.9
RUN := .venv/bin

# Nothing that a shell of the operator's exports may change what is built or run here.
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV

.PHONY: help lab test test-unit test-nodes test-long mutants bench lint gpu-record clean distclean unit-tests quick-tests
help:
	@echo 'make lab        two real nodes with simulated GPUs, deployed until vLLM answers   (root)'
	@echo 'make test       what has to work: one fleet from bare nodes to a bundle, and the rules  (root)'
	@echo 'make test-unit  the tests and checks that need no root'
	@echo 'make test-nodes the other tests on nodes, and those of real programs with deadlines    (root)'
	@echo 'make test-long  the parts of the long tests; PART=alerts runs one                 (root)'
	@echo 'make mutants    what the unit tests notice of changed code; ROOM=planning runs one room'
	@echo 'make bench      what commands, converges and copies cost, with their goals        (root)'
	@echo 'make gpu-record what the probe finds on this machine, for tests/data/nodes/real  (an NVIDIA GPU)'
	@echo 'make clean      take the labs of this checkout away: nodes, mounts, bridges         (root)'
	@echo 'make distclean  clean, and forget every download'

# The environment: uv itself comes by hash from its own lock, everything else from uv.lock.
.venv/.ready: uv.lock pyproject.toml locks/uv.txt
	@lab/bootstrap "$(PYTHON)" "$(UV_VERSION)"
	@touch $@

lab: .venv/.ready
	@$(RUN)/gpufleet lab demo

lint: .venv/.ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python -m tools.check_words

# What failed is run once more, alone, and named in the last line; the run fails even if that passes,
# unless CI is set: tests/support/retry.py.
# A file's tests stay on one core, in their order: some of them hold ports, and a lab is one file's,
# or that of files which tests/conftest.py names together.
TESTS := $(RUN)/python -m tests.support.retry --dist loadfile --no-loadscope-reorder
QUICK := not slow and not long

# Once for a checkout: pytest rewrites all assertions, which each worker would do for itself.
.venv/.compiled: .venv/.ready
	@$(RUN)/python -m pytest --collect-only -qq -m '$(QUICK)' >.venv/compile.log \
	    || { cat .venv/compile.log; exit 1; }
	@touch $@

# The tests begin while the types are still checked.
BESIDE_LINT := --no-print-directory --jobs=2 lint

test-unit: .venv/.ready
	@$(MAKE) $(BESIDE_LINT) unit-tests

unit-tests: .venv/.compiled
	$(TESTS) -q -n logical -m 'not lab and $(QUICK)'

test: .venv/.ready
	@$(RUN)/gpufleet lab require-root 'make test'
	@$(MAKE) $(BESIDE_LINT) quick-tests

# One of three workers walks a fleet from bare nodes to a bundle, and waits for nodes more than it computes.
quick-tests: .venv/.compiled
	$(TESTS) -q -n 3 --durations=15 -m '$(QUICK)'

test-nodes: .venv/.ready
	@$(RUN)/gpufleet lab require-root 'make test-nodes'
	$(TESTS) -v -n 3 --durations=25 -m 'slow and not long' tests/lab $$(grep -rl --include='*.py' 'mark\.slow' tests/unit)

# Without PART: the parts, each with its last result (docs/measured/long-tests.md).
PART ?=
test-long: .venv/.ready
	@test -z "$(PART)" || $(RUN)/gpufleet lab require-root 'make test-long'
	@$(RUN)/python -m tests.support.long_tests $(PART)

# Without ROOM: the rooms, each with its last result (docs/measured/mutants.md). Changes a copy, not this checkout.
ROOM ?=
mutants: .venv/.ready
	@$(RUN)/python -m tools.mutants $(ROOM)

# BENCH='--nodes 8 --rounds 3': what benchmarks.converge.run is told.
BENCH ?= --rounds ansible=1

# All of them, also when one misses its goal; their labs go in any case.
bench: .venv/.ready
	@$(RUN)/gpufleet lab require-root 'make bench'
	trap '$(RUN)/python -m benchmarks.converge.fleet down' EXIT; missed=0; \
	$(RUN)/python -m benchmarks.start_up.run || missed=1; \
	$(RUN)/python -m benchmarks.converge.run $(BENCH) || missed=1; \
	$(RUN)/python -m benchmarks.distribution.run || missed=1; \
	exit $$missed

gpu-record: .venv/.ready
	@$(RUN)/python -m tests.support.record_node --real

clean: .venv/.ready
	@$(RUN)/gpufleet lab clean

distclean: clean
	rm -rf /var/cache/gpufleet-lab .venv .venv-uv
