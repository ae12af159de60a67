"""RUNS ON THE LAB'S NODES: let SGLang run on CPUs without its GPU kernels.

SGLang imports packages for GPUs on every platform, and calls nothing of them with PyTorch's own
attention and sampling (measured with 0.5.23). They are not installed: importing one gives a module
in which every name is there and does nothing (`on_node/flags/placeholder.py` of gpufleet, which
travels in the wheel).

A line of `gpufleet_lab_sglang.pth` imports this at each start of the release's Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

from gpufleet_lab_sglang.placeholder import make_placeholder

ABSENT = (
    "cutlass",
    "decord",
    "flashinfer",
    "quack",
    "sgl_kernel",
    "tilelang",
    "timm",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "triton",
)
"""Packages that are absent from a release."""


MISSING = frozenset({"triton.runtime", "triton.runtime.driver"})
"""Names that do not exist; without Triton's driver SGLang uses the CPU."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in MISSING:
            raise AttributeError(name)
        found = make_placeholder(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """
    A finder of absent packages and their modules; it is asked last, so real ones have precedence.
    """

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Return the specification of a module of an absent package."""
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Create a module without content."""
        module = _Module(spec.name)
        module.__path__ = []
        vars(module)["__version__"] = "0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because the module has no code."""


sys.meta_path.append(Finder())
