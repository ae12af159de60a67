"""Compare an operator's flags and variables between two releases of vLLM.  Pure.

Contract: changed names and values come from the two schemas, and replacements come from `changes`.
An argument that `check` refuses only in the new release also counts as breaking. The comparison
reports:

- the operator's flags and variables that the new release refuses, ignores or reads differently;
- changed defaults of other flags, if `changes` has an entry for the default, or if the explanations
  relate the flag to one of the operator's flags;
- new flags that data/useful.json recommends for the operator's flags.

All other new and removed names are omitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from gpufleet.flags import changes, check, command_line, explain, history
from gpufleet.flags.changes import Change, ChangeKind
from gpufleet.flags.command_line import GivenFlag, Unparsed, UnparsedReason
from gpufleet.flags.from_settings import ServerFlags
from gpufleet.flags.schema import Flag, Schema


class DifferenceKind(StrEnum):
    """The kind of a change, in printing order."""

    REMOVED = "removed"
    RENAMED = "renamed"
    VALUE = "value"
    MEANING = "meaning"
    DEPRECATED = "deprecated"
    DEFAULT = "default"
    HIDDEN = "hidden"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class Difference:
    """
    One change between two releases.

    `breaks` is true if the new release refuses the argument, or if the argument no longer has the
    intended effect. `argument` is the operator's argument, or None for a flag that the operator
    does not set. `rewritten` has the arguments that replace it. If `rewritten` is empty, the
    argument is removed. If it is None, the operator must decide. `keep` has arguments with which
    the old behaviour still applies. `then` is an additional step for the operator. `at` has the
    indexes of the argument in argv.
    """

    kind: DifferenceKind
    name: str
    said: str
    breaks: bool = False
    argument: str | None = None
    since: str | None = None
    when: str | None = None
    replacement: str | None = None
    rewritten: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    then: str | None = None
    at: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        return {
            "kind": self.kind.value,
            "name": self.name,
            "breaks": self.breaks,
            "argument": self.argument,
            "said": self.said,
            "since": self.since,
            "when": self.when,
            "replacement": self.replacement,
            "rewritten": None if self.rewritten is None else list(self.rewritten),
            "keep": None if self.keep is None else list(self.keep),
            "then": self.then,
        }


def diff(old: Schema, new: Schema, yours: ServerFlags) -> tuple[Difference, ...]:
    """Return the changes that matter for these settings. Breaking changes come first."""
    found: dict[tuple[DifferenceKind, str, str | None], Difference] = {}
    for one in _all_differences(old, new, yours):
        found.setdefault((one.kind, one.name, one.argument), one)
    for one in _refusal_differences(old, new, yours, tuple(found.values())):
        found.setdefault((one.kind, one.name, one.argument), one)
    order = list(DifferenceKind)
    return tuple(sorted(found.values(), key=lambda one: (not one.breaks, order.index(one.kind))))


def rewrite_command_line(
    yours: ServerFlags, differences: Iterable[Difference], new: Schema
) -> tuple[str, ...] | None:
    """
    Return the command line with all breaking arguments replaced.

    None if the operator must decide first, or if the new release refuses the result.
    """
    broken = [one for one in differences if one.breaks]
    if any(one.rewritten is None for one in broken):
        return None
    instead = {one.at[0]: one for one in broken if one.at}
    dropped = {place for one in broken for place in one.at}
    line: list[str] = []
    for place, word in enumerate(yours.argv):
        if place in instead:
            line += instead[place].rewritten or ()
        elif place not in dropped:
            line.append(word)
    for one in broken:
        if not one.at:
            line += one.rewritten or ()
    gone = {one.name for one in broken if not one.name.startswith("-")}
    left = {name: value for name, value in yours.environment.items() if name not in gone}
    return tuple(line) if check.check_command_line(new, line, left).accepted else None


@dataclass(frozen=True)
class Overview:
    """
    Counts of all differences between two releases.

    `notable` has the changes that are in the table of changes.
    """

    counts: Mapping[str, int]
    notable: tuple[Change, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the overview as JSON values."""
        return {
            "counts": dict(self.counts),
            "notable": [change.as_json() for change in self.notable],
        }


