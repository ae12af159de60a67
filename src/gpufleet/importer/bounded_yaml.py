"""
Parse YAML that is not trusted. Pure.

If a text has mistakes, too many aliases or too many levels, an error with a message is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from gpufleet.errors import FleetError, yaml_fault

_MOST_VALUES = 100_000
"""The maximum number of values in a YAML text after its aliases are expanded."""


class NoYamlError(Exception):
    """
    Raised for a text that is not YAML. The message has the mistake and line number, but not the
    line.
    """


def load_documents(text: str) -> tuple[Any, ...]:
    """
    Return the values of all documents in a YAML text, except empty documents.

    Raises `NoYamlError` if the text is not YAML. Raises `FleetError` if values are nested too
    deeply, or if aliases expand to too many values.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise NoYamlError(_where(error)) from None
    found = []
    known: dict[int, int] = {}
    size = 0
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                break
            size += _size(node, known)
            if size > _MOST_VALUES:
                raise FleetError(
                    f"the aliases (`*name`) in it expand to more than {_MOST_VALUES:,} "
                    "values: write the values in place of the aliases, or remove the "
                    "aliases"
                )
            found.append(loader.construct_document(node))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise NoYamlError(_where(error)) from None
    except RecursionError:
        raise FleetError("the values are nested too deeply") from None
    finally:
        loader.dispose()
    return tuple(each for each in found if each is not None)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """
    Return the number of values in a YAML node after aliases are expanded. Each node is visited
    once.
    """
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # a value that contains itself has no finite size
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _where(error: yaml.YAMLError | ValueError) -> str:
    """
    Return the mistake and its line number. The line itself is left out, because it may have a key.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {yaml_fault(error)}"
    if isinstance(error, yaml.YAMLError):
        return yaml_fault(error)
    return "it cannot be read as text"


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping with its keys as text, or {} for any other value."""
    if not isinstance(value, Mapping):
        return {}
    return {str(key): below for key, below in value.items()}


def items(value: Any) -> list[Any]:
    """Return a list unchanged, or [] for any other value."""
    return value if isinstance(value, list) else []


def scalar_text(value: Any) -> str:
    """
    Return a scalar as text for a command line or a variable.

    >>> scalar_text(True), scalar_text(0.5), scalar_text(None)
    ('true', '0.5', '')
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
