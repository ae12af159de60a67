"""The exception type for operators, and sentences for parser errors.

The text of the exception is printed unchanged, so every problem is a whole sentence: the finding,
why it is wrong, and what to do, with the file and the key if there is one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml


class FleetError(Exception):
    """An error that the operator can correct. It carries all problems, not only the first.

    `problems` are the sentences, in the order in which they were found. `str()` has one problem on
    each line.
    """

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a FleetError needs at least one problem")
        self.problems: tuple[str, ...] = problems
        super().__init__("\n".join(problems))


class NotKnownError(FleetError):
    """The error for something that may be valid, but that gpufleet cannot judge."""


# Beginnings of what PyYAML 6 says (scanner.py, parser.py, composer.py), in an operator's words.
_YAML = {
    "found character '\\t'": "a tab indents the line, which YAML does not allow: use spaces",
    "could not determine a constructor": "a value has a tag (`!name`) that YAML does not define",
    "found unhashable key": "a name is a mapping or a list: put quotes around the name",
    "found character": "YAML reserves the character at that place: put quotes around the value",
    "mapping values are not allowed": "there is a `: ` inside a value: put quotes around the value",
    "could not find expected ':'": "there is a name without `:`",
    "expected <block end>": "the indentation differs from the lines before, or a quote is missing",
    "expected ',' or": "a `,` or a closing bracket is missing",
    "expected the node content": "a value is missing",
    "found unexpected end of stream": "the file ends before the closing quote of a text",
    "found undefined alias": "`*` refers to an anchor that no `&` defines: "
    "if the value is text, put quotes around it",
    "found duplicate anchor": "`&` defines the same name twice",
    "but found another document": "a second document begins, but a file of settings has only one",
    "expected a single document": "a second document begins, but a file of settings has only one",
    "found unknown escape character": "`\\` precedes a character that YAML cannot escape: "
    "write the text in single quotes",
    "special characters are not allowed": "the file has a character that YAML does not allow",
}
_JSON = {
    "Expecting value": "a JSON value is expected there",
    "Expecting property name": "a name in double quotes is missing at that place",
    "Expecting ':'": "a `:` is missing at that place",
    "Expecting ','": "a `,` or a closing bracket is missing at that place",
    "Illegal trailing comma": "the `,` at that place must be removed",
    "Extra data": "the JSON value ends before that place, but more text follows",
    "Unterminated string": "the text that begins there has no closing quote",
    "Invalid control character": "a text has a control character at that place: "
    "write an escape, for example `\\n`",
    "Invalid \\": "`\\` precedes a character that JSON cannot escape",
}


def file_fault(error: OSError | ValueError) -> str:
    """
    Return why a text file cannot be read.

    >>> file_fault(UnicodeDecodeError("utf-8", b"a\\xff", 1, 2, "invalid start byte"))
    'its byte 2 is not valid UTF-8'
    """
    if isinstance(error, UnicodeDecodeError):
        return f"its byte {error.start + 1} is not valid UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}: is not JSON: {json_fault(error)}"
    if isinstance(error, OSError):
        return error.strerror or "the system reports no reason"
    return (
        "it contains a number or a text that is too long, or a character that is not allowed "
        "in a file name"
    )


def json_fault(error: json.JSONDecodeError) -> str:
    """
    Return the syntax error of invalid JSON with its column, without quoting the line.

    >>> json_fault(json.JSONDecodeError("Expecting value", "[1, x]", 4))
    'column 5: a JSON value is expected there'
    """
    if not error.doc.strip("\ufeff \t\r\n"):
        return "the text is empty"
    if error.pos >= len(error.doc.rstrip()):
        return "the text is incomplete"
    known = (words for begins, words in _JSON.items() if error.msg.startswith(begins))
    return f"column {error.colno}: {next(known, 'it cannot be read from there on')}"


def answer_fault(error: Exception) -> str:
    """
    Return the mistake in a program's answer, from the exception of its parser.

    >>> answer_fault(KeyError("gpus"))
    "it has no 'gpus'"
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, OverflowError | RecursionError):
        return "a number is too large, or the values are nested too deeply"
    return "a value has a different type than the program writes"


def yaml_fault(error: yaml.YAMLError) -> str:
    """Return the syntax error of invalid YAML, without quoting the line."""
    said = " ".join(str(each) for each in (getattr(error, "problem", ""), error) if each)
    known = (words for begins, words in _YAML.items() if begins in said)
    return next(known, "the text after that place cannot be read")