def overview(old: Schema, new: Schema) -> Overview:
    """Return the counts of the changes between two releases, and the notable changes."""
    before, after = set(old.by_option), set(new.by_option)
    names = {flag.name for flag in old.flags if not flag.positional}
    renamed = {
        name
        for name in names - after
        if (gone := changes.removal_reason(name, new.version)) and gone.kind is ChangeKind.RENAMED
    }
    both = [
        (flag, now)
        for flag in old.flags
        if not flag.positional and (now := new.flag(flag.name)) and now.name == flag.name
    ]
    counts = {
        "flags removed": len(names - after - renamed),
        "flags renamed": len(renamed),
        "flags added": len(
            {flag.name for flag in new.flags if not flag.positional and flag.name not in before}
        ),
        "defaults changed": sum(
            history.defaults_differ(flag.default, now.default) for flag, now in both
        ),
        "deprecated": sum(now.deprecated and not flag.deprecated for flag, now in both),
        "hidden from help": len(_hidden(new) - _hidden(old) & after),
        "variables removed": len(set(old.environment) - set(new.environment)),
        "variables added": len(set(new.environment) - set(old.environment)),
    }
    known = before | set(old.environment)
    notable = tuple(
        change
        for change in changes.changes_between(old.version, new.version)
        if change.name in known or change.name == "-O"
    )
    return Overview(counts, notable)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """
    A new flag that is useful for command lines that set one of the flags in `beside`.

    If `beside` is empty, the flag is useful for all command lines.
    """

    name: str
    beside: tuple[str, ...]
    why: str


@cache
def recommended_flags() -> tuple[Recommendation, ...]:
    """
    Return the flags to recommend if the new release has them and the old one does not.

    Source: data/useful.json.
    """
    text = resources.files("gpufleet.flags").joinpath("data/useful.json").read_text("utf-8")
    return tuple(
        Recommendation(name, tuple(entry["with"]), entry["why"])
        for name, entry in json.loads(text).items()
    )


def _all_differences(old: Schema, new: Schema, yours: ServerFlags) -> Iterator[Difference]:
    line = command_line.parse(old, yours.argv)
    for given in line.given:
        yield from _flag_differences(given, old, new, yours.argv)
    for unparsed in line.unparsed:
        yield from _unparsed_differences(unparsed, old, new, yours.argv)
    yield from _variable_differences(old, new, yours)
    options = {given.flag.name for given in line.given}
    options |= {unparsed.argument.partition("=")[0] for unparsed in line.unparsed}
    set_names = options | set(yours.environment)
    yield from _default_differences(old, new, set_names)
    yield from _recommended_differences(old, new, set_names)


# -- flags and variables that the operator sets ----------------------------------------------------


def _flag_differences(
    given: GivenFlag, old: Schema, new: Schema, argv: Sequence[str]
) -> Iterator[Difference]:
    argument = " ".join(argv[place] for place in given.at)
    now = new.flag(given.option)
    if given.option == "-O" and new.syntax.optimization:
        yield from _level_differences(given, old, new, argument)
    elif now is None or not _same(now, given.flag):
        yield _removed_flag(given, old, new, argument)
    else:
        yield from _value_differences(given, now, old, new, argument)
        yield from _meaning_differences(given, old, new, argument)
        yield from _deprecation_differences(given, now, argument, new)


def _same(now: Flag, before: Flag) -> bool:
    """Return whether an option still sets the same value."""
    return now.name == before.name or now.dest == before.dest or before.name in now.options


def _removed_flag(given: GivenFlag, old: Schema, new: Schema, argument: str) -> Difference:
    known = changes.removal_reason(given.option, new.version)
    if known is None and (base := changes.removal_reason(given.flag.name, new.version)):
        known = base
    if known is not None:
        # If a removed flag was only switched off, the argument can be removed.
        whole = (
            ()
            if given.negated
            else None
            if given.dotted
            else known.rewritten_arguments(given.values)
        )
        if given.negated and known.name == given.option:
            whole = known.rewritten_arguments(given.values)
        return Difference(
            DifferenceKind.RENAMED if known.kind is ChangeKind.RENAMED else DifferenceKind.REMOVED,
            given.option,
            known.why,
            breaks=True,
            argument=argument,
            since=known.since,
            replacement=known.replacement,
            rewritten=whole,
            then=known.then,
            at=given.at,
        )
    heir = new.by_dest.get(given.flag.dest)
    since = history.first_without(given.option, old, new)
    if heir is not None and not given.negated:
        return Difference(
            DifferenceKind.RENAMED,
            given.option,
            f"{heir.name} replaces this flag",
            breaks=True,
            argument=argument,
            since=since,
            replacement=heir.name,
            rewritten=(heir.name, *given.values),
            at=given.at,
        )
    return Difference(
        DifferenceKind.REMOVED,
        given.option,
        f"vLLM {new.version} has no such flag",
        breaks=True,
        argument=argument,
        since=since,
        at=given.at,
    )


