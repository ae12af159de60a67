"""Look up one flag or variable in every packaged release.  Pure.

Contract: the results are equal to those of `schema.load` for each release. Only the entry of the
one flag or variable is parsed, so that a page about a flag does not take longer than the check of a
command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufleet.flags import schema
from gpufleet.flags.schema import Computed, Flag, Schema, Variable, sort_key

_DECODER = json.JSONDecoder()
_FLAG_STARTS = '{"name":'


@dataclass(frozen=True, slots=True)
class Span:
    """A range of packaged releases, both ends included, with the same value."""

    first: str
    last: str
    value: Any

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def flag_history(option: str) -> dict[str, Flag | None]:
    """
    Return the flag of an option string in each release, oldest first.

    The value is None for releases that do not have the flag.
    """
    if option.startswith("--"):
        option = "--" + option[2:].replace("_", "-")
    return {version: _flag(text, version, option) for version, text in schema.documents().items()}


def variable_history(name: str) -> dict[str, Variable | None]:
    """
    Return an environment variable in each release, oldest first.

    The value is None for releases that do not have the variable.
    """
    return {version: _variable(text, version, name) for version, text in schema.documents().items()}


def spans(
    history: Mapping[str, Flag | Variable | None], key: Callable[[Any], Any], of: Sequence[str] = ()
) -> list[Span]:
    """
    Return the ranges of successive releases for which `key` returns the same value.

    Releases that do not have the name are omitted. If `of` is not empty, only these releases are
    considered.
    """
    found: list[Span] = []
    previous: str | None = None
    for version, there in history.items():
        if of and version not in of:
            continue
        if there is not None:
            value = key(there)
            if found and found[-1].last == previous and found[-1].value == value:
                found[-1] = Span(found[-1].first, version, value)
            else:
                found.append(Span(version, version, value))
        previous = version
    return found


def releases_between(old: Schema, new: Schema) -> tuple[str, ...]:
    """
    Return the releases after `old` up to and including `new`. For a downgrade, return ().
    """
    low, high = sort_key(old.version), sort_key(new.version)
    return tuple(one for one in schema.versions() if low < sort_key(one) <= high)


def first_without(name: str, old: Schema, new: Schema) -> str | None:
    """
    Return the first release after `old` that does not have a flag or variable.

    None if all releases up to `new` have it.
    """
    past = _of(name)
    return next((one for one in releases_between(old, new) if past.get(one) is None), None)


def first_with(name: str, old: Schema, new: Schema) -> str | None:
    """
    Return the first release after `old` that has a flag or variable.

    None if no release up to `new` has it.
    """
    past = _of(name)
    return next((one for one in releases_between(old, new) if past.get(one) is not None), None)


def first_default(name: str, after: Any, old: Schema, new: Schema) -> str | None:
    """
    Return the first release from which on, up to `new`, the default is `after`.

    Only releases after `old` are considered. None if the default of the last one differs.
    """
    past = _of(name)
    first = None
    for version in reversed(releases_between(old, new)):
        there = past.get(version)
        if there is None or defaults_differ(there.default, after):
            break
        first = version
    return first


def first_without_value(name: str, value: str, old: Schema, new: Schema) -> str | None:
    """
    Return the first release after `old` that has the flag, but does not list this value for it.

    None if there is no such release up to `new`.
    """
    for version in releases_between(old, new):
        release = schema.load(version)
        flag = release.flag(name)
        if flag and value not in release.listed_values(flag):
            return version
    return None


def defaults_differ(before: Any, after: Any) -> bool:
    """Return whether two defaults differ. Null, empty and computed defaults count as equal."""
    return repr(_essence(before)) != repr(_essence(after))


def is_open(default: Any) -> bool:
    """Return whether a default is null, empty or computed, so that vLLM decides when it starts."""
    return _essence(default) is None


def _essence(value: Any) -> Any:
    if isinstance(value, Computed) or value in (None, "", [], {}):
        return None
    return value.lower() if isinstance(value, str) else value


def _of(name: str) -> Mapping[str, Flag | Variable | None]:
    return flag_history(name) if name.startswith("-") else variable_history(name)


def _flag(text: str, version: str, option: str) -> Flag | None:
    for start in _occurrences(text, json.dumps(option)):
        begin = text.rfind(_FLAG_STARTS, 0, start + len(_FLAG_STARTS))
        if begin < 0:
            continue
        entry, end = _DECODER.raw_decode(text, begin)
        if end > start:
            flag = _partial(version, flags=[entry]).flag(option)
            if flag is not None:
                return flag
    return None


def _variable(text: str, version: str, name: str) -> Variable | None:
    key = f"{json.dumps(name)}:{{"
    for start in _occurrences(text, key):
        entry, _ = _DECODER.raw_decode(text, start + len(key) - 1)
        if "default" in entry and "type" in entry:
            return _partial(version, env={name: entry}).environment[name]
    return None


def _occurrences(text: str, part: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _partial(version: str, **parts: Any) -> Schema:
    empty = {"vllm": version, "flags": [], "classes": {}, "values": {}, "env": {}}
    return schema.from_document({**empty, **parts})
