"""Fill in settings of `cuda`, `dcgm` and `vllm` from `gpu_lock`, and find contradictions.  Pure.

The functions read the variables before validation. After validation, a written value cannot be
distinguished from a default. Because of the following rules, variables are valid both before and
after a group is locked:

* A value that is both in a section and in the lock must be equal in both.
* A value that is only in the lock is filled into the section, so that roles read only the section.
* A toolkit or DCGM that is only in `cuda` or `dcgm` is filled into the lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.catalog.driver_branches import cuda_major
from gpufleet.settings.base import KeyPath
from gpufleet.settings.gpu_lock import GpuLock

_CUDA = {"toolkit": "branch", "version": "version"}

# (key of the value in its section, key of the value in the lock)
_SAME: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("cuda", "toolkit"), ("toolkit", "branch")),
    (("cuda", "version"), ("toolkit", "version")),
    (("dcgm", "version"), ("dcgm", "version")),
    (("dcgm", "exporter_version"), ("dcgm", "exporter")),
    (("vllm", "version"), ("vllm", "version")),
)
# The toolkit of the CUDA that vLLM's torch is built for (13.0 in vLLM 0.32 and 0.33).
TOOLKIT = "13-0"

# The path of an interpreter, with its version. Paths such as /usr/bin/python3 have no version.
_PYTHON = re.compile(r"/python(3\.\d+)$")


@dataclass(frozen=True)
class Difference:
    """Two different values for the same version, each with its key."""

    at: KeyPath
    value: Any
    locked_at: KeyPath
    locked: Any

    def __str__(self) -> str:
        return (
            f"is {_shown(self.value)}, but {'.'.join(map(str, self.locked_at))} is "
            f"{_shown(self.locked)}: correct the wrong value, or remove "
            f"{'.'.join(map(str, self.at))}"
        )


def differences(given: Mapping[str, Any], lock: GpuLock) -> Iterator[Difference]:
    """Yield contradictions between variables and their lock."""
    written = given["gpu_lock"]
    for at, locked_at in _SAME:
        # A toolkit with `profile: none` has neither branch nor version.
        said = locked_at[:1] if locked_at[0] == "toolkit" else locked_at
        if _has(given, at) and _has(written, said):
            locked = _value(lock.model_dump(), locked_at)
            if _value(given, at) != locked:
                yield Difference(at, _value(given, at), ("gpu_lock", *locked_at), locked)
    if lock.dcgm and given.get("dcgm", ...) is None:
        yield Difference(("dcgm",), None, ("gpu_lock", "dcgm", "version"), lock.dcgm.version)
    major, served = _value(given, ("dcgm", "cuda_major")), cuda_major(lock.branch)
    if major is not None and served is not None and major != served:
        serving = f"{lock.driver}, a driver for CUDA {served}"
        yield Difference(("dcgm", "cuda_major"), major, ("gpu_lock", "driver"), serving)
    python = _PYTHON.search(str(_value(given, ("vllm", "python"))))
    if lock.vllm and python and python[1] != lock.vllm.python:
        at = ("vllm", "python")
        yield Difference(at, _value(given, at), ("gpu_lock", "vllm", "python"), lock.vllm.python)


def fill_in(given: Mapping[str, Any], lock: GpuLock) -> dict[str, Any]:
    """
    Return variables with `cuda`, `dcgm`, `vllm` and the lock's toolkit and DCGM filled in.

    >>> fill_in({"gpu_lock": {"driver": "580"}, "cuda": {}}, GpuLock(driver="580"))["cuda"]
    {'toolkit': None, 'version': None}
    """
    done = {**given, "gpu_lock": {**_only_beside(given), **given["gpu_lock"]}}
    if isinstance(cuda := given.get("cuda"), Mapping):
        toolkit = _value(done, ("gpu_lock", "toolkit"), {"branch": None, "version": None})
        done["cuda"] = {**{key: toolkit.get(part) for key, part in _CUDA.items()}, **cuda}
    if lock.dcgm and isinstance(dcgm := given.get("dcgm", {}), Mapping):
        version, exporter = lock.dcgm.version, lock.dcgm.exporter
        done["dcgm"] = {"version": version, "exporter_version": exporter, **dcgm}
    if isinstance(dcgm := done.get("dcgm"), Mapping) and (major := cuda_major(lock.branch)):
        done["dcgm"] = {"cuda_major": major, **dcgm}
    if lock.vllm and isinstance(vllm := given.get("vllm"), Mapping):
        done["vllm"] = {"version": lock.vllm.version, **vllm}
    return done


def lock_key(key: KeyPath) -> KeyPath | None:
    """
    Return the key in the lock whose value is used if `key` is not set, or None if there is none.

    >>> lock_key(("vllm", "version"))
    ('gpu_lock', 'vllm', 'version')
    """
    found = {**dict(_SAME), ("dcgm", "cuda_major"): ("driver",)}.get(key)
    return ("gpu_lock", *found) if found else None


def _only_beside(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions in `cuda` and `dcgm` as the lock's keys `toolkit` and `dcgm`."""
    found: dict[str, Any] = {}
    version = _value(given, ("cuda", "version"))
    branch = _value(given, ("cuda", "toolkit"), TOOLKIT)
    if branch and version:
        found["toolkit"] = {"profile": "full", "branch": branch, "version": version}
    if version := _value(given, ("dcgm", "version")):
        exporter = _value(given, ("dcgm", "exporter_version"))
        found["dcgm"] = {"version": version, "exporter": exporter}
    return found


def _has(data: Any, path: KeyPath) -> bool:
    return _value(data, path, absent := object()) is not absent


def _value(data: Any, path: KeyPath, default: Any = None) -> Any:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return default
        data = data[part]
    return data


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
