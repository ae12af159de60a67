"""Read and write `group_vars/<group>.lock.yml`, the file with the `gpu_lock` of a group.

`gpufleet lock` writes this file. It has only this key, so that a program can overwrite the file
without changing settings that a person has written.
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
    Return the group or host whose variables are in a file. The file's name shows it.

    >>> group_name(Path("gpu_h100.lock.yml")), group_name(Path("gpu_h100.yml"))
    ('gpu_h100', 'gpu_h100')
    """
    return file.name.removesuffix(SUFFIX) if file.name.endswith(SUFFIX) else file.stem


def overlay(
    written: Variables, directories: Iterable[Path], group: str, root: Path | None = None
) -> Variables:
    """
    Return a group's variables, with the group's lock from each `group_vars` directory added.

    `written` has the group's variables from other files. Raises `FleetError` if these also have a
    lock, because one of the two would have no effect. Also raises `FleetError` if a lock's file has
    other keys, because the next `gpufleet lock` would delete them.
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


# Comments that explain the keys to readers of the file. If the reason for a value is known, it is
# above this comment.
_MEANING = {
    "driver": "fabric manager, NSCQ, IMEX and the persistence daemon are of the same version",
    "modules": "flavour of the kernel modules",
    "kernel": "follow: kernels are upgraded as usual. held: kernels keep their version",
    "nvlsm": "subnet manager of NVLink 5 switches",
    "toolkit": "compilers on the node; vLLM's wheels contain the CUDA runtime",
    "dcgm": "monitoring: the host engine and its exporter",
    "persistence": "whether idle GPUs stay initialised",
    "vllm": "must match `vllm`, if set there",
}


def lock_text(lock: GpuLock, source: str, why: Mapping[str, str]) -> str:
    """
    Return the text of the file. `source` says where the versions are from; `why` is {key: reason}.

    Values of the lock that are null are left out, because `cuda`, `dcgm` and `vllm` have them then.
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
    Return the description of a branch, from the table of branches.

    >>> _branch("580")
    'R580: long term support branch, until June 2028'
    """
    known = branch(name)
    if known is None:
        return f"R{name}"
    until = f", until {known.end_of_life:%B %Y}" if known.end_of_life else ""
    return f"R{name}: {known.designation} branch{until}"
