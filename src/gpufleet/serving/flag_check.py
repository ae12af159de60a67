"""Check the planned stages' arguments and variables against their engine's release. Pure.

The checked command line is exactly the command line of the unit (`Engine.arguments`,
`Engine.environment`). It is checked by the schema of the release that will run it, never by the
schema of a different release. A sentence contains the key that an operator wrote, the file of this
key, and the correction. Equal findings of several stages or nodes are reported once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TypeAlias

from gpufleet import engines
from gpufleet.engines.engine import engine
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.arguments import words
from gpufleet.flags.problem import JudgedBy, Kind, Problem
from gpufleet.flags.schema import Schema
from gpufleet.planning.multinode.launch import fill_ports
from gpufleet.planning.stage import Stage
from gpufleet.remote import payload
from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import EngineSettings, Served
from gpufleet.settings.variables import Origin

Origins: TypeAlias = Mapping[str, Origin]
"""The origin of each top-level key of one node's settings."""

# Texts that YAML reads back unchanged; all others are quoted.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*|0|-?[1-9][0-9]*|0\.[0-9]*[1-9]")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n"}  # YAML 1.1's own

# The modules of flags/ that affect no verdict. A new module counts as one that does, until it is
# listed here.
_NOT_JUDGING = {
    "explain",
    "extract",
    "from_settings",
    "pages",
    "release_diff",
}


@dataclass(frozen=True)
class FlagFindings:
    """Findings as sentences: `refused` stop a deploy, and `remarks` do not."""

    refused: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __add__(self, other: FlagFindings) -> FlagFindings:
        return FlagFindings(
            tuple(dict.fromkeys((*self.refused, *other.refused))),
            tuple(dict.fromkeys((*self.remarks, *other.remarks))),
        )


@dataclass(frozen=True)
class LaunchCommand:
    """
    A stage's command line and variables, with the settings that they come from.

    `keys` has the path of the setting for each word of `argv`. `variables` has the path for each of
    the operator's variables; gpufleet's own variables have no path.
    """

    stage: Stage
    engine: str
    version: str
    argv: tuple[str, ...]
    keys: tuple[KeyPath, ...]
    environment: Mapping[str, str]
    variables: Mapping[str, KeyPath]


def launch_command(
    stage: Stage,
    model: Served,
    settings: EngineSettings,
    *,
    release: str,
    toolkit: str | None = None,
) -> LaunchCommand:
    """
    Return the command line and variables of a stage's unit, as in `unit.render_unit`.

    Raises `FleetError` for arguments and variables that a process cannot have.
    """
    server = engine(settings.engine)
    lines = list(server.arguments(stage, model, settings))
    if stage.group:
        rank = server.rank(stage, model, settings)
        port, refused = stage.group.cluster_port, {f"--{name}" for name in rank.drops}
        lines = [each for each in lines if each[1][0].partition("=")[0] not in refused]
        lines += [
            (("serving", stage.model), tuple(fill_ports(word, port) for word in words(name, value)))
            for name, value in rank.flags.items()
        ]
    # One key for every word of its line.
    said = [(word, key) for key, line in lines for word in line]
    section = settings.engine
    shared = {name: (section, "environment", name) for name in settings.environment}
    own = {name: ("serving", stage.model, "environment", name) for name in model.environment}
    return LaunchCommand(
        stage,
        section,
        settings.version,
        tuple(word for word, _ in said),
        tuple(key for _, key in said),
        server.environment(stage, model, settings, release, toolkit),
        {**shared, **own},
    )


def check_plan(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    origins: Mapping[str, Origins] | None = None,
) -> tuple[str, ...]:
    """
    Check every stage of a plan with the schemas that gpufleet contains, and return remarks.

    If gpufleet has no schema of a release, the result has a remark about this release. The deploy
    then checks the flags with the release's own files on each node, before any restart. Raises
    `FleetError` with every flag that would be refused.
    """
    found = FlagFindings()
    for stage in stages:
        here = settings[stage.node]
        wanted = here.engine_of(stage.model)
        try:
            begun = launch_command(
                stage,
                here.serving[stage.model],
                wanted,
                release=wanted.version,  # decides nothing but PATH
                toolkit=here.cuda.toolkit if here.cuda else None,
            )
        except FleetError as error:
            found += FlagFindings(refused=error.problems)
            continue
        rules = engine(wanted.engine).flags
        if schema.release_name(wanted.version) not in rules.versions():
            found += FlagFindings(remarks=(_not_known(begun),))
            continue
        places = (origins or {}).get(stage.node, {})
        found += check_stage(rules.load(wanted.version), begun, places)
    if found.refused:
        raise FleetError(*found.refused)
    return found.remarks


