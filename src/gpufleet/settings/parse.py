"""Parse one node's variables: return its settings, or raise every mistake with the path of its key.

Pure: takes plain values. `variables.py` records the file that set each key. `node_variables.py`
adds the file and line to each mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from pydantic import ValidationError

from gpufleet.redact import hide_secrets
from gpufleet.settings import lock_defaults
from gpufleet.settings.base import KeyPath
from gpufleet.settings.gpu_lock import GpuLock, lock_objections
from gpufleet.settings.mirror_rewrite import rewrite_addresses, unreachable_addresses
from gpufleet.settings.mistake_sentence import describe_mistake
from gpufleet.settings.node_settings import OF_THE_ENGINE, NodeSettings
from gpufleet.settings.open_secrets import open_secrets
from gpufleet.settings.server_routes import route_mistakes
from gpufleet.settings.server_sandbox import sandbox_mistakes


class SettingsError(Exception):  # it is a list of mistakes, not a program error
    """
    The mistakes in a node's variables, each as (path of the key, sentence).

    If a key contradicts another key, `against` maps the path of the first to the path of the
    second.
    """

    def __init__(
        self,
        *mistakes: tuple[KeyPath, str],
        against: Mapping[KeyPath, KeyPath] | None = None,
    ) -> None:
        self.mistakes = mistakes
        self.against = against or {}
        super().__init__("; ".join(starmap(with_key, mistakes)))


def with_key(at: KeyPath, what: str) -> str:
    """Return a mistake as text that begins with its key. A mistake in all settings has no key."""
    return f"{'.'.join(map(str, at))}: {what}" if at else what


def parse_settings(data: Mapping[str, Any]) -> NodeSettings:
    """
    Return the settings of a node, as roles use them, from its merged variables.

    `data` has only variables that are settings. Raises `SettingsError` with every mistake at once,
    each with the path of its key.
    """
    settings = rewrite_addresses(parse_written(data))
    found = (
        *unreachable_addresses(settings),
        *route_mistakes(settings),
        *sandbox_mistakes(settings),
    )
    if found:
        raise SettingsError(*found)
    return settings


def parse_written(data: Mapping[str, Any]) -> NodeSettings:
    """
    Return the settings of a node with the addresses as written, even if there is a mirror.

    Unlike `parse_settings`, this function accepts control routes and settings that fail on an
    offline node or in a server's sandbox.
    """
    secrets = tuple(open_secrets(data))
    lock, mistakes = _lock(data)
    mistakes += [(each.at, each.sentence) for each in secrets]
    against: dict[KeyPath, KeyPath] = {}
    if lock:
        differing = tuple(lock_defaults.differences(data, lock))
        mistakes += [(each.at, str(each)) for each in differing]
        against = {each.at: each.locked_at for each in differing}
        mistakes += [(each.at, each.what) for each in lock_objections(lock) if each.refused]
    given = lock_defaults.fill_in(data, lock) if lock else dict(data)
    given, shared = _with_shared(given)
    try:
        settings = NodeSettings.model_validate(given)
    except ValidationError as error:
        # If the lock is invalid, values that only the lock has are missing. This is not reported.
        no_lock = bool(mistakes) and lock is None
        found = [
            each
            for each in error.errors()
            if not (no_lock and each["type"] == "missing") and each["loc"][:2] not in shared
        ]
        mistakes += [each for each in map(describe_mistake, found) if each not in mistakes]
    if secrets:  # messages about other mistakes may contain them
        values = [each.value for each in secrets]
        mistakes = [(at, hide_secrets(what, values)) for at, what in mistakes]
    if mistakes:
        raise SettingsError(*mistakes, against=against)
    return settings


def _with_shared(given: dict[str, Any]) -> tuple[dict[str, Any], frozenset[KeyPath]]:
    """
    Return the variables after `sglang` has taken keys from `vllm`, and the paths of the taken keys.

    Keys that belong to one engine (release, lock, environment variables) are never taken.
    """
    vllm, sglang = given.get("vllm"), given.get("sglang")
    if not isinstance(vllm, Mapping) or not isinstance(sglang, Mapping):
        return given, frozenset()
    taken = {key: vllm[key] for key in vllm if key not in {*sglang, *OF_THE_ENGINE}}
    paths = frozenset(("sglang", key) for key in taken)
    return {**given, "sglang": {**taken, **sglang}}, paths


def _lock(data: Mapping[str, Any]) -> tuple[GpuLock | None, list[tuple[KeyPath, str]]]:
    """
    Return the lock in the variables, or None if it is missing or invalid, and the mistakes in it.
    """
    if data.get("gpu_lock") is None:
        return None, []
    try:
        return GpuLock.model_validate(data["gpu_lock"]), []
    except ValidationError as error:
        found = [describe_mistake(each) for each in error.errors()]
        return None, [(("gpu_lock", *at), what) for at, what in found]
