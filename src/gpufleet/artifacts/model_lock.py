"""
Read and write the lock file with the Hub's hashes of models' files. Border: it uses the file.

    {"schema": 1, "models": {"org/name": {"<revision>": {
      "model.safetensors": ["sha256", "..."], "config.json": ["git", "..."]}}}}

`sha256` is the SHA-256 of the content, which the Hub uses for large files. `git` is the SHA-1 of
git's header and the content, which the Hub uses for small files. `gpufleet lock INVENTORY --models`
writes the lock file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gpufleet.artifacts.model_files import Checkpoint
from gpufleet.errors import FleetError
from gpufleet.paths import write_whole
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import EngineSettings, Served

SCHEMA = 1
_DIGEST = {"sha256": re.compile(r"[0-9a-f]{64}"), "git": re.compile(r"[0-9a-f]{40}")}

Files: TypeAlias = Mapping[str, tuple[str, str]]
"""{path of a file in the model: (algorithm, digest in hex)}."""

Models: TypeAlias = Mapping[tuple[str, str], Files]
"""Files by (repository, revision)."""


def read_lock(path: Path) -> dict[tuple[str, str], Files]:
    """
    Return the models in a lock. If the file does not exist, the result is empty.

    Raises `FleetError` if the lock cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return dict(_entries(document))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FleetError(
            f"{path} cannot be read as a lock of models ({error}): restore it, or remove it "
            "and run `gpufleet lock INVENTORY --models`"
        ) from None


def _entries(document: Any) -> Iterator[tuple[tuple[str, str], Files]]:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}")
    for repository, revisions in document["models"].items():
        for revision, files in revisions.items():
            yield (repository, revision), {name: _digest(each) for name, each in files.items()}


def _digest(each: Any) -> tuple[str, str]:
    algorithm, digest = each
    if not _DIGEST[algorithm].fullmatch(digest):
        raise ValueError(f"{digest!r} is not a {algorithm} hash")
    return algorithm, digest


def lock_text(models: Models) -> str:
    """Return the text of the lock file for these models."""
    named: dict[str, dict[str, dict[str, list[str]]]] = {}
    for (repository, revision), files in sorted(models.items()):
        held = {name: list(each) for name, each in sorted(files.items())}
        named.setdefault(repository, {})[revision] = held
    return json.dumps({"schema": SCHEMA, "models": named}, indent=1) + "\n"


def write_lock(path: Path, models: Models) -> None:
    """Write the file atomically. Raises `FleetError` if it cannot be written."""
    write_whole(path, lock_text(models))


def locked_files(wanted: Checkpoint, servers: EngineSettings) -> Files | None:
    """Return a model's locked files, or None if the model is not locked."""
    return read_lock(Path(servers.models_lock)).get((wanted.repository, wanted.revision))


def judge_models(settings: Mapping[str, NodeSettings]) -> tuple[str, ...]:
    """
    Return a remark if there are models without locked hashes, or else nothing.

    `settings` are the nodes' settings with the flags of their presets. Raises `FleetError` if a
    model with `trust-remote-code` is not locked, unless its entry sets `allow_unlocked_code`.
    """
    unlocked = {
        (model, repository): served for model, repository, served in _unlocked(settings.values())
    }
    if refused := tuple(
        f"serving.{model}: `trust-remote-code` runs code of {repository}, but no lock contains the "
        "hashes of this code: write a lock with `gpufleet lock INVENTORY --models`, or set "
        "`allow_unlocked_code: true`"
        for (model, repository), served in sorted(unlocked.items())
        if _runs_code(served) and not served.allow_unlocked_code
    ):
        raise FleetError(*refused)
    names = ", ".join(sorted({repository for _, repository in unlocked}))
    if not names:
        return ()
    return (
        f"{names}: nodes accept any downloaded files, because no lock contains the hashes of the "
        "files: write a lock with `gpufleet lock INVENTORY --models`",
    )


def _unlocked(settings: Iterable[NodeSettings]) -> Iterator[tuple[str, str, Served]]:
    """Yield (entry, repository, settings) of each download whose hashes are in no lock."""
    locks: dict[str, Models] = {}
    for each in settings:
        if each.servers is None:
            continue
        path = each.servers.models_lock
        if path not in locks:
            locks[path] = read_lock(Path(path))
        for model, served in each.serving.items():
            for repository, revision in served.hub_sources:
                if (repository, revision) not in locks[path]:
                    yield model, repository, served


def _runs_code(served: Served) -> bool:
    return any(
        name.lstrip("-").replace("_", "-") == "trust-remote-code" and value is not False
        for name, value in served.flags.items()
    )
