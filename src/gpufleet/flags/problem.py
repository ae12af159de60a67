"""Describe the problem of one argument or environment variable. Leaf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The kind of problem."""

    UNKNOWN = "unknown"  # no such name in this release; another release may have it
    NEVER = "never"  # no release of `vllm serve` has it, whatever is written about it
    REMOVED = "removed"
    RENAMED = "renamed"
    PREFIX = "prefix"  # the beginning of one name: argparse would take it for that
    AMBIGUOUS = "ambiguous-prefix"  # the beginning of several
    FORM = "form"  # a valid setting in a notation that this release does not read
    VALUE = "value"  # no value, or not of the type
    CHOICE = "choice"  # not one of the values that it takes
    JSON = "json"  # no JSON, or JSON that does not fit
    STRAY = "stray"  # a word that belongs to no flag
    MODEL = "model"  # the model is missing, or is not where the release takes it
    CONFLICT = "conflict"  # valid separately, refused together
    ENVIRONMENT = "environment"  # of a variable
    MEANING = "meaning"  # accepted, and does something else than it once did
    DEPRECATED = "deprecated"  # accepted, and without effect or on its way out
    UNREAD = "unread"  # accepted, and without effect: the option that it belongs to is off
    REPEATED = "repeated"  # given twice, and only the last one counts
    HELP = "help"  # prints help and serves nothing


class Severity(StrEnum):
    """Whether a problem stops a deployment (`REFUSE`) or not (`WARN`)."""

    REFUSE = "refuse"
    WARN = "warn"


class JudgedBy(StrEnum):
    """Which part of vLLM refuses an argument. `ADVICE` means that vLLM accepts the argument."""

    PARSER = "parser"  # vLLM's parser refuses it: the process ends at once with status 2
    START = "start"  # the parser accepts it, but the server ends while it starts
    ADVICE = (
        "advice"  # the server starts, but does not do what was requested, or what it did before
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """
    A problem of one argument or variable.

    `argument` is the argument with its values as typed. `at` has their indexes in argv, and is
    empty for a variable. `found` is a sentence without a full stop. `since` is the first release
    that is known to have the problem. `replacement` is text for display.

    `rewritten` has the arguments that replace those at the indexes `at`. If it is empty, remove the
    arguments. If it is None, the operator must decide. For a variable, `rewritten` has arguments to
    add to the command line when the variable is removed.
    """

    kind: Kind
    severity: Severity
    by: JudgedBy
    argument: str
    found: str
    since: str | None = None
    replacement: str | None = None
    rewritten: tuple[str, ...] | None = None
    at: tuple[int, ...] = ()

    @property
    def refuses(self) -> bool:
        """Return whether the problem prevents a deploy."""
        return self.severity is Severity.REFUSE

    def as_json(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        return {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "by": self.by.value,
            "argument": self.argument,
            "found": self.found,
            "since": self.since,
            "replacement": self.replacement,
            "rewritten": None if self.rewritten is None else list(self.rewritten),
            "at": list(self.at),
        }
