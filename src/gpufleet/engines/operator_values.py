"""Check and merge the flags and variables that operators set for a stage's process. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpufleet.artifacts.model_files import model_directory
from gpufleet.converge.quoting import UNQUOTABLE, is_unquotable
from gpufleet.errors import FleetError
from gpufleet.flags import arguments
from gpufleet.planning.stage import Stage
from gpufleet.settings.base import KeyPath
from gpufleet.settings.serving_settings import Argument, EngineSettings, Served

# systemd ignores variables with other names, and logs them as invalid (systemd.exec(5)).
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def argument_lines(
    stage: Stage,
    model: Served,
    planned: Mapping[KeyPath, tuple[str, Argument]],
    *,
    merged: Iterable[str] = (),
) -> list[tuple[KeyPath, tuple[str, ...]]]:
    """
    Return the planned flags, and after them the operator's flags.

    Each flag with its values is one group, which becomes one line. `planned` maps the path of a
    setting to the name and value of its flag. `merged` are the operator's flags that `planned`
    already contains. Raises `FleetError` for values that cannot be passed to a process.
    """
    own = ("serving", stage.model)
    given = {
        (*own, "flags", name): (name, value)
        for name, value in sorted(model.flags.items())
        if name not in set(merged)
    }
    directory = model_directory(model)
    found: list[tuple[KeyPath, tuple[str, ...]]] = []
    problems = [f"serving.{stage.model}.model {UNQUOTABLE}"] if is_unquotable(directory) else []
    for key, (name, value) in [*planned.items(), *given.items()]:
        said = arguments.words(name, value)
        if wrong := _wrong_flag(value, said):
            problems.append(f"serving.{stage.model}.flags.{name} {wrong}")
        elif said:
            found.append((key, said))
    if problems:
        raise FleetError(*problems)
    return found


def _wrong_flag(value: Argument, said: tuple[str, ...]) -> str | None:
    if value == []:
        return (
            "is an empty list, but a command line cannot contain an empty list: remove the key, or "
            "set it to null"
        )
    if isinstance(value, list) and any(word.startswith("-") for word in said[1:]):
        return (
            "has a value that starts with a dash, but the server would read such a value as the "
            "next flag"
        )
    if any(is_unquotable(word) for word in said):
        return UNQUOTABLE
    return None


def variables(stage: Stage, model: Served, settings: EngineSettings) -> dict[str, str]:
    """
    Return the operator's variables for the stage. The model's settings override the engine's.

    Raises `FleetError` with every invalid name, and every value that systemd cannot express.
    """
    ours = {
        f"{settings.engine}.environment.{name}": (name, value)
        for name, value in settings.environment.items()
    } | {
        f"serving.{stage.model}.environment.{name}": (name, value)
        for name, value in model.environment.items()
    }
    if problems := [
        f"{key} {wrong}"
        for key, (name, value) in ours.items()
        if (wrong := _wrong_variable(name, value))
    ]:
        raise FleetError(*problems)
    return settings.environment | model.environment


def _wrong_variable(name: str, value: str) -> str | None:
    if not _VARIABLE.fullmatch(name):
        return (
            "is not a valid name of a variable: write letters, digits and _, and do not begin with "
            "a digit"
        )
    if is_unquotable(value):
        return UNQUOTABLE
    return None


def search_path(release: str, toolkit: str | None) -> dict[str, str]:
    """
    Return PATH for the directory of a release.

    If there is a CUDA toolkit ("13-0"), return CUDA_HOME as well.
    """
    path = [f"{release}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    if toolkit is None:
        return {"PATH": ":".join(path)}
    cuda = f"/usr/local/cuda-{toolkit.replace('-', '.')}"
    return {"PATH": ":".join([path[0], f"{cuda}/bin", *path[1:]]), "CUDA_HOME": cuda}
