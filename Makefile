# Start with `make lab` and `make test`. You can run every command again, also after it was killed.
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
UV_VERSION := 0.13.9
RUN := .venv/bin

# Variables that the operator's shell exports must not change what is built or run here.
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV

.PHONY: help lab test test-unit test-nodes test-long mutants bench lint gpu-record clean distclean unit-tests quick-tests
help:
	@echo 'make lab        boot two lab nodes with simulated GPUs, deploy them and wait until vLLM answers  (root)'
	@echo 'make test       lint, the quick tests, and one fleet from bare nodes to a bundle  (root)'
	@echo 'make test-unit  lint, and the unit tests that need no root'
	@echo 'make test-nodes the other tests on lab nodes, and the slow tests of real programs  (root)'
	@echo 'make test-long  list the parts of the long tests; PART=alerts runs the part "alerts"  (root)'
	@echo 'make mutants    change code and report what unit tests do not notice; ROOM=planning: one folder'
	@echo 'make bench      measure commands, deploys and copies, and compare them with goals  (root)'
	@echo 'make gpu-record record the probe of this machine for tests/data/nodes/real  (needs an NVIDIA GPU)'
	@echo 'make clean      remove the nodes, mounts and bridges of this checkout'"'"'s labs  (root)'
	@echo 'make distclean  make clean, and delete all downloads and the virtual environment'

# The virtual environment. uv is installed by hash from locks/uv.txt, all else from uv.lock.
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

# tests/support/retry.py runs each failed test once more, alone, and lists it in the last line. Even
# if the test then passes, the run fails, unless CI is set.
# All tests of a file run on one core in their order, because some tests listen on ports. Each lab
# belongs to one file, or to a group of files in tests/conftest.py.
TESTS := $(RUN)/python -m tests.support.retry --dist loadfile --no-loadscope-reorder
QUICK := not slow and not long

# The tests start while lint still checks the types.
BESIDE_LINT := --no-print-directory --jobs=2 lint

test-unit: .venv/.ready
	@$(MAKE) $(BESIDE_LINT) unit-tests

unit-tests: .venv/.ready
	$(TESTS) -q -n logical -m 'not lab and $(QUICK)'

test: .venv/.ready
	@$(RUN)/gpufleet lab require-root 'make test'
	@$(MAKE) $(BESIDE_LINT) quick-tests

# The walk takes a fleet from bare nodes to a bundle. It starts at once, and its output comes after
# that of the other tests. They have three workers, because many of them mostly wait.
WALK := tests/lab/test_walkthrough.py tests/lab/test_commands.py tests/lab/roles

quick-tests: .venv/.ready
	$(TESTS) -q -n 3 --durations=15 -m '$(QUICK)' $(addprefix --ignore=,$(WALK)) \
	    --beside -v --durations=25 -m '$(QUICK)' $(WALK)

test-nodes: .venv/.ready
	@$(RUN)/gpufleet lab require-root 'make test-nodes'
	$(TESTS) -v -n 3 --durations=25 -m 'slow and not long' tests/lab $$(grep -rl --include='*.py' 'mark\.slow' tests/unit)

# Without PART, list the parts with their last results (docs/measured/long-tests.md).
PART ?=
test-long: .venv/.ready
	@test -z "$(PART)" || $(RUN)/gpufleet lab require-root 'make test-long'
	@$(RUN)/python -m tests.support.long_tests $(PART)

# Without ROOM, list the rooms (folders of src/gpufleet) with their last results
# (docs/measured/mutants.md). The command changes a copy of the code, not this checkout.
ROOM ?=
mutants: .venv/.ready
	@$(RUN)/python -m tools.mutants $(ROOM)

# BENCH='--nodes 8 --rounds 3' sets the options of benchmarks.converge.run.
BENCH ?= --rounds ansible=1

# Run all benchmarks, even if one does not meet its goal, and always remove their labs.
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
