"""The base class of settings, and types and constants that several of them use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import IPv4Network, ip_address
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyAddress,
    IPvAnyNetwork,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from gpufleet.versions import RELEASE

KeyPath: TypeAlias = tuple[str | int, ...]
"""The path to a key of nested variables: `("cuda", "repository", "url")`."""


def pattern_rule(pattern: str, what: str) -> AfterValidator:
    """
    Return a validator that requires a text to match a pattern. The validator accepts null.

    The error message contains `what`, which describes the text to write, instead of the pattern.
    """

    def has_form(text: str | None) -> str | None:
        if text is not None and not re.fullmatch(pattern, text):
            raise ValueError(f"must be {what} (got {text!r})")
        return text

    return AfterValidator(has_form)


Port = Annotated[int, Field(ge=1, le=65535, description="TCP port that the program listens on")]
Sha256 = Annotated[
    str,
    pattern_rule(r"[0-9a-f]{64}", "a SHA-256 digest of 64 digits, each 0-9 or a-f"),
    Field(description="SHA-256 digest of the file, with 64 digits"),
]
PackageIndex = Annotated[
    str,
    pattern_rule(
        r"(https?|file)://\S+|/\S+",
        "an address that starts with https:// or http://, or the path of a directory on the node",
    ),
]
Url = Annotated[
    str,
    pattern_rule(
        r"https?://\S+[^/\s]",
        "an address that starts with https:// or http://, without a trailing /",
    ),
    Field(description="The address, without a trailing slash"),
]

PythonVersion = Annotated[
    str,
    pattern_rule(RELEASE.pattern, "a release with three numbers, for example 0.33.0"),
    Field(description="Release, for example 0.33.0"),
]
"""A release of a Python program, for example 0.33.0 or 0.33.1rc1.post2."""


def _in_units(units: Mapping[str, int], what: str) -> BeforeValidator:
    """Return a validator that converts texts with units, for example `10m`, to numbers."""
    known = re.compile("(?:[0-9]+[" + "".join(units) + "])+")

    def number(value: Any) -> Any:
        if not isinstance(value, bool | str):
            return value
        text = str(value).replace(" ", "")
        if re.fullmatch("[0-9]{1,9}", text):
            return int(text)
        if len(text) > _LONGEST_NUMBER or not known.fullmatch(text):
            raise ValueError(f"must be {what} (got {value!r})")
        parts = re.findall("([0-9]+)([a-zA-Z])", text)
        return sum(int(count) * units[unit] for count, unit in parts)

    return BeforeValidator(number, json_schema_input_type=int | str)


_LONGEST_NUMBER = 20
Seconds = Annotated[
    int,
    _in_units(
        {"s": 1, "m": 60, "h": 3600, "d": 86400},
        "a number of seconds, for example 600, or a time with units, for example 10m or 1h30m",
    ),
]
# k and K have the same meaning in vLLM (human_readable_int in vllm/engine/arg_utils.py).
Tokens = Annotated[
    int,
    _in_units(
        {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2},
        "a number of tokens, for example 32768, or a number with a unit as in vLLM's "
        "flags: 32K is 32 times 1024, and 32k is 32 times 1000",
    ),
]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
"""Addresses that other machines cannot reach."""


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    if any(part in {".", ".."} for part in path.split("/")) or "\n" in path:
        raise ValueError("must be an absolute path without the parts . and ..")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


def _address(text: str) -> str:
    try:
        known = text == "localhost" or bool(ip_address(text))
    except ValueError:
        known = False
    if not known or "%" in text:  # a zone may be any text
        raise ValueError("must be an IP address, or localhost")
    return text


def _refuse_numbers(error_type: str) -> BeforeValidator:
    """Return a validator that refuses numbers. Python would read 1 and true as 0.0.0.1."""

    def refuse(value: Any) -> Any:
        if isinstance(value, int):
            raise PydanticCustomError(error_type, "must not be a number")
        return value

    return BeforeValidator(refuse)


Address = Annotated[IPvAnyAddress, _refuse_numbers("ip_any_address")]
Network = Annotated[IPvAnyNetwork, _refuse_numbers("ip_any_network")]
NetworkV4 = Annotated[IPv4Network, _refuse_numbers("ip_v4_network")]
BindAddress = Annotated[
    str, AfterValidator(_address), Field(description="IP address that the program listens on")
]
UnitName = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z0-9][A-Za-z0-9:_.@-]{0,240}\.service",
        "the name of a systemd unit, for example grafana.service",
    ),
    Field(description="Name of the program's systemd unit"),
]
# Characters that begin a new line of a configuration, or a command to a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Setting(BaseModel):
    """
    Base class of all settings: unknown keys are mistakes, and values do not change after reading.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=False)

    free_text: ClassVar[frozenset[str]] = frozenset()
    """
    Keys whose texts may contain line breaks, because every file that receives them quotes them.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_words_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number. Python would read them as 1 and 0."""
        if isinstance(value, bool):
            kinds = _plain_types(cls.model_fields[str(info.field_name)].rebuild_annotation())
            if not kinds.isdisjoint({int, float}) and bool not in kinds:
                raise PydanticKnownError("float_type" if float in kinds else "int_type")
        return value

    @model_validator(mode="after")
    def _has_no_control_characters(self) -> Self:
        """
        Refuse control characters, because texts are inserted into line-based configuration files.
        """
        for name in type(self).model_fields.keys() - self.free_text:
            for text in _texts(getattr(self, name)):
                if found := _CONTROL.search(text):
                    raise ValueError(
                        f"`{name}` contains the character {found[0]!r}: write the value in "
                        "one line, without control characters"
                    )
        return self


@cache
def _plain_types(annotation: Any) -> frozenset[Any]:
    """Return the types that a value may have, without those with a `BeforeValidator`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = any(isinstance(each, BeforeValidator) for each in parts[1:])
        return frozenset() if own else _plain_types(parts[0])
    if origin in (Union, UnionType):
        return frozenset().union(*map(_plain_types, parts))
    return frozenset({annotation})


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value, except those of nested settings, which validate themselves."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _texts(each)
