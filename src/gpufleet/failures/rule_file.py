"""
Read and validate the rules that explain log lines. The rules are data (`data/*.yml`).

If several rules match a line, the first rule applies. The order is that of FILES, and then that in
each file. Therefore more specific rules come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.failures import line_pattern
from gpufleet.failures.evidence import CONDITIONS
from gpufleet.failures.line_pattern import LinePattern

DATA = Path(__file__).with_name("data")
FILES = ("sglang", "memory", "model", "driver", "network", "host", "symptoms")

COMPONENTS = frozenset(
    {
        "vllm",
        "sglang",
        "nccl",
        "cuda",
        "driver",
        "host",
        "rdma",
        "ray",
        "container",
        "build",
        "files",
    }
    | {"requests"}
)
ANY = "*"
"""In `follows`: all other failures."""

_KEYS = frozenset(
    {"id", "component", "kind", "lines", "tells", "cause", "fix", "command", "setting"}
    | {"follows", "until", "excuses", "releases", "source"}
)
_REQUIRED = ("id", "component", "lines", "cause", "fix", "source")
_TELL_KEYS = frozenset({"when", "cause", "fix", "command", "setting", "look"})
_TELL_REQUIRED = ("when", "cause", "fix", "look")


class Kind(StrEnum):
    """What a line means: a failure, the consequence of a different failure, or a remark."""

    FAILURE = "failure"
    DERIVED = "derived"  # a consequence, which is never reported as the cause
    NOTE = "note"  # not a failure: the logs of healthy servers may have this line


@dataclass(frozen=True)
class Advice:
    """A cause and its fix. If there are any, also the command to run and the setting to change."""

    cause: str
    fix: str
    command: str = ""
    setting: str = ""


@dataclass(frozen=True)
class PossibleCause:
    """
    One of several possible causes of a line: the condition that proves it (`when`), and where to
    find the evidence (`look`).
    """

    when: str
    advice: Advice
    look: str


@dataclass(frozen=True)
class Rule:
    """
    What a log line means. `source` is the file or issue of a public project that contains the line.
    """

    id: str
    component: str
    kind: Kind
    patterns: tuple[LinePattern, ...]
    advice: Advice
    source: str
    tells: tuple[PossibleCause, ...] = ()
    follows: tuple[str, ...] = ()
    """
    The rules whose failures cause this one, if both match. ANY: every earlier failure causes it.
    """
    until: tuple[str, ...] = ()
    """Texts. If a later line contains one of them, the failure is over."""
    excuses: tuple[str, ...] = ()
    """
    The rules whose later lines follow from this one and are not failures, for example the lines of
    a server that is stopping.
    """
    releases: str = ""

    @property
    def derived(self) -> bool:
        """Return whether the line is only a consequence of a different failure."""
        return self.kind is Kind.DERIVED


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules in this package, in their order."""
    return parse(
        entry for name in FILES for entry in _load((DATA / f"{name}.yml").read_text("utf-8"))
    )


def _load(text: str) -> list[Any]:
    import yaml

    # The result is that of safe_load. If PyYAML has libyaml, this takes a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load(text, Loader=loader))  # noqa: S506


def parse(entries: Iterator[Any]) -> tuple[Rule, ...]:
    """Return the rules in the data. Raises `FleetError` with all problems."""
    found: list[Rule] = []
    problems: list[str] = []
    for at, entry in enumerate(entries):
        name = entry.get("id", f"number {at + 1}") if isinstance(entry, dict) else f"number {at}"
        try:
            found.append(_rule(entry))
        except ValueError as error:
            problems.append(f"rule {name}: {error}")
    ids = Counter(rule.id for rule in found)
    problems += [
        f"rule {name}: {count} rules have this id" for name, count in ids.items() if count > 1
    ]
    for rule in found:
        named = {*rule.follows, *rule.excuses} - {ANY} | {
            tell.when.split()[-1] for tell in rule.tells if tell.when.startswith("seen ")
        }
        problems += [
            f"rule {rule.id}: there is no rule {each}" for each in sorted(named - ids.keys())
        ]
    if problems:
        raise FleetError(*problems)
    return tuple(found)


def _rule(entry: Any) -> Rule:
    if not isinstance(entry, Mapping):
        raise ValueError("it is not a mapping")  # noqa: TRY004
    _check_keys(entry, _KEYS, _REQUIRED)
    if entry["component"] not in COMPONENTS:
        raise ValueError(f"component {entry['component']!r} is none of {sorted(COMPONENTS)}")
    kind = entry.get("kind", Kind.FAILURE)
    if kind not in list(Kind):
        raise ValueError(f"kind {kind!r} is none of {[*map(str, Kind)]}")
    lines = _texts(entry, "lines")
    if not lines:
        raise ValueError("it has no lines")
    return Rule(
        id=str(entry["id"]),
        component=entry["component"],
        kind=Kind(kind),
        patterns=tuple(line_pattern.parse(each) for each in lines),
        advice=_advice(entry),
        source=str(entry["source"]),
        tells=tuple(map(_tell, entry.get("tells", []))),
        follows=_texts(entry, "follows"),
        until=_texts(entry, "until"),
        excuses=_texts(entry, "excuses"),
        releases=str(entry.get("releases", "")),
    )


def _tell(entry: Mapping[str, Any]) -> PossibleCause:
    _check_keys(entry, _TELL_KEYS, _TELL_REQUIRED)
    if str(entry["when"]).rpartition(" ")[0] not in CONDITIONS:
        raise ValueError(f"when {entry['when']!r} does not begin with one of {CONDITIONS}")
    return PossibleCause(entry["when"], _advice(entry), entry["look"])


def _advice(entry: Mapping[str, Any]) -> Advice:
    return Advice(
        *(str(entry[key]).strip() for key in ("cause", "fix")),
        *(str(entry.get(key, "")) for key in ("command", "setting")),
    )


def _texts(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} is not a list of texts")
    return tuple(value)


def _check_keys(entry: Mapping[str, Any], known: frozenset[str], required: tuple[str, ...]) -> None:
    if missing := [key for key in required if not entry.get(key)]:
        raise ValueError(f"it has no {', '.join(missing)}")
    if unknown := sorted(map(str, entry.keys() - known)):
        raise ValueError(f"it has unknown keys: {', '.join(unknown)}")
