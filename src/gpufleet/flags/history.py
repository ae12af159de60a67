"""One flag or variable in every packaged release.  Pure.

Contract: what `schema.load` of each release says of the name, without reading all the rest of all
releases: a page about one flag must not take longer than the check of a command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufleet.flags import schema
from gpufleet.flags.schema import Flag, Variable

_DECODER = json.JSONDecoder()
_FLAG_STARTS = '{"name":'


@dataclass(frozen=True, slots=True)
class Span:
    """From which to which packaged release, both included, something was the same."""

    first: str
    last: str
    value: Any

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def of_flag(option: str) -> dict[str, Flag | None]:
    """Return the flag that an option string names in each release, oldest first; None: none."""
    if option.startswith("--"):
        option = "--" + option[2:].replace("_", "-")
    return {version: _flag(text, version, option) for version, text in schema.documents().items()}


def of_variable(name: str) -> dict[str, Variable | None]:
    """Return an environment variable as each release has it, oldest first; None: not at all."""
    return {version: _variable(text, version, name) for version, text in schema.documents().items()}


def spans(
    history: Mapping[str, Flag | Variable | None], key: Callable[[Any], Any], of: Sequence[str] = ()
) -> list[Span]:
    """
    Return the runs of releases in which `key` was the same; releases without the name have none.

    `of`: only these releases, instead of all.
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


def _partial(version: str, **parts: Any) -> schema.Schema:
    empty = {"vllm": version, "flags": [], "classes": {}, "values": {}, "env": {}}
    return schema.from_document({**empty, **parts})
