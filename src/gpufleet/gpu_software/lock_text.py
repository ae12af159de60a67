"""A lock as the text of its file: every value, and why it is there.  Pure.

Texts are quoted always: YAML takes 580 for a number, and 3.10 for 3.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.catalog.driver_branches import branch
from gpufleet.settings.gpu_lock import GpuLock

# What a value means to who reads the file; above it stands why it is what it is, where known.
_MEANING = {
    "driver": "fabric manager, NSCQ, IMEX and the persistence daemon are of the same version",
    "modules": "flavour of the kernel modules",
    "kernel": "follow: kernels are upgraded as elsewhere; held: they stay",
    "nvlsm": "subnet manager of NVLink 5 switches",
    "toolkit": "compilers on the node; vLLM's wheels bring the CUDA runtime",
    "dcgm": "monitoring: the host engine and its exporter",
    "persistence": "whether GPUs stay initialised while nobody uses them",
    "vllm": "must be what `vllm` says, where that says it",
}


def text(lock: GpuLock, source: str, why: Mapping[str, str]) -> str:
    """
    Return the file; `source` says where the versions are from, `why` has reasons by their keys.

    Values that a lock leaves open (null) are left out: `cuda`, `dcgm` and `vllm` say them then.
    """
    lines = [
        f"# {source}",
        "# `gpufleet lock` writes this file anew: change values here, and leave other keys out.",
        "gpu_lock:",
    ]
    for key, value in lock.model_dump().items():
        if value is None:
            continue
        reason = _branch(lock.branch) if key == "driver" else why.get(key)
        lines += [f"  # {each}" for each in (reason, _MEANING[key]) if each]
        lines += _lines(key, value)
    return "\n".join([*lines, ""])


def _lines(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"  {key}: {json.dumps(value)}"
        return
    yield f"  {key}:"
    for name, each in value.items():
        if each is not None:
            yield f"    {name}: {json.dumps(each)}"


def _branch(name: str) -> str:
    """
    Return what is known of a branch.

    >>> _branch("580")
    'R580: long term support branch, until June 2028'
    """
    known = branch(name)
    if known is None:
        return f"R{name}"
    until = f", until {known.end_of_life:%B %Y}" if known.end_of_life else ""
    return f"R{name}: {known.designation} branch{until}"
