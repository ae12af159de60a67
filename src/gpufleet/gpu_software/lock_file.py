"""`group_vars/<group>.lock.yml`: the file with a group's `gpu_lock` that `gpufleet lock` writes.

The file has only that key, so that a program can overwrite it without changing hand-written
settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpufleet.catalog.driver_branches import branch
from gpufleet.errors import FleetError
from gpufleet.settings import variables
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.variables import Variables

SUFFIX = ".lock.yml"
KEY = "gpu_lock"


def lock_path(group_vars: Path, group: str) -> Path:
    """Return the path of a group's lock below a `group_vars` directory."""
    return group_vars / f"{group}{SUFFIX}"


def group_name(file: Path) -> str:
    """
    Return the group or host whose variables a file has, from the file's name.

    >>> group_name(Path("gpu_h100.lock.yml")), group_name(Path("gpu_h100.yml"))
    ('gpu_h100', 'gpu_h100')
    """
    return file.name.removesuffix(SUFFIX) if file.name.endswith(SUFFIX) else file.stem


def overlay(
    written: Variables, directories: Iterable[Path], group: str, root: Path | None = None
) -> Variables:
    """
    Return a group's variables, overridden by its lock from each `group_vars` directory.

    `written` has the group's variables from other files. Raises `FleetError` for a lock in both
    places, one of which would have no effect, and for other keys in a lock's file, which the next
    lock would delete.
    """
    problems = []
    locked: Variables = {}
    for file in (lock_path(directory, group) for directory in directories):
        if not file.is_file():
            continue
        found = variables.load_file(file, root)
        if not found:
            problems.append(
                f"{variables.shown_path(file, root)}: the file is empty: write it with `gpufleet "
                "lock`, or remove it"
            )
        problems += [
            f"{origin}: {key}: this file may only contain `{KEY}`, because `gpufleet lock` "
            "overwrites the file: move the key to "
            f"{variables.shown_path(file.with_name(f'{group}.yml'), root)}"
            for key, (_, origin) in found.items()
            if key != KEY
        ]
        if KEY in found and KEY in written:
            problems.append(
                f"{found[KEY][1]}: {KEY}: the group also has a lock in {written[KEY][1]}: remove "
                "one of the two locks"
            )
        locked = variables.merge(locked, found)
    if problems:
        raise FleetError(*problems)
    return variables.merge(written, locked)


# Comments on the meaning of values, for readers of the file; the reason for a value, if known,
# stands above it.
_MEANING = {
    "driver": "fabric manager, NSCQ, IMEX and the persistence daemon are of the same version",
    "modules": "flavour of the kernel modules",
    "kernel": "follow: kernels are upgraded as usual; held: they keep their version",
    "nvlsm": "subnet manager of NVLink 5 switches",
    "toolkit": "compilers on the node; vLLM's wheels contain the CUDA runtime",
    "dcgm": "monitoring: the host engine and its exporter",
    "persistence": "whether idle GPUs stay initialised",
    "vllm": "must match `vllm`, if set there",
}


def lock_text(lock: GpuLock, source: str, why: Mapping[str, str]) -> str:
    """
    Return the file's text; `source` is the versions' origin, `why` has reasons by key.

    Open values of a lock (null) are omitted, because `cuda`, `dcgm` and `vllm` then have them.
    """
    lines = [
        f"# {source}",
        "# `gpufleet lock` overwrites this file: change values here, and add no other keys.",
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
    Return a branch's description from the table.

    >>> _branch("580")
    'R580: long term support branch, until June 2028'
    """
    known = branch(name)
    if known is None:
        return f"R{name}"
    until = f", until {known.end_of_life:%B %Y}" if known.end_of_life else ""
    return f"R{name}: {known.designation} branch{until}"