def check_stage(
    schema: Schema, begun: LaunchCommand, origins: Origins | None = None
) -> FlagFindings:
    """Return the findings on one stage by the schema of its release."""
    found = FlagFindings()
    for problem in engine(begun.engine).flags.check(schema, begun.argv, begun.environment):
        if problem.by is JudgedBy.ADVICE and not problem_keys(begun, problem):
            continue  # a gpufleet variable that this release does not read
        sentence = problem_sentence(schema, begun, problem, origins or {})
        if problem.refuses:
            found += FlagFindings(refused=(sentence,))
        else:
            found += FlagFindings(remarks=(sentence,))
    return found


@cache
def check_fingerprint() -> str:
    """
    Return a fingerprint of the checking rules.

    The fingerprint is from the SHA-256 over everything that affects a verdict: the reader of
    releases, the rules and this file. The schemas that gpufleet contains do not count, because a
    release's own files replace them.
    """
    flags = Path(schema.__file__).parent
    judging = sorted(path for path in flags.glob("*.py") if path.stem not in _NOT_JUDGING)
    found = hashlib.sha256(payload.digest("flags/schema").encode())
    ours = sorted(Path(engines.__file__).parent.glob("*/*_check.py"))
    for path in (Path(__file__), *judging, *ours, flags / "data/changes.json"):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _not_known(begun: LaunchCommand) -> str:
    return (
        f"{begun.engine}.version: this gpufleet does not know the flags of "
        f"{engine(begun.engine).title} {begun.version}, so the release that is installed on each "
        "node checks them before any restart"
    )


def problem_keys(begun: LaunchCommand, problem: Problem) -> tuple[KeyPath, ...]:
    """Return the settings that cause a problem."""
    if problem.kind is Kind.MODEL and not problem.at:
        return (begun.keys[0],)
    if problem.at:
        return tuple(dict.fromkeys(begun.keys[place] for place in problem.at))
    key = begun.variables.get(problem.argument.partition("=")[0])
    return (key,) if key else ()


# -- sentences -------------------------------------------------------------------------------------


def problem_sentence(
    schema: Schema, begun: LaunchCommand, problem: Problem, origins: Origins
) -> str:
    """Return the sentence on a problem of a flag or variable: file, key, reason and correction."""
    keys = problem_keys(begun, problem)
    where = [f"{place}: " for key in keys[:1] if (place := _place(key, origins))]
    what = " and ".join(".".join(map(str, key)) for key in keys) or problem.argument
    since = f", since {problem.since}" if problem.since else ""
    remedy = "; ".join(_remedies(schema, problem))
    title = engine(begun.engine).title
    return f"{''.join(where)}{what}: {problem.found} ({title} {schema.version}{since})" + (
        f": {remedy}" if remedy else ""
    )


def _place(key: KeyPath, origins: Origins) -> str:
    origin = origins.get(str(key[0]))
    return str(origin.place_of(*key[1:])) if origin else ""


def _remedies(schema: Schema, problem: Problem) -> Iterator[str]:
    """Yield the correction, then further advice."""
    written = None if problem.rewritten is None else as_settings(problem.rewritten)
    variable = problem.kind is Kind.ENVIRONMENT
    if written == "":
        yield "remove it"
    elif written:
        yield f"remove it and set {written}" if variable else f"write {written}"
    if problem.replacement:
        yield f"instead: {problem.replacement}" if not written else problem.replacement
    elif problem.rewritten is None and problem.kind in {Kind.UNKNOWN, Kind.REMOVED}:
        name = problem.argument.split()[0].partition("=")[0]
        if near := get_close_matches(name, schema.by_option, n=3, cutoff=0.75):
            yield f"this release has {' and '.join(f'`{each}`' for each in near)}"


def as_settings(words: tuple[str, ...]) -> str:
    """
    Return arguments in the form of `flags` in group_vars, or "" if there are no arguments.

    >>> as_settings(("--kv-cache-dtype", "fp8", "--no-enable-x"))
    '`kv-cache-dtype: fp8` and `enable-x: false`'
    """
    lines: list[str] = []
    for option, values in _by_option(words):
        if not option.startswith("--"):  # a short form or a bare word has no key
            return f"`{' '.join(words)}`"
        name = option.removeprefix("--")
        if values:
            value = ", ".join(map(_scalar, values))
            lines.append(f"`{name}: {value if len(values) == 1 else f'[{value}]'}`")
        elif name.startswith("no-"):
            lines.append(f"`{name.removeprefix('no-')}: false`")
        else:
            lines.append(f"`{name}: true`")
    return " and ".join(lines)


def _by_option(words: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not groups:
            option, equals, value = word.partition("=")
            groups.append((option, [value] if equals else []))
        else:
            groups[-1][1].append(word)
    yield from groups


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("'", "''") + "'"
