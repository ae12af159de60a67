"""Validate a server's arguments and variables for the release that will run it. Pure.

Contract: `check` never raises for an operator's mistakes. Each problem states in `by` what refuses
the argument: the release's parser, the server when it starts, or only gpufleet
(`problem.JudgedBy`). If no problem is `JudgedBy.PARSER`, the release's own parser accepts the
arguments, and vice versa. Abbreviated names are an exception: argparse accepts them, but gpufleet
always refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpufleet.flags import changes, environment, values
from gpufleet.flags.changes import Change, ChangeKind
from gpufleet.flags.command_line import CommandLine, GivenFlag, Unparsed, UnparsedReason, parse
from gpufleet.flags.conflict_rule import Conflict, Settings
from gpufleet.flags.conflicts import conflicts
from gpufleet.flags.json_values import field_faults, type_faults
from gpufleet.flags.problem import JudgedBy, Kind, Problem, Severity
from gpufleet.flags.remarks import remarks
from gpufleet.flags.schema import Field, Flag, Limits, Schema, sort_key

_YAML = (".yaml", ".yml")
_COLLECTS = {"+", "*"}
_LOOKED_UP = 20  # limit of unparsable words that are looked up in other releases
_WORDS = {"true", "false", "1", "0", "yes", "no", "on", "off"}

# Flags whose value vLLM searches in a list after parsing: the name of the list, and the flag that
# adds values to the list.
_LISTED: Mapping[str, tuple[str, str | None]] = {
    "--quantization": ("quantization", None),
    "--load-format": ("load_format", None),
    "--tool-call-parser": ("tool_call_parser", "--tool-parser-plugin"),
    "--reasoning-parser": ("reasoning_parser", "--reasoning-parser-plugin"),
    "--attention-backend": ("attention_backend", None),
}

UNPARSED: Mapping[UnparsedReason, Kind] = {
    UnparsedReason.UNKNOWN: Kind.UNKNOWN,
    UnparsedReason.PREFIX: Kind.PREFIX,
    UnparsedReason.AMBIGUOUS: Kind.AMBIGUOUS,
    UnparsedReason.NO_VALUE: Kind.VALUE,
    UnparsedReason.SURPLUS_VALUE: Kind.FORM,
    UnparsedReason.STRAY: Kind.STRAY,
    UnparsedReason.MODEL: Kind.MODEL,
    UnparsedReason.HELP: Kind.HELP,
}

# JSON flags whose value vLLM converts to a config class only when it starts.
_LATER = {
    "--speculative-config": "SpeculativeConfig",
    "--watermark-config": "WatermarkConfig",
    "--diffusion-config": "DiffusionConfig",
}

# VllmConfig.additional_config, config/vllm.py: a dict, or a class of a platform, which a command
# line cannot give. This is the first release in whose source this was found.
_OBJECT_OR_TEXT = "0.11.1"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The problems of a command line, and the corrected command line if there is one."""

    version: str
    argv: tuple[str, ...]
    problems: tuple[Problem, ...]
    rewritten: tuple[str, ...] | None
    engine: str = "vllm"
    """The package name of the release's engine."""

    @property
    def accepted(self) -> bool:
        """Return whether the command line may be deployed."""
        return not any(problem.refuses for problem in self.problems)

    @property
    def parser_accepts(self) -> bool:
        """
        Return whether the release's own parser accepts the command line.

        Abbreviated names are not considered.
        """
        return not any(problem.by is JudgedBy.PARSER for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            self.engine: self.version,
            "accepted": self.accepted,
            "parser_accepts": self.parser_accepts,
            "problems": [problem.as_json() for problem in self.problems],
            "argv": list(self.argv),
            "rewritten": None if self.rewritten is None else list(self.rewritten),
        }


def check_command_line(
    schema: Schema, argv: Sequence[str], variables: Mapping[str, str] | None = None
) -> Verdict:
    """
    Return the verdict on the arguments of `vllm serve` and the server's variables.

    `rewritten` of the verdict is an equivalent command line without refused parts. It is None if
    the operator must decide, or if nothing is refused.
    """
    problems = check(schema, argv, variables)
    return Verdict(schema.version, tuple(argv), problems, _rewritten(schema, argv, problems))


