"""Convert pydantic's errors to messages that state the required value.  Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.formatting import suggestion
from gpufleet.settings.base import KeyPath

_MOST_SHOWN = 60


def describe_mistake(error: Mapping[str, Any]) -> tuple[KeyPath, str]:
    """
    Return the path of the key and a message for one of the errors in `ValidationError.errors()`.
    """
    kind, value = str(error["type"]), error["input"]
    at = tuple(part for part in error["loc"] if part != "[key]")
    if kind == "extra_forbidden":
        return at, "no setting has this name"
    if kind == "missing":
        return at, "is required but not set"
    if kind == "value_error":
        return at, str(error["msg"]).removeprefix("Value error, ")
    wanted = _WANTED.get(kind)
    what = wanted(error.get("ctx", {}), value) if wanted else "of a different form"
    return at, f"must be {what} ({_got(value)})"


def _got(value: Any) -> str:
    """Return the part of a message that shows the given value. A long value is shortened."""
    if value is None:
        return "the key has no value"
    if isinstance(value, bool):
        return f"got {str(value).lower()}"
    if isinstance(value, dt.date):
        return f"got {value.isoformat()}, a date in YAML"
    if isinstance(value, Mapping):
        return "got keys with values" if value else "got {}"
    shown = repr(value)
    return f"got {shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + '...'}"


def _text(_: Mapping[str, Any], value: Any) -> str:
    if isinstance(value, bool):
        return (
            "text: put the word in quotes, because without quotes YAML reads yes, no, on "
            "and off as true or false"
        )
    if isinstance(value, int | float):
        return f'text: put the number in quotes, for example "{value}"'
    return "text"


def _choice(about: Mapping[str, Any], value: Any) -> str:
    choices = re.findall(r"'([^']*)'", str(about["expected"]))
    near = suggestion(value, choices) if isinstance(value, str) else ""
    return f"{_or(choices)}{near}"


def _or(choices: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _always(what: str) -> Callable[[Mapping[str, Any], Any], str]:
    return lambda about, _: what.format(**about)


def _number(what: str) -> Callable[[Mapping[str, Any], Any], str]:
    def wanted(_: Mapping[str, Any], value: Any) -> str:
        quoted = isinstance(value, str) and value.replace(".", "", 1).isdecimal()
        return f"{what}, without quotes" if quoted else what

    return wanted


_NUMBER = _number("a number")
_WHOLE = _number("a whole number")
_DATE = _always("a date, for example 2026-12-31")
_SWITCH = _always("true or false")
_LIST = _always("a list: write [one, another], or one line that begins with `- ` for each item")
_KEYS = _always(
    "keys with values: write each key with its value on a separate line below this line"
)

_WANTED: Mapping[str, Callable[[Mapping[str, Any], Any], str]] = {
    "bool_parsing": _SWITCH,
    "bool_type": _SWITCH,
    "date_from_datetime_inexact": _DATE,
    "date_from_datetime_parsing": _DATE,
    "date_parsing": _DATE,
    "date_type": _DATE,
    "dict_type": _KEYS,
    "finite_number": _NUMBER,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "greater_than": _always("more than {gt}"),
    "greater_than_equal": _always("{ge} or more"),
    "int_from_float": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_type": _WHOLE,
    "ip_any_network": _always("a network, for example 10.0.0.0/24"),
    "ip_any_address": _always("an IP address, for example 10.0.0.9"),
    "ip_v4_network": _always("an IPv4 network, for example 10.0.0.0/24"),
    "invalid_key": _always("text where it is used as a key: put the key in quotes"),
    "less_than_equal": _always("at most {le}"),
    "literal_error": _choice,
    "model_type": _KEYS,
    "string_type": _text,
    "too_short": _always("a list of {min_length} or more items"),
    "tuple_type": _LIST,
}
"""Functions that describe the required value in words, by pydantic's error type."""
