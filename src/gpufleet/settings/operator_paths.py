"""The files on the operator's machine that settings name, found from the project's root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.paths import shipped_lock
from gpufleet.settings.base import Setting

_LOCKS = frozenset({"lock", "uv_lock", "models_lock"})
_NODE = "{node}"
"""Placeholder for the node's name in the files of exporters."""

Whole = TypeVar("Whole", bound=Setting)


def from_root(settings: Whole, root: Path, node: str) -> Whole:
    """
    Return settings of a node in which every file that is there has its whole path.

    A lock that is not there is the one of that name that gpufleet ships. Any other file that is
    not there stays as it was written: what reads it says what is wrong.
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
    """Return a value in which the settings that it holds are changed."""
    if isinstance(value, Setting):
        return from_root(value, root, node)
    if isinstance(value, Mapping):
        return {key: _below(each, root, node) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_below(each, root, node) for each in value)
    return value
