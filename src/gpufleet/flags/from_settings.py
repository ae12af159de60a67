"""Return the flags and variables of servers from an operator's settings.

Pure except `from_file`. The result has only what the operator sets, without the values that the
plan adds (addresses, names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.flags.arguments import words


@dataclass(frozen=True)
class ServerFlags:
    """
    One server's flags and variables.

    `where` is the server's name in messages. It is "" if there is only one server.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    where: str = ""


def from_file(path: Path) -> tuple[ServerFlags, ...]:
    """
    Return the flags and variables of each model in `serving` of a file such as group_vars.

    The variables in `vllm.environment` apply to all servers. Raises `FleetError` for invalid
    settings.
    """
    from gpufleet.settings import variables

    values = {key: value for key, (value, _) in variables.load_file(path).items()}
    models = values.get("serving")
    if not isinstance(models, Mapping) or not models:
        raise FleetError(f"{path}: the file has no `serving`, so gpufleet has no flags to compare")
    vllm = values.get("vllm")
    shared = vllm.get("environment") if isinstance(vllm, Mapping) else None
    problems: list[str] = []
    found = []
    for name, model in models.items():
        where = f"serving.{name}"
        if not isinstance(model, Mapping):
            problems.append(f"{path}: {where} must be a mapping (KEY: VALUE)")
            continue
        arguments = _mapping(model, "flags", f"{path}: {where}", problems)
        own = _mapping(model, "environment", f"{path}: {where}", problems)
        environment = {**(shared if isinstance(shared, Mapping) else {}), **own}
        argv = [str(model.get("model", "MODEL"))]
        if model.get("tensor_parallel", 1) != 1:
            argv += ["--tensor-parallel-size", str(model["tensor_parallel"])]
        for flag, value in arguments.items():
            argv += words(str(flag).lstrip("-"), value)
        found.append(
            ServerFlags(
                tuple(argv), {str(key): str(value) for key, value in environment.items()}, where
            )
        )
    if problems:
        raise FleetError(*problems)
    return tuple(found)


def _mapping(model: Mapping[str, Any], key: str, where: str, problems: list[str]) -> dict[str, Any]:
    value = model.get(key) or {}
    if isinstance(value, Mapping):
        return dict(value)
    problems.append(f"{where}.{key} must be a mapping (KEY: VALUE)")
    return {}
