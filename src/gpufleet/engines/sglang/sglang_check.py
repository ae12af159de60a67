"""Validate the arguments of `sglang serve` for the release that will run. Pure.

`check` never raises an exception for mistakes of an operator. The release's parser accepts the
arguments exactly if no problem is `JudgedBy.PARSER`. The exception is abbreviated names, which
argparse accepts but gpufleet does not. The file in `--config` is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from gpufleet.engines.sglang import sglang_schemas
from gpufleet.flags import values
from gpufleet.flags.check import UNPARSED, Verdict
from gpufleet.flags.command_line import CommandLine, GivenFlag, Unparsed, UnparsedReason, parse
from gpufleet.flags.problem import JudgedBy, Kind, Problem, Severity
from gpufleet.flags.schema import Schema, sort_key

_NEAR = 0.75  # how much alike two names have to be, as difflib counts


_COMMANDS = (("sglang", "serve"), ("-m", "sglang.launch_server"))


def newest() -> str:
    """Return the newest release whose flags are known."""
    return sglang_schemas.versions()[-1]


def verdict(version: str, words: Sequence[str]) -> Verdict:
    """
    Return the verdict on a command line. The command that starts the server may be missing in it.

    Raises `FleetError` for a release that is not known.
    """
    begin = next((at + 2 for at in range(len(words)) if _is_start(words, at)), 0)
    argv = tuple(words[begin:])
    schema = sglang_schemas.load(version)
    return Verdict(schema.version, argv, check(schema, argv), None, sglang_schemas.ENGINE)


def _is_start(words: Sequence[str], at: int) -> bool:
    command = words[at].rpartition("/")[2]
    return (command, *words[at + 1 : at + 2]) in _COMMANDS


def check(schema: Schema, argv: Sequence[str]) -> tuple[Problem, ...]:
    """Return every problem of the arguments of `sglang serve`, in the order of the arguments."""
    line = parse(schema, argv)
    found = [_unparsed(schema, line, one) for one in line.unparsed]
    for given in line.given:
        found += _faults(schema, line, given)
        found += _remarks(line, given)
    found += _repeated(line)
    found += _required(schema, line)
    return tuple(sorted(found, key=lambda problem: problem.at[:1] or (len(argv),)))


def _unparsed(schema: Schema, line: CommandLine, one: Unparsed) -> Problem:
    found, by, replacement = one.found, JudgedBy.PARSER, None
    if one.trouble is UnparsedReason.HELP:
        found = f"`{one.argument}` prints SGLang's help and exits"
    elif one.trouble is UnparsedReason.PREFIX:
        by, replacement = JudgedBy.ADVICE, one.candidates[0]
    elif one.trouble is UnparsedReason.UNKNOWN:
        found, replacement = _unknown(schema, one)
    return Problem(
        UNPARSED[one.trouble],
        Severity.REFUSE,
        by,
        _written(line, one.at),
        found,
        replacement=replacement,
        rewritten=(replacement, *one.values)
        if replacement and _is_spelling(one, replacement)
        else None,
        at=one.at,
    )


def _is_spelling(one: Unparsed, option: str) -> bool:
    """Return whether an argument is an abbreviation of an option, or an option with underscores."""
    name = one.argument.partition("=")[0]
    return one.trouble is UnparsedReason.PREFIX or name.replace("_", "-") == option


def _unknown(schema: Schema, one: Unparsed) -> tuple[str, str | None]:
    """Return a sentence about an unknown option, and a similar option to write instead, or None."""
    name = one.argument.partition("=")[0]
    dashed = "--" + name[2:].replace("_", "-")
    if dashed != name and dashed in schema.by_option:
        return f"SGLang does not read `{name}`: it writes `{dashed}`", dashed
    having = sglang_schemas.releases_with(name)
    newer = [each for each in having if sort_key(each) > sort_key(schema.version)]
    if newer:
        return f"`{name}` was added in SGLang {newer[0]} or shortly before", None
    if having:
        return f"`{name}` was removed: SGLang {having[-1]} is the last known release with it", None
    near = get_close_matches(name, schema.by_option, n=3, cutoff=_NEAR)
    return one.found, " or ".join(near) or None


def _faults(schema: Schema, line: CommandLine, given: GivenFlag) -> Iterator[Problem]:
    """Yield the errors that the parser would report for one flag."""
    for fault in values.read(schema, given)[1]:
        yield _problem(line, given, Kind(fault.kind), fault.found)


def _remarks(line: CommandLine, given: GivenFlag) -> Iterator[Problem]:
    """
    Yield advice on a flag that the parser accepts.

    The flag is deprecated, or SGLang does not read it as the operator means it.
    """
    if given.flag.deprecated:
        yield _problem(
            line,
            given,
            Kind.DEPRECATED,
            f"`{given.option}` is deprecated",
            severity=Severity.WARN,
            by=JudgedBy.ADVICE,
        )
    if given.flag.name == "--config" and line.argv[given.at[0]].startswith("--config="):
        # prepare_server_args only finds `--config` if it is a separate word.
        yield _problem(
            line,
            given,
            Kind.FORM,
            "SGLang reads the file of `--config FILE` only: of `--config=FILE` it reads nothing",
            by=JudgedBy.ADVICE,
        )


def _repeated(line: CommandLine) -> Iterator[Problem]:
    for name, uses in line.by_name.items():
        if len(uses) > 1 and uses[-1].flag.takes_value:
            found = f"`{name}` is given {len(uses)} times, and only the last one counts"
            yield _problem(
                line, uses[0], Kind.REPEATED, found, severity=Severity.WARN, by=JudgedBy.ADVICE
            )


def _required(schema: Schema, line: CommandLine) -> Iterator[Problem]:
    """
    Yield the required flags that are missing.

    With --config, nothing is yielded, because the file may set these flags.
    """
    if "--config" in line.by_name:
        return
    for flag in schema.flags:
        if flag.required and flag.name not in line.by_name:
            kind = Kind.MODEL if flag.dest == "model_path" else Kind.VALUE
            found = f"`{flag.name}` is not given, and SGLang does not start without it"
            yield Problem(kind, Severity.REFUSE, JudgedBy.PARSER, flag.name, found)


def _problem(
    line: CommandLine,
    given: GivenFlag,
    kind: Kind,
    found: str,
    *,
    severity: Severity = Severity.REFUSE,
    by: JudgedBy = JudgedBy.PARSER,
) -> Problem:
    return Problem(kind, severity, by, _written(line, given.at), found, at=given.at)


def _written(line: CommandLine, at: Sequence[int]) -> str:
    """Return the arguments at these indexes of argv, as typed."""
    return " ".join(line.argv[place] for place in at)