def _level_differences(
    given: GivenFlag, old: Schema, new: Schema, argument: str
) -> Iterator[Difference]:
    """
    Yield the changes of -O. Its JSON value changed its meaning, but a number is still a level.
    """
    level = given.values[:1] in {(number,) for number in "0123"} or (
        bool(given.dotted) and all(part.path == ("level",) for part in given.dotted)
    )
    for change in changes.changes_of("-O"):
        if change.is_in_force(new.version):
            yield Difference(
                DifferenceKind.MEANING,
                "-O",
                change.why,
                breaks=not level,
                argument=argument,
                since=change.since,
                replacement=change.replacement,
                rewritten=None if level else change.rewritten_arguments(given.values),
                at=given.at,
            )
    heir = new.by_dest.get(given.flag.dest)
    if heir is not None and not level:
        yield from _value_differences(given, heir, old, new, argument)


def _value_differences(
    given: GivenFlag, now: Flag, old: Schema, new: Schema, argument: str
) -> Iterator[Difference]:
    if given.flag.takes_value != now.takes_value:
        takes = "needs a value now" if now.takes_value else "no longer accepts a value"
        yield Difference(
            DifferenceKind.VALUE,
            given.option,
            f"the flag {takes}",
            breaks=True,
            argument=argument,
            at=given.at,
        )
        return
    before, after = old.listed_values(given.flag), new.listed_values(now)
    for value in given.values:
        if value in before and after and value not in after:
            known = _value_change(given.flag.name, value, new.version)
            yield Difference(
                DifferenceKind.VALUE,
                given.flag.name,
                known.why if known else f"the flag no longer accepts the value {value}",
                breaks=True,
                argument=argument,
                since=known.since
                if known
                else history.first_without_value(given.flag.name, value, old, new),
                replacement=known.replacement if known else None,
                rewritten=known.rewritten_arguments(given.values) if known else None,
                then=known.then if known else None,
                at=given.at,
            )
    for key in _lost_keys(given, now, old, new):
        yield Difference(
            DifferenceKind.VALUE,
            given.flag.name,
            f"the JSON of this flag no longer has the key {key}",
            breaks=True,
            argument=argument,
            at=given.at,
        )


def _meaning_differences(
    given: GivenFlag, old: Schema, new: Schema, argument: str
) -> Iterator[Difference]:
    for change in changes.changes_between(old.version, new.version):
        if change.kind not in {ChangeKind.MEANING, ChangeKind.FORM}:
            continue
        if change.name not in {given.flag.name, given.option}:
            continue
        if change.values and not set(change.values) & set(given.values):
            continue
        instead = change.rewritten_arguments(given.values)
        if change.kind is ChangeKind.FORM and change.rewrite and instead is None:
            continue  # the value is already in the new form
        yield Difference(
            DifferenceKind.MEANING,
            given.flag.name,
            change.why,
            breaks=change.breaks,
            argument=argument,
            since=change.since,
            when=change.when,
            replacement=change.replacement,
            rewritten=instead,
            then=change.then,
            at=given.at,
        )


