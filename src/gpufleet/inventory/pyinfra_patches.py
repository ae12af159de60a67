"""Compute pyinfra's operation order without reading source files.

pyinfra orders operations by the source lines that called them, and gets these lines from
`inspect.stack()`. That function reads the module and source text of every frame, which pyinfra does
not use. For `deploys/vllm.py` on 64 nodes, `inspect.stack()` took 3.6 of 20 s (2 ms per operation
and node, pyinfra 3.10); this module takes 0.02 s. tests/unit/inventory/test_pyinfra_patches.py
checks that both functions give the same order.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pyinfra
from pyinfra.api import State
from pyinfra.api.util import PYINFRA_INSTALL_DIR


def patch_operation_order() -> None:
    """Make pyinfra order operations by `operation_order`."""
    # By its name: `pyinfra.api.operation` as an attribute is the decorator.
    operations: Any = importlib.import_module("pyinfra.api.operation")
    operations.get_operation_order_from_stack = operation_order


def operation_order(state: State) -> list[int]:
    """
    Return the line numbers of the current call, outermost first.

    The result equals that of pyinfra.api.util.get_operation_order_from_stack.
    """
    frames = []
    frame = inspect.currentframe()
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    first = 0
    if state.current_deploy_filename:
        for first, (name, _) in enumerate(frames):  # noqa: B007  # the last one where none is it
            if name == state.current_deploy_filename:
                break
    skipped = (PYINFRA_INSTALL_DIR, __file__)
    lines = [number for name, number in frames[first:] if not name.startswith(skipped)]
    return [state.current_op_file_number, *lines] if pyinfra.is_cli else lines
