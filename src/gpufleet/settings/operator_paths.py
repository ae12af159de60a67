"""Resolve the paths of the operator's files in settings against the project's root."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gpufleet.paths import shipped_lock
from gpufleet.settings.base import KeyPath, Setting

_LOCKS = frozenset({"lock", "uv_lock", "models_lock"})
SECRET_FILES = frozenset(
    {
        "api_key_file",
        "cluster_key_file",
        "hf_token_file",
        "pagerduty_key_file",
        "password_file",
        "slack_url_file",
        "upstream_key_file",
        "webhook_url_file",
    }
)
"""Keys whose value is the path of a secret file. A certificate's `key_file` is also secret."""
_NODE = "{node}"
"""Placeholder for the node's name in file names."""

Whole = TypeVar("Whole", bound=Setting)


def from_root(settings: Whole, root: Path, node: str) -> Whole:
    """
    Return a node's settings with the full path of every file that exists.

    If a lock does not exist in the project, gpufleet's lock of the same name replaces it. The path
    of any other missing file stays unchanged, and the code that reads the file reports the error.
    """
    changed = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        found = _named(value, root, node) if _names_files(name) else _below(value, root, node)
        if found != value:
            changed[name] = found
    return settings.model_copy(update=changed) if changed else settings


def _names_files(name: str) -> bool:
    return name.endswith(("_file", "_files")) or name in _LOCKS


def _named(value: Any, root: Path, node: str) -> Any:
    if isinstance(value, str):
        if (root / value.replace(_NODE, node)).is_file():
            return value if root == Path.cwd() else str(root / value)
        return str(shipped_lock(value) or value)
    if isinstance(value, Mapping):
        return {key: _named(each, root, node) for key, each in value.items()}
    return value


def _below(value: Any, root: Path, node: str) -> Any:
    """Return a value with the paths in nested settings resolved."""
    if isinstance(value, Setting):
        return from_root(value, root, node)
    if isinstance(value, Mapping):
        return {key: _below(each, root, node) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_below(each, root, node) for each in value)
    return value


class NamedFile(NamedTuple):
    """A file on the operator's machine that a setting names."""

    at: KeyPath
    path: str
    secret: bool


def named_files(settings: Setting, node: str) -> Iterator[NamedFile]:
    """
    Yield every file on the operator's machine that a node's settings name.

    `settings` are the result of `from_root`. The optional model lock is left out. The keys of a
    mirror's archives are also left out, because they are on the machine that fills the mirror.
    """
    yield from _files_below(settings, (), node)


def _files_below(value: Any, at: KeyPath, node: str) -> Iterator[NamedFile]:
    if isinstance(value, Setting):
        for name in type(value).model_fields:
            below = getattr(value, name)
            if name in {"models_lock", "archives"}:
                continue
            if _names_files(name):
                secret = name in SECRET_FILES or name == "environment_files"
                secret |= name == "key_file" and hasattr(value, "certificate_file")
                for key, path in _texts(below):
                    yield NamedFile((*at, name, *key), path.replace(_NODE, node), secret)
            else:
                yield from _files_below(below, (*at, name), node)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _files_below(below, (*at, str(key)), node)
    elif isinstance(value, tuple):
        for number, below in enumerate(value):
            yield from _files_below(below, (*at, number), node)


def _texts(value: Any) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield (), value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield (str(key),), str(each)
