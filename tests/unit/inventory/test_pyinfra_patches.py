"""Operations run in the order in which pyinfra itself would run them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pyinfra
import pytest
from pyinfra.api import Config, Inventory, State, deploy, util

from gpufleet.inventory import pyinfra_patches
from tests.support.checkout import ROOT

# A deploy file as pyinfra executes it, by a name that is relative: loops, functions, deploys of
# deploys, several calls in one line.
FILE = """
from pyinfra.api import deploy

@deploy("inner")
def inner():
    asked()
    asked()

@deploy("outer")
def outer():
    for _ in range(2):
        inner()
    [asked() for _ in range(2)]

def role():
    asked(), asked()
    outer()

asked()
role()
(lambda: role())()
"""


@pytest.fixture
def state() -> State:
    found = State(Inventory((["@local"], {})), Config())
    found.current_op_file_number = 3
    return found


@pytest.mark.parametrize("cli", [True, False])
@pytest.mark.parametrize("deploy_file", ["deploys/some.py", "deploys/another.py", None])
def test_the_order_is_pyinfras_own(
    state: State, cli: bool, deploy_file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For frames below the deploy file, for a file that is in no frame, and without one."""
    monkeypatch.setattr(pyinfra, "is_cli", cli)
    state.current_deploy_filename = deploy_file
    found = []

    def asked() -> None:
        # In one line: it counts.
        found.append(
            (util.get_operation_order_from_stack(state), pyinfra_patches.operation_order(state))
        )

    def execute() -> None:
        with pyinfra.context.ctx_state.use(state), pyinfra.context.ctx_host.use(*state.inventory):
            exec(compile(FILE, "deploys/some.py", "exec"), {"asked": asked, "deploy": deploy})

    # Without pytest's frames below it: pyinfra's own looks for the source of each of them.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(execute).result()
    assert len(found) == 17
    assert all(theirs == ours for theirs, ours in found)
    # The deploy file's lines are told apart, where it is the one that runs.
    assert (len({tuple(ours) for _, ours in found}) > 5) == (deploy_file != "deploys/another.py")


def test_what_pyinfra_reads_first_has_operations_ordered_so() -> None:
    """As pyinfra does with config.py: before an inventory or a deploy file."""
    told = (
        "import importlib, runpy; from pyinfra.api import Config; "
        "from pyinfra.context import ctx_config; ctx_config.set(Config()); "
        "runpy.run_path('config.py'); print(importlib.import_module('pyinfra.api.operation')"
        ".get_operation_order_from_stack.__module__)"
    )
    command = [sys.executable, "-c", told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == pyinfra_patches.__name__
