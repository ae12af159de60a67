"""Define the problem of one argument or variable.  Leaf."""

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
    """Whether a problem stops a deployment."""

    REFUSE = "refuse"
    WARN = "warn"


class JudgedBy(StrEnum):
    """The part of vLLM that refuses it; `ADVICE`: none does."""

    PARSER = "parser"  # vLLM's parser refuses it: the process ends at once with status 2
    START = "start"  # the parser accepts it, but the server ends while it starts
    ADVICE = (
        "advice"  # the server starts, but does not do what was requested, or what it did before
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """
    One problem.

    `argument` is as the operator wrote it, its values included, and `at` its places in argv (none
    for a variable). `found` is a sentence without a full stop. `since` is the first release known
    to behave so. `replacement` is for display; `rewritten` are the arguments that replace those at
    `at`; no arguments: remove these; None: the operator must decide. For a variable `rewritten` are
    arguments to add once the variable is dropped.
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
        """Return whether it forbids a deploy."""
        return self.severity is Severity.REFUSE

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
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
