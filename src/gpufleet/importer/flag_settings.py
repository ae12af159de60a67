"""Convert a command line's flags to settings, or to notes if no conversion is possible. Pure.

Contract: the complete command line is checked as the engine would receive it. Afterwards, flags
that have their own setting and flags that the plan decides are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gpufleet.flags import values
from gpufleet.flags.command_line import CommandLine, GivenFlag, parse
from gpufleet.flags.problem import Kind, Problem, Severity
from gpufleet.flags.schema import FlagKind, Schema
from gpufleet.importer.findings import UNSET, Findings
from gpufleet.importer.flag_rules import FlagRules
from gpufleet.importer.nodes import Topology
from gpufleet.importer.placed import Placed

FIRST_PORT = 8000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL = "MODEL"
_ROUNDS = 60  # maximum number of rounds; each round removes one problem


class FlagSettings:
    """Converts the flags of one server. The results are in the findings."""

    def __init__(self, rules: FlagRules, found: Findings, published: int | None) -> None:
        """
        Set the rules, the findings, and the port that the server's container publishes (None: no
        port).
        """
        self._rules = rules
        self._schema = rules.schema
        self._required = {name for name, _ in rules.unset.values()}
        self._planned = {**rules.dropped, **rules.unsupported}
        self._found = found
        self._published = published

    def take(self, line: Placed) -> None:
        """Convert the arguments after the model to settings and notes."""
        line = Placed((_MODEL, *line.words), (-1, *line.places))
        nodes = Topology(parse(self._schema, line.words), self._schema)
        line = self._accepted(line)
        self._warn(line)
        planned = [given for given in self._parse(line).given if given.flag.name in self._planned]
        for given in planned:
            self._drop(line, given)
        line = line.without(at for given in planned for at in given.at)
        self._flags(line)
        nodes.tell(self._found)

    def _parse(self, line: Placed) -> CommandLine:
        return parse(self._schema, line.words)

    def _accepted(self, line: Placed) -> Placed:
        """Return the command line as the release accepts it, and add notes about the changes."""
        for _ in range(_ROUNDS):
            problems = self._rules.check(self._schema, line.words)
            refused = [one for one in problems if one.refuses and one.at and 0 not in one.at]
            if not refused:
                return line
            first = refused[0]
            # Flags that the plan decides are dropped without affecting other flags.
            planned = next(
                (
                    given
                    for given in self._parse(line).given
                    if given.flag.name in self._planned and set(given.at) & set(first.at)
                ),
                None,
            )
            if planned is not None:
                self._drop(line, planned)
                line = line.without(planned.at)
                continue
            self._found.say(_told(first), decide=is_open(first), at=line.place(first.at))
            line = line.replaced(first.at, first.rewritten or ())
        return line

    def _drop(self, line: Placed, given: GivenFlag) -> None:
        said = " ".join(line.words[at] for at in given.at)
        name = given.flag.name
        decide = name in self._rules.unsupported
        why = self._planned[name]
        if decide and values.read(self._schema, given) == (given.flag.default, ()):
            decide, why = False, "it is the default"
        self._found.say(f"`{said}` is dropped: {why}", decide=decide, at=line.place(given.at))

    def _warn(self, line: Placed) -> None:
        given = self._parse(line).given
        gone = {at for each in given if each.flag.name in self._planned for at in each.at}
        for problem in self._rules.check(self._schema, line.words):
            planned = bool({*problem.at} & gone)
            if problem.severity is Severity.WARN and problem.kind is not Kind.MODEL and not planned:
                fate = "left out" if problem.kind is Kind.REPEATED else "kept"
                self._found.say(
                    f"`{problem.argument}` is {fate}: {problem.found}", at=line.place(problem.at)
                )

    def _flags(self, line: Placed) -> None:
        for name, uses in self._parse(line).by_name.items():
            given = uses[-1]
            at = line.place(given.at)
            if name in self._rules.renamed and self._renamed(given, at):
                continue
            if name in self._rules.secrets:  # a different flag was rewritten to this flag
                for text in given.values:
                    self._found.drop_secret(f"`{name}`", text, self._rules.secrets[name], at)
                continue
            value, _ = values.read(self._schema, given)
            said = " ".join(line.words[each] for each in given.at)
            if value is None:
                self._found.say(
                    f"`{said}` is dropped, because it is the default of {self._rules.title}", at=at
                )
                continue
            if given.flag.kind is FlagKind.APPEND and len(uses) > 1:
                all_values = ", ".join(f"`{text}`" for use in uses for text in use.values)
                self._found.say(
                    f"`{name}` is given {len(uses)} times ({all_values}), but settings can "
                    f"contain a flag only once: only `{given.values[-1]}` is kept",
                    decide=True,
                    at=at,
                )
            self._found.flags[name.removeprefix("--")] = value
            for text in filter(UNSET.search, given.values):
                self._found.say(
                    f"`{name}` refers to `{text}`: write the value itself", decide=True, at=at
                )

    # -- settings of their own ---------------------------------------------------------------------

    def _renamed(self, given: GivenFlag, at: int) -> bool:
        """Convert a flag that has its own setting. Return False if it remains a flag."""
        name = self._rules.renamed[given.flag.name]
        if name == "model":
            return True  # `split_model` has read it
        value, faults = values.read(self._schema, given)
        written = f"{given.option} {' '.join(given.values)}".rstrip()
        if any(map(UNSET.search, given.values)):
            self._found.say(
                f"the value of `{written}` is not known: set `{name}` yourself", decide=True, at=at
            )
            if name == "served_name":
                self._found.served[name] = None
            return True
        if faults:
            return False
        take: Callable[[Any, str, int], bool] | None = {
            "context": self._context,
            "port": self._port,
            "revision": self._revision,
            "distributed_executor_backend": self._executor,
        }.get(name)
        if name == "served_name":
            return self._served_name(value, at)
        if take is not None:
            return take(value, written, at)
        if name == "data_parallel_balancing":
            value = _balancing(given.flag.name, on=value)
            if value is None:
                self._found.say(f"`{written}` is dropped, because it is off by default", at=at)
                return True
        self._found.served[name] = value
        if name == "drain_seconds":
            self._found.say(
                "gpufleet writes `--shutdown-timeout` as the setting `drain_seconds`", at=at
            )
        elif name == "data_parallel_balancing":
            self._found.say(
                f"gpufleet writes `{written}` as the setting `data_parallel_balancing: {value}`",
                at=at,
            )
        else:
            plan = (
                ""
                if name in self._required
                else ". If you remove this setting, the plan chooses the value"
            )
            self._found.say(
                f"gpufleet writes `{given.flag.name}` as the setting `{name}`{plan}", at=at
            )
        return True

    def _executor(self, value: Any, written: str, at: int) -> bool:
        if value == "ray":
            self._found.served["distributed_executor_backend"] = value
            self._found.say(
                f"gpufleet writes `{written}` as the setting `distributed_executor_backend`", at=at
            )
        elif value in {"mp", None}:
            self._found.say(f"`{written}` is dropped: it is the default", at=at)
        else:
            self._found.say(
                f"`{written}` is dropped, because `distributed_executor_backend` can only "
                "be `mp` or `ray`",
                decide=value != "uni",  # one process, vLLM's default for one GPU
                at=at,
            )
        return True

    def _served_name(self, value: Any, at: int) -> bool:
        first, *others = value if isinstance(value, list) else [value]
        self._found.served["served_name"] = first
        if others:
            self._found.say(
                f"`--served-model-name` has {', '.join(map(str, others))} besides {first}, "
                "but in settings a model has only one name: write the other names under "
                "`litellm.aliases`",
                decide=True,
                at=at,
            )
        return True

    def _context(self, value: Any, written: str, at: int) -> bool:
        if not isinstance(value, int) or value < 1:
            return False  # auto
        self._found.served["context"] = value
        self._found.say(f"gpufleet writes `{written}` as the setting `context`", at=at)
        return True

    def _port(self, value: Any, written: str, at: int) -> bool:
        if self._published is not None:
            self._found.say(
                f"`{written}` is dropped, because it is the port in the container; the "
                f"container publishes {self._published}",
                at=at,
            )
        elif value == FIRST_PORT:
            self._found.say(f"`{written}` is dropped: it is the default", at=at)
        else:
            self._found.served["port"] = value
            self._found.say(
                f"gpufleet writes `{written}` as the setting `port`. The first replica on a node "
                "uses this port, and further replicas use the next ports",
                at=at,
            )
        return True

    def _revision(self, value: Any, written: str, at: int) -> bool:
        if _COMMIT.fullmatch(str(value)):
            self._found.served["revision"] = value
        else:
            self._found.say(f"`{written}` is not a commit, so its files may change", at=at)
        return True


def _balancing(flag: str, *, on: bool) -> str | None:
    if not on:
        return None
    return "hybrid" if flag == "--data-parallel-hybrid-lb" else "external"


def split_model(line: Placed, rules: FlagRules) -> tuple[str | None, Placed]:
    """
    Return the model and the other arguments. The model is the first argument or an option's value.
    """
    words = line.words
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in rules.model and equals:
            return value, line.without((at,))
        if name in rules.model and at + 1 < len(words):
            return words[at + 1], line.without((at, at + 1))
    if words and not words[0].startswith("-"):
        return words[0], line.without((0,))
    parsed = parse(rules.schema, words)
    return parsed.model, line.without(parsed.model_at)


def quantization_of(words: Sequence[str], schema: Schema) -> str | None:
    """Return the value of `--quantization`, or None if the option is not given."""
    given = parse(schema, (_MODEL, *words)).last("--quantization")
    return given.values[-1] if given is not None and given.values else None


def is_open(problem: Problem) -> bool:
    """Return whether the operator must decide about a problem."""
    return problem.rewritten is None and problem.kind not in {Kind.REMOVED, Kind.NEVER}


def _told(problem: Problem) -> str:
    said = f"`{problem.argument}`: {problem.found}"
    if problem.rewritten:
        return f"{said}; it is rewritten to `{' '.join(problem.rewritten)}`"
    if problem.rewritten is None and problem.replacement:
        return f"{said}; it is dropped. Use instead: {problem.replacement}"
    return f"{said}; dropped"
