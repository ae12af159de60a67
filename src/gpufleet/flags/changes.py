"""Provide what schemas do not have: replacements of flags, changed meanings, and reasons. Pure.

Contract: `changes()` is the table in data/changes.json. It was written by hand from the source and
the release notes of the releases in `schema.versions()`. A schema shows that a name was removed,
but only this table has the replacement. Whether a name exists in a release is determined only by
the schema.

An entry applies to one name in the releases from `since` on, up to but excluding `until`. `since`
is the first release that is known to have the change. An earlier release whose source was not read
may also have the change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

from gpufleet.flags.schema import sort_key

ANY_VALUE = "*"
"""Key of `Change.rewrite` that applies to no value, and to a single value without its own row."""
ANY_VALUES = "**"
"""Key of `Change.rewrite` that applies to several values."""

Rewrites: TypeAlias = Mapping[str, tuple[str, ...]]


class ChangeKind(StrEnum):
    """The kind of change to a name."""

    NEVER = "never"  # no release has it, although documents name it
    REMOVED = "removed"  # removed without replacement
    RENAMED = "renamed"  # removed, but a different name does the same
    VALUE = "value"  # `values` are no longer accepted
    FORM = "form"  # the value has a different notation
    MEANING = "meaning"  # the same arguments have a different effect
    DEFAULT = "default"  # the default has changed
    DEPRECATED = "deprecated"  # still accepted, without effect or deprecated


ABSENT = frozenset({ChangeKind.NEVER, ChangeKind.REMOVED, ChangeKind.RENAMED})
"""The kinds of changes after which a release does not have the name."""
_BREAKING = ABSENT | {ChangeKind.VALUE}


@dataclass(frozen=True, slots=True)
class Change:
    """
    One change of a flag of `vllm serve` or of an environment variable.

    If `since` is None, the change applies to every release. A changed default is reported if one of
    the flags in `beside` is set, or if `beside` is empty. `when` is the condition under which the
    change has an effect, in words. None means that it always has. `breaks` is true if the server
    does not start, or no longer behaves as requested.

    `rewrite` has, for each value, the arguments that replace the flag. For a variable, these
    arguments are added. If the arguments are empty, the flag is removed. If `rewrite` is None, the
    operator must decide. `then` is an additional step for the operator. `keep` has the arguments
    (NAME=value for a variable) with which the old default still applies.
    """

    name: str
    kind: ChangeKind
    since: str | None
    why: str
    until: str | None = None
    values: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    when: str | None = None
    breaks: bool = False
    replacement: str | None = None
    rewrite: Rewrites | None = None
    keep: tuple[str, ...] | None = None
    then: str | None = None

    @property
    def is_variable(self) -> bool:
        """Return whether the change is about an environment variable."""
        return not self.name.startswith("-")

    def as_json(self) -> dict[str, Any]:
        """
        Return the change as JSON values. Rewrites are omitted, because they depend on a flag's
        value.
        """
        return {
            "name": self.name,
            "kind": self.kind.value,
            "since": self.since,
            "until": self.until,
            "values": list(self.values),
            "beside": list(self.beside),
            "when": self.when,
            "breaks": self.breaks,
            "replacement": self.replacement,
            "keep": None if self.keep is None else list(self.keep),
            "then": self.then,
            "why": self.why,
        }

    def is_in_force(self, version: str) -> bool:
        """Return whether the change applies to this release."""
        at = sort_key(version)
        return (self.since is None or sort_key(self.since) <= at) and (
            self.until is None or at < sort_key(self.until)
        )

    def rewritten_arguments(self, values: tuple[str, ...] = ()) -> tuple[str, ...] | None:
        """
        Return the arguments that replace the flag with these values.

        The result is empty if the flag must be removed, and None if the operator must decide.

        >>> changes_of("--swap-space")[-1].rewritten_arguments(("4",))
        ()
        """
        if self.rewrite is None:
            return None
        row = self.rewrite.get(values[0]) if len(values) == 1 else None
        if row is None:
            row = self.rewrite.get(ANY_VALUES if len(values) > 1 else ANY_VALUE)
        if row is None:
            return None
        filled: list[str] = []
        for token in row:
            if token == "{values}":  # noqa: S105  # a place to fill, not a secret
                filled += values
            elif token == "{pairs}":  # noqa: S105
                pairs = _pairs(values)
                if pairs is None:
                    return None
                filled.append(pairs)
            elif "{value}" in token:
                if not values:
                    return None
                filled.append(token.replace("{value}", values[0]))
            else:
                filled.append(token)
        return tuple(filled)


@cache
def changes() -> tuple[Change, ...]:
    """Return the whole table. Flags come first. Entries are sorted by name, then by release."""
    text = resources.files("gpufleet.flags").joinpath("data/changes.json").read_text("utf-8")
    return tuple(_change(entry) for entry in json.loads(text))


@cache
def _by_name() -> Mapping[str, tuple[Change, ...]]:
    found: dict[str, tuple[Change, ...]] = {}
    for change in changes():
        found[change.name] = (*found.get(change.name, ()), change)
    return found


def changes_of(name: str) -> tuple[Change, ...]:
    """Return the changes of a flag (with its dashes) or a variable, oldest first."""
    if name.startswith("--"):
        head, dot, tail = name.partition(".")
        name = head.replace("_", "-") + dot + tail
    return _by_name().get(name, ())


def removal_reason(name: str, version: str) -> Change | None:
    """Return the change because of which this release does not have a name, or None if unknown."""
    return next(
        (
            known
            for known in changes_of(name)
            if known.kind in ABSENT and known.is_in_force(version)
        ),
        None,
    )


def changes_between(old: str, new: str) -> tuple[Change, ...]:
    """Return the changes that apply to release `new` but not to `old`."""
    return tuple(
        change for change in changes() if change.is_in_force(new) and not change.is_in_force(old)
    )


def _change(entry: Mapping[str, Any]) -> Change:
    known = {field.name for field in fields(Change)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(
            f"data/changes.json: the entry of {entry.get('name')} has unknown keys: "
            f"{', '.join(unknown)}"
        )
    return Change(
        **{
            **entry,
            "kind": ChangeKind(entry["kind"]),
            "breaks": entry.get("breaks", entry["kind"] in _BREAKING),
            "values": tuple(entry.get("values", ())),
            "beside": tuple(entry.get("beside", ())),
            "rewrite": _rewrites(entry.get("rewrite")),
            "keep": tuple(entry["keep"]) if "keep" in entry else None,
        }
    )


def _rewrites(written: Any) -> Rewrites | None:
    """Parse a rewrite, which is one list for all values or a mapping of values to lists."""
    if written is None:
        return None
    if isinstance(written, list):
        return {ANY_VALUE: tuple(written), ANY_VALUES: tuple(written)}
    return {value: tuple(tokens) for value, tokens in written.items()}


def _pairs(values: tuple[str, ...]) -> str | None:
    """Return `image=4,video=1`, the form of old releases, as JSON, or None if it is invalid."""
    pairs = {}
    for pair in ",".join(values).split(","):
        key, equals, number = pair.partition("=")
        if not equals or not number.strip().isdigit():
            return None
        pairs[key.strip()] = int(number)
    return json.dumps(pairs)
