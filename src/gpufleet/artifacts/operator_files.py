"""Read the files of this machine whose paths are in group_vars: locks, keys, tokens. Border."""

from __future__ import annotations

from pathlib import Path

from gpufleet.artifacts import release
from gpufleet.artifacts.release import Release
from gpufleet.errors import FleetError
from gpufleet.settings.serving_settings import EngineSettings


def read(path: str) -> bytes:
    """
    Return the content of a file whose path is in the settings.

    The inventory's loader has already resolved the path. Raises `FleetError` if the file cannot be
    read. The error has the file, the directory that was searched, and the setting with the path.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        here = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise FleetError(
            f"{path} cannot be read{here} ({error.strerror}): see `vllm` in group_vars"
            + (". A relative path starts at the current directory" if here else "")
        ) from None


def release_of(engine: EngineSettings) -> Release:
    """
    Return the release that the settings declare. Raises `FleetError` if a lock cannot be read.
    """
    program = release.PROGRAMS[engine.engine]
    return release.release(engine, read(engine.lock), read(engine.uv_lock), program)