def _deprecation_differences(
    given: GivenFlag, now: Flag, argument: str, new: Schema
) -> Iterator[Difference]:
    if now.deprecated and not given.flag.deprecated:
        known = next(
            (
                change
                for change in changes.changes_of(given.flag.name)
                if change.kind is ChangeKind.DEPRECATED and change.is_in_force(new.version)
            ),
            None,
        )
        yield Difference(
            DifferenceKind.DEPRECATED,
            given.flag.name,
            known.why if known else f"this flag is deprecated in vLLM {new.version}",
            argument=argument,
            since=known.since if known else None,
            replacement=known.replacement if known else None,
            rewritten=known.rewritten_arguments(given.values)
            if known and not given.dotted
            else None,
            at=given.at,
        )
    hidden = given.option in now.hidden or now.help_hidden
    was_hidden = given.option in given.flag.hidden or given.flag.help_hidden
    if hidden and not was_hidden:
        yield Difference(
            DifferenceKind.HIDDEN,
            given.option,
            "still accepted, but no longer in vLLM's help",
            argument=argument,
        )


def _unparsed_differences(
    unparsed: Unparsed, old: Schema, new: Schema, argv: Sequence[str]
) -> Iterator[Difference]:
    """
    Yield the difference for an argument that the old release cannot parse, unless the new one can.
    """
    option = unparsed.argument.partition("=")[0]
    argument = " ".join(argv[place] for place in unparsed.at) or unparsed.argument
    if unparsed.trouble is UnparsedReason.UNKNOWN:
        if new.flag(option) is not None:
            return
        known = changes.removal_reason(option, new.version)
        yield Difference(
            DifferenceKind.RENAMED
            if known and known.kind is ChangeKind.RENAMED
            else DifferenceKind.REMOVED,
            option,
            f"vLLM {old.version} also refuses this flag" + (f": {known.why}" if known else ""),
            breaks=True,
            argument=argument,
            since=known.since if known else None,
            replacement=known.replacement if known else None,
            rewritten=known.rewritten_arguments(unparsed.values) if known else None,
            then=known.then if known else None,
            at=unparsed.at,
        )
    elif unparsed.trouble is UnparsedReason.PREFIX:
        after = tuple(sorted(one for one in new.by_option if one.startswith(option)))
        if after != tuple(sorted(unparsed.candidates)):
            takes = " or ".join(unparsed.candidates)
            said = f"this name is an abbreviation. vLLM {old.version} reads it as {takes}, but "
            now = (
                (f"reads it as {after[0]}")
                if len(after) == 1
                else "refuses it, because it could mean several flags"
            )
            yield Difference(
                DifferenceKind.MEANING,
                option,
                f"{said}{new.version} {now if after else 'does not know it'}",
                breaks=True,
                argument=argument,
                replacement=f"{takes}, written in full",
                at=unparsed.at,
            )


def _variable_differences(old: Schema, new: Schema, yours: ServerFlags) -> Iterator[Difference]:
    for name, value in yours.environment.items():
        if name in new.environment:
            yield from _variable_meaning_differences(name, value, old, new)
            continue
        known = changes.removal_reason(name, new.version)
        if known is None and name not in old.environment:
            continue  # neither release reads the variable, as far as is known
        said = known.why if known else "this release does not read the variable"
        yield Difference(
            DifferenceKind.RENAMED
            if known and known.kind is ChangeKind.RENAMED
            else DifferenceKind.REMOVED,
            name,
            f"{said}; vLLM ignores unknown variables",
            breaks=True,
            argument=f"{name}={value}",
            since=known.since if known else history.first_without(name, old, new),
            replacement=known.replacement if known else None,
            rewritten=known.rewritten_arguments((value,)) if known else None,
            then=known.then if known else None,
        )


def _variable_meaning_differences(
    name: str, value: str, old: Schema, new: Schema
) -> Iterator[Difference]:
    for change in changes.changes_between(old.version, new.version):
        if change.name == name and change.kind is ChangeKind.MEANING:
            yield Difference(
                DifferenceKind.MEANING,
                name,
                change.why,
                breaks=change.breaks,
                argument=f"{name}={value}",
                since=change.since,
                when=change.when,
            )


