"""Explain a name that a release does not have: removed, renamed, misspelt or newer.  Pure.

A release may not have a name for one of these reasons: the name was removed or renamed, a later
release adds it, no release ever had it, it is a different release's form of switching something
off, or it is mistyped. `unknown_option` finds the reason in the table of changes and in the schemas
of all releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpufleet.flags import changes, history, values
from gpufleet.flags.changes import Change, ChangeKind
from gpufleet.flags.command_line import CommandLine, GivenFlag, Unparsed, UnparsedReason
from gpufleet.flags.problem import JudgedBy, Kind, Problem, Severity
from gpufleet.flags.schema import Flag, Schema, sort_key

_KINDS = {
    ChangeKind.NEVER: Kind.NEVER,
    ChangeKind.REMOVED: Kind.REMOVED,
    ChangeKind.RENAMED: Kind.RENAMED,
}
_NEAR = 0.75  # minimum similarity of two names, by difflib


def unknown_option(schema: Schema, line: CommandLine, one: Unparsed) -> Problem:
    """Return the problem of an option that the release does not have."""
    name = one.argument.partition("=")[0]
    if name.startswith("--"):
        name = "--" + name[2:].partition(".")[0].replace("_", "-")
    problem = (
        _gone(schema, line, one, name)
        or _prefix(line, one)
        or _undotted(schema, line, one, name)
        or _other_form(schema, line, one, name)
        or _elsewhere(schema, line, one, name)
    )
    return replace(problem, by=JudgedBy.ADVICE) if _is_taken(schema, one) else problem


def _is_taken(schema: Schema, one: Unparsed) -> bool:
    """Return whether argparse accepts an abbreviation and its value as the full name."""
    if one.trouble is not UnparsedReason.PREFIX:
        return False
    (only,) = one.candidates
    flag = schema.by_option[only]
    if not flag.takes_value:
        return not one.values
    if not one.values:
        return flag.nargs in {"?", "*"}
    _, faults = values.read(schema, GivenFlag(flag, only, one.values, one.at))
    return not faults


def _problem(
    line: CommandLine,
    one: Unparsed,
    kind: Kind,
    found: str,
    *,
    since: str | None = None,
    replacement: str | None = None,
    rewritten: tuple[str, ...] | None = None,
) -> Problem:
    return Problem(
        kind,
        Severity.REFUSE,
        JudgedBy.PARSER,
        " ".join(line.argv[place] for place in one.at),
        found,
        since=since,
        replacement=replacement,
        rewritten=rewritten,
        at=one.at,
    )


def _gone(schema: Schema, line: CommandLine, one: Unparsed, name: str) -> Problem | None:
    """Return the problem of a name that the table of changes explains, else None."""
    change = changes.removal_reason(name, schema.version) or _optimization(schema, name)
    if change is None:
        return None
    rewritten = change.rewritten_arguments(one.values)
    if rewritten and any(
        word.startswith("--") and schema.flag(word.partition(".")[0]) is None for word in rewritten
    ):
        rewritten = (
            None  # this release does not have the replacement: it came later, or was removed
        )
    return _problem(
        line,
        one,
        _KINDS.get(change.kind, Kind.FORM),
        _of_change(one, change),
        since=change.since,
        replacement=change.replacement or change.then,
        rewritten=rewritten,
    )


def _of_change(one: Unparsed, change: Change) -> str:
    what = {
        ChangeKind.NEVER: "was never a flag of `vllm serve`",
        ChangeKind.REMOVED: "was removed",
        ChangeKind.RENAMED: "no longer exists under this name",
    }.get(change.kind, "is no longer accepted in this form")
    taken = ""
    if one.trouble is UnparsedReason.PREFIX:
        taken = f" (and argparse reads it as an abbreviation of `{one.candidates[0]}`)"
    return f"`{one.argument}` {what}{taken}: {change.why}"


def _undotted(schema: Schema, line: CommandLine, one: Unparsed, name: str) -> Problem | None:
    """
    Return the problem of `--flag.key` if the release accepts only the whole JSON of the flag.
    """
    if "." not in one.argument.partition("=")[0] or schema.flag(name) is None:
        return None
    found = (
        f"this release does not accept single keys of `{name}` as options: write the whole JSON "
        "object"
    )
    return _problem(line, one, Kind.FORM, found, replacement=f"{name} '{{...}}'")


def _optimization(schema: Schema, name: str) -> Change | None:
    """Return the changed meaning of -O in this release if the name is a form of -O, else None."""
    if not name.startswith("-O"):
        return None
    for change in changes.changes_of("-O"):
        if change.kind is ChangeKind.MEANING and change.is_in_force(schema.version):
            return change
    return None


def _other_form(schema: Schema, line: CommandLine, one: Unparsed, name: str) -> Problem | None:
    """Return the problem of a switch that this release writes in a different form, or None."""
    flag, off = _switch(schema, name)
    if flag is None:
        return None
    rewritten: tuple[str, ...] | None = None
    if off is None:
        found = f"this release has no `{name}`: `{flag.name}` cannot be switched off"
        if flag.default in {False, None}:
            rewritten = ()
            found += ", but is off as long as you do not write it"
    else:
        rewritten = (off,)
        found = f"this release has no `{name}`: its name for the flag is `{off}`"
    return _problem(line, one, Kind.FORM, found, replacement=off, rewritten=rewritten)


def _switch(schema: Schema, name: str) -> tuple[Flag | None, str | None]:
    """Return the switch that a name refers to, and how this release writes the same setting."""
    for stem, wanted in _stems(name):
        for prefix in ("--enable-", "--disable-", "--"):
            flag = schema.flag(prefix + stem)
            if flag is None or flag.takes_value or flag.name != prefix + stem:
                continue
            if (prefix != "--disable-") is wanted:
                return flag, flag.name
            return flag, switched_off(flag)
    return None, None


def switched_off(flag: Flag) -> str | None:
    """
    Return the option that switches a flag off, or None.

    All releases accept --no-x. Newer releases document --disable-x, but still accept --no-x.
    """
    return next(
        (option for option in flag.negations if option.startswith("--no-")),
        flag.negations[0] if flag.negations else None,
    )


def _stems(name: str) -> Iterator[tuple[str, bool]]:
    """Yield (switch, whether it is on) for a name. --no-enable-x and --disable-x switch x off."""
    bare = name.removeprefix("--")
    on = True
    if bare.startswith("no-"):
        bare, on = bare.removeprefix("no-"), False
    for word, turns in (("enable-", True), ("disable-", False)):
        if bare.startswith(word):
            yield bare.removeprefix(word), on is turns
    yield bare, on


def _prefix(line: CommandLine, one: Unparsed) -> Problem | None:
    """
    Return the problem of an abbreviation, or None if the name is not an abbreviation.

    If only one option begins with the name, `rewritten` has this option.
    """
    if one.trouble is UnparsedReason.PREFIX:
        (only,) = one.candidates
        kind, rewritten = Kind.PREFIX, (only, *one.values)
        return _problem(line, one, kind, one.found, replacement=only, rewritten=rewritten)
    if one.trouble is UnparsedReason.AMBIGUOUS:
        return _problem(line, one, Kind.AMBIGUOUS, one.found)
    return None


def _elsewhere(schema: Schema, line: CommandLine, one: Unparsed, name: str) -> Problem:
    """
    Return the problem of an unknown name.

    The problem states which releases have the name. If none has it, the problem has similar names.
    """
    found, since = one.found, None
    having_it = history.flag_history(name)
    having = [version for version, flag in having_it.items() if flag]
    newer = [each for each in having if sort_key(each) > sort_key(schema.version)]
    older = [each for each in having if each not in newer]
    if older and newer:  # a release between, such as an own build
        found = (
            f"vLLM {older[-1]} and {newer[0]} have `{name}`, but vLLM {schema.version} does not "
            "have this flag"
        )
    elif newer:
        found = (
            f"`{name}` was added in vLLM {newer[0]}, so vLLM {schema.version} does not have this "
            "flag"
        )
    elif having:
        found = f"`{name}` was removed: vLLM {having[-1]} is the last release known to have it"
        later = [each for each in having_it if sort_key(each) > sort_key(having[-1])]
        since = later[0] if later else None
    kind = Kind.REMOVED if since else Kind.UNKNOWN
    # A name such as --n is too short to be meant as -n.
    short = schema.by_option.get(name[1:]) if name.startswith("--") and len(name) > 3 else None
    near = [] if having else [short.name] if short else _near(schema, name)
    rewritten = None
    if short is not None and not having:  # --tp for -tp
        rewritten = (short.name, *one.values)
    elif len(near) == 1 and near[0].lower() == name.lower():  # option names are case-sensitive
        rewritten = (near[0], *one.values)
    return _problem(
        line,
        one,
        kind,
        found,
        since=since,
        replacement=" or ".join(near) or None,
        rewritten=rewritten,
    )


def _near(schema: Schema, name: str) -> list[str]:
    from difflib import get_close_matches  # seldom needed, and slow to load

    names = [option for option in schema.by_option if option.startswith("--")]
    same = [option for option in names if option.lower() == name.lower()]
    return same or get_close_matches(name.lower(), names, n=3, cutoff=_NEAR)