def check(
    schema: Schema, argv: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    """
    Return the problems of a command line and its variables.

    The problems of arguments come first, in the order of the command line.
    """
    variables = variables or {}
    line = parse(schema, argv)
    troubles = list(_troubles(line))
    found = [each for one in troubles[:_LOOKED_UP] for each in _unparsed(schema, line, one)]
    found += [_refused(line, one, UNPARSED[one.trouble]) for one in troubles[_LOOKED_UP:]]
    readable: dict[str, Any] = {}
    for given in line.given:
        value, faults = values.read(schema, given)
        found += [_fault(schema, line, given, fault) for fault in faults]
        if not faults:
            readable[given.flag.name] = value
            found += _later(schema, line, given, value)
        else:
            readable.pop(given.flag.name, None)
        found += _known(schema, line, given, refused=bool(faults))
    settings = Settings(schema, line, readable, variables)
    found += _beyond_limits(settings)
    found += _conflicts(settings, found)
    found += _repeated(line)
    found += _model(schema, line)
    found += _config(line)
    found += _remarks(settings, found)
    found.sort(key=lambda problem: problem.at[:1] or (len(argv),))
    fatal = settings.on("--fail-on-environ-validation")
    return (*found, *environment.environment_problems(schema, variables, fatal=fatal))


# -- what could not be parsed ----------------------------------------------------------------------


def _troubles(line: CommandLine) -> Iterator[Unparsed]:
    """
    Yield the unparsed arguments. If `--model` is refused, omit other errors of the same argument.
    """
    models = {one.at[0] for one in line.unparsed if one.trouble is UnparsedReason.MODEL and one.at}
    for one in line.unparsed:
        if one.trouble is UnparsedReason.MODEL or not one.at or one.at[0] not in models:
            yield one


def _unparsed(schema: Schema, line: CommandLine, one: Unparsed) -> Iterator[Problem]:
    match one.trouble:
        case UnparsedReason.UNKNOWN | UnparsedReason.PREFIX | UnparsedReason.AMBIGUOUS:
            from gpufleet.flags.unknown import (
                unknown_option,  # imported only if needed: slow
            )

            yield unknown_option(schema, line, one)
        case UnparsedReason.SURPLUS_VALUE:
            yield _surplus(line, one)
        case UnparsedReason.STRAY:
            yield _stray(line, one)
        case UnparsedReason.HELP:
            yield _refused(line, one, Kind.HELP, rewritten=())
        case UnparsedReason.MODEL:
            yield _refused_model(line, one)
        case UnparsedReason.NO_VALUE:
            yield _refused(line, one, Kind.VALUE)


def _refused(
    line: CommandLine, one: Unparsed, kind: Kind, rewritten: tuple[str, ...] | None = None
) -> Problem:
    return Problem(
        kind,
        Severity.REFUSE,
        JudgedBy.PARSER,
        _written(line, one.at),
        one.found,
        rewritten=rewritten,
        at=one.at,
    )


def _refused_model(line: CommandLine, one: Unparsed) -> Problem:
    """
    Return the problem of a refused `--model`.

    If the command line begins with `--model X`, the problem's `rewritten` is X.
    """
    if one.argument != "--model" or not one.values:
        return _refused(line, one, Kind.MODEL)
    both = replace(one, at=(one.at[0], one.at[0] + 1))
    return _refused(line, both, Kind.MODEL, one.values if one.at == (0,) else None)


def _surplus(line: CommandLine, one: Unparsed) -> Problem:
    """Return the problem of `--switch=true`, rewritten as the switch or its negation."""
    name = one.argument.partition("=")[0]
    rewritten: tuple[str, ...] | None = None
    if one.flag is not None and one.values:
        word = one.values[0].lower()
        if word in {"true", "1", "yes", "on"}:
            rewritten = (name,)
        elif word in {"false", "0", "no", "off"}:
            rewritten = _switched_off(one.flag, name)
    return _refused(line, one, Kind.FORM, rewritten)


def _switched_off(flag: Flag, name: str) -> tuple[str, ...] | None:
    if flag.negates(name):
        return (flag.name,)
    from gpufleet.flags.unknown import switched_off

    off = switched_off(flag)
    if off is not None:
        return (off,)
    return () if flag.default in {False, None} else None


def _stray(line: CommandLine, one: Unparsed) -> Problem:
    """Return the problem of a value after a switch without values, for example `--switch true`."""
    before = next((given for given in line.given if max(given.at) == one.at[0] - 1), None)
    if before is None or before.flag.takes_value or one.argument.lower() not in _WORDS:
        return _refused(line, one, Kind.STRAY)
    on = one.argument.lower() in {"true", "1", "yes", "on"}
    rewritten = (before.option,) if on else _switched_off(before.flag, before.option)
    return Problem(
        Kind.FORM,
        Severity.REFUSE,
        JudgedBy.PARSER,
        _written(line, (*before.at, *one.at)),
        f"`{before.option}` is a switch without a value, so vLLM cannot assign the word "
        f"`{one.argument}` to an option",
        rewritten=rewritten,
        at=(*before.at, *one.at),
    )


# -- values ----------------------------------------------------------------------------------------


def _fault(schema: Schema, line: CommandLine, given: GivenFlag, fault: values.Fault) -> Problem:
    """
    Return the problem of a refused value.

    If the table of changes explains the value, the problem has the release and the replacement from
    it.
    """
    better = None if fault.better is None else _with_values(line, given, fault.better)
    change = _value_change(schema, given)
    since, replacement = fault.since, fault.replacement
    if change is not None:
        since, replacement = change.since, change.replacement or change.then
        better = change.rewritten_arguments(given.values) if change.rewrite is not None else better
    return Problem(
        Kind(fault.kind),
        Severity.REFUSE,
        JudgedBy.PARSER,
        _written(line, given.at),
        fault.found + (f": {change.why}" if change else ""),
        since=since,
        replacement=replacement,
        rewritten=better,
        at=given.at,
    )


def _with_values(line: CommandLine, given: GivenFlag, texts: tuple[str, ...]) -> tuple[str, ...]:
    if given.dotted:
        return (given.option, *texts)
    return (line.argv[given.at[0]].partition("=")[0], *texts)


def _value_change(schema: Schema, given: GivenFlag) -> Change | None:
    """Return the table's entry on why this flag's values are no longer accepted, or None."""
    for change in changes.changes_of(given.flag.name):
        if not change.is_in_force(schema.version):
            continue
        if change.kind is ChangeKind.VALUE and set(change.values) & set(given.values):
            return change
        if (
            change.kind is ChangeKind.FORM
            and change.breaks
            and change.rewritten_arguments(given.values)
        ):
            return change
    return None


def _later(schema: Schema, line: CommandLine, given: GivenFlag, value: Any) -> Iterator[Problem]:
    """
    Yield the mistakes in a flag's value that only the starting server refuses, not its parser.
    """
    flag = given.flag
    if flag.name in _LATER and isinstance(value, dict):
        spelt = {str(key).replace("-", "_"): item for key, item in value.items()}
        for fault in type_faults(schema, _LATER[flag.name], spelt):
            found = _at_start(line, given, Kind.JSON, fault.found)
            yield replace(found, since=fault.since, replacement=fault.replacement)
    elif flag.name in _LISTED:
        yield from _listed(schema, line, given)
    elif flag.suggested and isinstance(value, str) and value not in flag.suggested:
        yield from _misspelt(schema, line, given, value)
    elif _wants_object(schema, flag) and not isinstance(value, dict) and value is not None:
        yield _at_start(line, given, Kind.JSON, f"`{given.values[-1]}` is not a JSON object")


def _beyond_limits(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each flag value outside the limits that vLLM checks when it starts."""
    for name, uses in settings.line.by_name.items():
        limits, value = uses[-1].flag.limits, settings.value(name)
        if limits is None or value is None or not _is_in_force(settings, limits):
            continue
        kind = Kind.CHOICE if limits.type else Kind.VALUE
        field = Field(uses[-1].flag.dest, limits.type or "Any", None, limits.constraints)
        for each in value if isinstance(value, list) else [value]:
            for fault in field_faults(settings.schema, field, each, name):
                yield _at_start(settings.line, uses[-1], kind, fault.found)


def _is_in_force(settings: Settings, limits: Limits) -> bool:
    """Return whether vLLM creates the config to which these limits belong."""
    switch = None if limits.needs is None else settings.schema.by_dest.get(limits.needs)
    return limits.needs is None or (switch is not None and settings.on(switch.name))


def _misspelt(schema: Schema, line: CommandLine, given: GivenFlag, value: str) -> Iterator[Problem]:
    """Yield a warning if a value is similar to a built-in value. Plug-ins may add other values."""
    from difflib import get_close_matches

    for near in get_close_matches(value, given.flag.suggested, n=1, cutoff=0.75):
        yield Problem(
            Kind.CHOICE,
            Severity.WARN,
            JudgedBy.ADVICE,
            _written(line, given.at),
            f"`{value}` is not a built-in value of vLLM {schema.version} "
            f"({', '.join(given.flag.suggested)}). vLLM does not start with this value unless a "
            "plug-in adds the value",
            replacement=near,
            at=given.at,
        )


def _wants_object(schema: Schema, flag: Flag) -> bool:
    """Return whether a flag's value must be a JSON object, although the parser accepts any JSON."""
    bases = {"json"}
    if sort_key(schema.version) >= sort_key(_OBJECT_OR_TEXT):
        bases.add("json_or_str")
    return isinstance(flag.default, dict) and flag.type is not None and flag.type.base in bases


def _listed(schema: Schema, line: CommandLine, given: GivenFlag) -> Iterator[Problem]:
    name, plugin = _LISTED[given.flag.name]
    known = schema.values.get(name, ())
    text = given.values[-1] if given.values else ""
    spelt = text.upper() if name == "attention_backend" else text
    if not known or spelt in known or text in {"", "None", "auto"}:
        return
    if plugin is not None and plugin in line.by_name:
        return
    if given.flag.choices is not None or _value_change(schema, given) is not None:
        return  # already reported
    from difflib import get_close_matches  # seldom needed, and slow to load

    near = get_close_matches(spelt, known, n=3)
    hint = f"; similar values are {', '.join(near)}" if near else ""
    unused = name == "tool_call_parser" and "--enable-auto-tool-choice" not in line.by_name
    yield _at_start(
        line,
        given,
        Kind.CHOICE,
        f"vLLM {schema.version} has no {name.replace('_', ' ')} `{text}`{hint}",
        Severity.WARN if unused else Severity.REFUSE,
    )


def _at_start(
    line: CommandLine,
    given: GivenFlag,
    kind: Kind,
    found: str,
    severity: Severity = Severity.REFUSE,
) -> Problem:
    return Problem(kind, severity, JudgedBy.START, _written(line, given.at), found, at=given.at)


# -- remarks on accepted flags ---------------------------------------------------------------------


def _known(
    schema: Schema, line: CommandLine, given: GivenFlag, *, refused: bool
) -> Iterator[Problem]:
    """
    Yield the remarks on a flag: from the table of changes, and if the parser deprecates or hides
    it.
    """
    deprecated = False
    for change in changes.changes_of(given.flag.name):
        if not change.is_in_force(schema.version) or refused:
            continue
        if change.kind is ChangeKind.DEPRECATED:
            deprecated = True
            yield _changed(line, given, change, Kind.DEPRECATED, Severity.WARN)
        elif change.kind is ChangeKind.VALUE and set(change.values) & set(given.values):
            plugin = "package" in (change.replacement or "")
            severity = Severity.WARN if plugin or not change.breaks else Severity.REFUSE
            yield _changed(line, given, change, Kind.CHOICE, severity)
        elif change.kind is ChangeKind.MEANING and _is_about(change, given):
            yield _changed(line, given, change, Kind.MEANING, Severity.WARN)
    if (given.flag.deprecated or given.flag.help_hidden) and not deprecated:
        what = (
            "deprecated"
            if given.flag.deprecated
            else ("still accepted, but vLLM's help no longer lists it")
        )
        yield _remark(line, given, f"`{given.option}` is {what}", Kind.DEPRECATED)
    elif given.option in given.flag.hidden and not given.option.startswith("--no-"):
        found = f"`{given.option}` is accepted, but vLLM's help does not list it"
        yield _remark(line, given, found, Kind.DEPRECATED)


def _is_about(change: Change, given: GivenFlag) -> bool:
    """
    Return whether a change affects this use of the flag.

    A change that has no rewrite and applies to all values is excluded, because gpufleet would
    report it for nearly every command line. `flags diff` shows such a change for an upgrade, and
    `flags explain` shows it for the flag.
    """
    if change.values:
        return bool(set(change.values) & set(given.values))
    return change.when is None and change.rewrite is not None


def _changed(
    line: CommandLine, given: GivenFlag, change: Change, kind: Kind, severity: Severity
) -> Problem:
    found = change.why + (f" (if {change.when})" if change.when else "")
    return Problem(
        kind,
        severity,
        JudgedBy.START if kind is Kind.CHOICE else JudgedBy.ADVICE,
        _written(line, given.at),
        found,
        since=change.since,
        replacement=change.replacement or change.then,
        rewritten=change.rewritten_arguments(given.values),
        at=given.at,
    )


def _remark(line: CommandLine, given: GivenFlag, found: str, kind: Kind = Kind.VALUE) -> Problem:
    """Return a problem that does not stop a deploy."""
    return Problem(
        kind, Severity.WARN, JudgedBy.ADVICE, _written(line, given.at), found, at=given.at
    )


# -- the command line as a whole -------------------------------------------------------------------


def _conflicts(settings: Settings, found: Sequence[Problem]) -> Iterator[Problem]:
    """Yield a problem for each conflict of flags, unless one of the flags is already refused."""
    line = settings.line
    refused = {place for problem in found if problem.refuses for place in problem.at}
    for rule in conflicts(settings):
        uses = [use for name in rule.flags for use in _named_uses(line, rule, name)]
        at = tuple(sorted({place for use in uses for place in use.at}))
        if refused & set(at):
            continue
        drop = line.last(rule.leave_out) if rule.leave_out else None
        kept = tuple(line.argv[place] for place in at if drop is None or place not in drop.at)
        yield Problem(
            Kind.CONFLICT,
            Severity.REFUSE,
            JudgedBy.START,
            _written(line, at),
            rule.sentence,
            since=rule.since,
            rewritten=None if drop is None else kept,
            at=at,
        )


def _remarks(settings: Settings, found: Sequence[Problem]) -> Iterator[Problem]:
    """Yield the remarks on options that are not already refused."""
    refused = {place for problem in found if problem.refuses for place in problem.at}
    for given, text, kind in remarks(settings):
        if not refused & set(given.at):
            yield _remark(settings.line, given, text, kind)


def _named_uses(line: CommandLine, rule: Conflict, name: str) -> tuple[GivenFlag, ...]:
    """
    Return the uses of a flag that a conflict is about.

    If the rule has `wrong`, these are all uses with a wrong value. Otherwise, it is the last use.
    """
    uses = line.by_name.get(name, ())
    if rule.wrong is None:
        return uses[-1:]
    return tuple(use for use in uses if any(map(rule.wrong, use.values)))


def _repeated(line: CommandLine) -> Iterator[Problem]:
    for name, uses in line.by_name.items():
        if len(uses) < 2 or uses[0].flag.kind == "append":
            continue
        for earlier in uses[:-1]:
            kept = " ".join(uses[-1].values) or uses[-1].option
            yield Problem(
                Kind.REPEATED,
                Severity.WARN,
                JudgedBy.ADVICE,
                _written(line, earlier.at),
                f"`{name}` is given {len(uses)} times; vLLM uses only the last value, `{kept}`",
                rewritten=(),
                at=earlier.at,
            )


def _model(schema: Schema, line: CommandLine) -> Iterator[Problem]:
    if line.model is not None:
        if line.model_at and line.argv[line.model_at[0]].startswith("--model"):
            for change in changes.changes_of("--model"):
                if change.is_in_force(schema.version):
                    found = "give the model as the first argument: " + change.why
                    yield _of_model(line, found, Severity.WARN, change.since)
        elif line.model.lower() in _WORDS:
            found = (
                f"`{line.model}` is the first word that belongs to no option, so vLLM uses it as "
                "the name of the model"
            )
            yield _of_model(line, found, Severity.REFUSE, None)
        elif " -" in line.model:
            found = (
                f"`{line.model}` is a single argument because of its quotes, so vLLM uses all of "
                "it as the name of the model: remove the quotes"
            )
            yield _of_model(line, found, Severity.REFUSE, None)
        return
    if any(name in line.by_name for name in ("--config", "--model")) or any(
        one.trouble is UnparsedReason.MODEL for one in line.unparsed
    ):
        return
    for given in line.given:
        swallowed = given.flag.nargs in _COLLECTS and len(given.values) > 1 and given.values[-1]
        if swallowed and "/" in swallowed:
            yield Problem(
                Kind.MODEL,
                Severity.REFUSE,
                JudgedBy.ADVICE,
                _written(line, given.at),
                f"`{given.option}` uses every word up to the next flag as a value, including "
                f"`{swallowed}`. If that word is the model, write the model before all flags",
                at=given.at,
            )
            return
    found = "the command line has no model, so vLLM would serve its default model"
    yield Problem(Kind.MODEL, Severity.WARN, JudgedBy.ADVICE, "vllm serve", found)


def _of_model(line: CommandLine, found: str, severity: Severity, since: str | None) -> Problem:
    at = line.model_at
    return Problem(
        Kind.MODEL, severity, JudgedBy.ADVICE, _written(line, at), found, since=since, at=at
    )


def _config(line: CommandLine) -> Iterator[Problem]:
    """
    Yield the problem of --config. Only the name is checked, because the file is on the node.
    """
    given = line.last("--config")
    if given is None:
        return
    uses = line.by_name["--config"]
    severity, by, found = (
        Severity.WARN,
        JudgedBy.ADVICE,
        ("gpufleet did not check the content of this file"),
    )
    if "=" in line.argv[given.at[0]]:
        found = "vLLM ignores `--config=FILE`: write `--config FILE`, with a space"
        severity = Severity.REFUSE
    elif len(uses) > 1:
        severity, by, found = (
            Severity.REFUSE,
            JudgedBy.PARSER,
            ("`--config` is given several times, and vLLM accepts it only once"),
        )
    elif not given.values[-1].endswith(_YAML):
        severity, by = Severity.REFUSE, JudgedBy.PARSER
        found = (
            f"`{given.values[-1]}` is not a YAML file by its name: the name must end in .yaml or "
            ".yml"
        )
    yield Problem(Kind.VALUE, severity, by, _written(line, given.at), found, at=given.at)


def _written(line: CommandLine, at: Sequence[int]) -> str:
    """Return the arguments at these indexes of argv, as typed."""
    return " ".join(line.argv[place] for place in at)


# -- rewriting -------------------------------------------------------------------------------------

_ROUNDS = 40  # maximum number of rewriting steps; each one replaces one refused part


def _rewritten(
    schema: Schema, argv: Sequence[str], problems: Sequence[Problem]
) -> tuple[str, ...] | None:
    """
    Return the command line with all refused parts rewritten.

    None if a part cannot be rewritten, or if nothing is refused.
    """
    if not 0 < sum(problem.refuses and bool(problem.at) for problem in problems) <= _ROUNDS:
        return None
    now = tuple(argv)
    for _ in range(_ROUNDS):
        refused = [problem for problem in problems if problem.refuses and problem.at]
        if not refused:
            return now
        first = refused[0]
        if first.rewritten is None:
            return None
        places = set(first.at)
        start = min(places)
        after = [word for place, word in enumerate(now) if place > start and place not in places]
        now = (*now[:start], *first.rewritten, *after)
        problems = check(schema, now)
    return None