def _refusal_differences(
    old: Schema, new: Schema, yours: ServerFlags, told: tuple[Difference, ...]
) -> Iterator[Difference]:
    """Yield the remaining arguments that `check` refuses only in the new release."""
    before = check.check_command_line(old, yours.argv, yours.environment).problems
    refused = {(problem.kind, problem.argument) for problem in before if problem.refuses}
    places = {place for one in told if one.breaks for place in one.at}
    arguments = {one.argument for one in told if one.breaks}
    for problem in check.check_command_line(new, yours.argv, yours.environment).problems:
        known = (problem.kind, problem.argument) in refused
        covered = bool(places & set(problem.at)) or problem.argument in arguments
        if problem.refuses and not known and not covered:
            yield Difference(
                DifferenceKind.VALUE,
                problem.argument.split(" ")[0].partition("=")[0] or "MODEL",
                problem.found,
                breaks=True,
                argument=problem.argument,
                since=problem.since,
                replacement=problem.replacement,
                rewritten=problem.rewritten,
                at=problem.at,
            )


# -- flags and variables that the operator does not set --------------------------------------------


def _default_differences(old: Schema, new: Schema, set_names: set[str]) -> Iterator[Difference]:
    near = {other for name in set_names for other in _related(name)}
    told = {
        change.name: change
        for change in changes.changes_between(old.version, new.version)
        if change.kind is ChangeKind.DEFAULT
        and (not change.beside or set(change.beside) & set_names)
    }
    befores, afters = _defaults(old), _defaults(new)
    for name in sorted({*befores, *told} & set(afters) - set_names):
        before, after, change = befores.get(name), afters[name], told.get(name)
        if name in befores and history.defaults_differ(before, after) and (change or name in near):
            values = f"{explain.shown_default(before)} → {explain.shown_default(after)}"
        elif change and history.is_open(before) and history.is_open(after):
            values = "vLLM still chooses the default, but by a different rule"
        else:
            continue
        yield Difference(
            DifferenceKind.DEFAULT,
            name,
            f"{values}: {change.why}" if change else values,
            since=change.since if change else history.first_default(name, after, old, new),
            when=change.when if change else None,
            keep=change.keep if change and _accepted(change.keep, new) else None,
        )


def _recommended_differences(old: Schema, new: Schema, set_names: set[str]) -> Iterator[Difference]:
    known = set(old.by_option)
    for one in recommended_flags():
        if one.name in known or one.name in set_names or new.flag(one.name) is None:
            continue
        beside = sorted(set(one.beside) & set_names)
        if "VLLM_*" in one.beside:
            beside = sorted(name for name in set_names if name.startswith("VLLM_"))
        if beside or not one.beside:
            because = f" (you set {', '.join(beside)})" if beside else ""
            yield Difference(
                DifferenceKind.NEW,
                one.name,
                one.why + because,
                since=history.first_with(one.name, old, new),
            )


# -- searching in schemas and tables ---------------------------------------------------------------


def _related(name: str) -> tuple[str, ...]:
    entry = explain.entries().get(name)
    return entry.related if entry else ()


def _value_change(name: str, value: str, version: str) -> Change | None:
    return next(
        (
            change
            for change in changes.changes_of(name)
            if change.kind is ChangeKind.VALUE
            and value in change.values
            and change.is_in_force(version)
        ),
        None,
    )


def _lost_keys(given: GivenFlag, now: Flag, old: Schema, new: Schema) -> Iterator[str]:
    before, after = _json_class(given.flag, old), _json_class(now, new)
    for text in given.values:
        try:
            keys = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if before and after and isinstance(keys, dict):
            yield from (key for key in keys if key in before and key not in after)


def _json_class(flag: Flag, release: Schema) -> Mapping[str, Any] | None:
    """
    Return the fields of a flag's JSON, or None if they are unknown.

    Some flags accept any JSON, and vLLM checks it later against the class that has the flag's name.
    """
    if flag.type is None or not flag.type.is_json:
        return None
    later = "".join(word.capitalize() for word in flag.dest.split("_"))
    return release.classes.get(flag.type.json_class or later)


def _defaults(release: Schema) -> Mapping[str, Any]:
    """Return the default of every flag and variable, by name."""
    flags = {flag.name: flag.default for flag in release.flags if not flag.positional}
    return flags | {name: one.default for name, one in release.environment.items()}


def _accepted(keep: tuple[str, ...] | None, release: Schema) -> bool:
    if not keep:
        return False
    name = keep[0].partition("=")[0]
    return name in release.environment or release.flag(name) is not None


def _hidden(release: Schema) -> set[str]:
    return {
        option
        for flag in release.flags
        for option in flag.options
        if flag.help_hidden or option in flag.hidden
    }
