"""NVIDIA's binding, as nodes load it."""

from __future__ import annotations

import subprocess
import sys

from gpufleet.remote import payload
from tests.support.checkout import ROOT

SOURCE = ROOT / "src"
PROGRAM = """
import sys
sys.path[:0] = [{source!r}, {binding!r}]
from gpufleet.on_node.common import nvml
assert nvml.binding() is nvml.binding()
print("shutil" in sys.modules, "ctypes.util" in sys.modules)
import ctypes.util
print(ctypes.util.find_library("c"))
"""


def test_what_the_binding_never_calls_is_not_loaded_for_it_and_is_there_for_others() -> None:
    """It would load readers of archives, a third of what the binding costs a node."""
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            PROGRAM.format(source=str(SOURCE), binding=str(payload.binding().parent)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["False False", "libc.so.6"]


def test_the_binding_never_calls_it() -> None:
    """With another release of it, look whether what stands in for it still may be nothing."""
    assert payload.binding().read_text().count("find_library") == 1
