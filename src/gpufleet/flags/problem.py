"""Describe the problem of one argument or environment variable. Leaf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The kind of problem."""

    UNKNOWN = "unknown"  # this release has no such name; a different release may have it
    NEVER = "never"  # no release of `vllm serve` has the name, although documents mention it
    REMOVED = "removed"
    RENAMED = "renamed"
    PREFIX = "prefix"  # an abbreviation of one name, which argparse accepts
    AMBIGUOUS = "ambiguous-prefix"  # an abbreviation of several names
    FORM = "form"  # a valid setting in a notation that this release does not read
    VALUE = "value"  # there is no value, or it has the wrong type
    CHOICE = "choice"  # not one of the accepted values
    JSON = "json"  # not JSON, or JSON with wrong keys or values
    STRAY = "stray"  # a word that belongs to no flag
    MODEL = "model"  # the model is missing, or is in a place where the release does not accept it
    CONFLICT = "conflict"  # flags that are valid separately, but refused together
    ENVIRONMENT = "environment"  # a problem of an environment variable
    MEANING = "meaning"  # accepted, but has a different effect than in earlier releases
    DEPRECATED = "deprecated"  # accepted, but without effect, or to be removed
    UNREAD = "unread"  # accepted, but without effect, because the option that it needs is off
    REPEATED = "repeated"  # given several times, but vLLM uses only the last one
    HELP = "help"  # prints help instead of starting a server


class Severity(StrEnum):
    """Whether a problem stops a deployment (`REFUSE`) or not (`WARN`)."""

    REFUSE = "refuse"
    WARN = "warn"


class JudgedBy(StrEnum):
    """Which part of vLLM refuses an argument. `ADVICE` means that vLLM accepts the argument."""

    PARSER = "parser"  # vLLM's parser refuses it: the process ends at once with status 2
    START = "start"  # the parser accepts it, but the server ends while it starts
    ADVICE = "advice"  # the server starts, but may not do what the operator expects


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
