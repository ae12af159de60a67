"""What all settings are made of: their base class, and types and constants of several of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gpufleet.versions import RELEASE

KeyPath: TypeAlias = tuple[str | int, ...]
"""The way to a key of nested variables: `("cuda", "repository", "url")`."""

Port = Annotated[int, Field(ge=1, le=65535)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Url = Annotated[str, Field(pattern=r"^https?://\S+[^/\s]$", description="Without final slash")]

PythonVersion = Annotated[str, Field(pattern=rf"^{RELEASE.pattern}$")]
"""A release of a Python program, as 0.33.0 or 0.33.1rc1.post2."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
"""Addresses on which nobody outside of the node reaches a program."""


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    if any(part in {".", ".."} for part in path.split("/")) or "\n" in path:
        raise ValueError("must be a plain absolute path, without . or ..")
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


BindAddress = Annotated[str, AfterValidator(_address), Field(description="Address that it binds")]
UnitName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9:_.@-]{0,240}\.service$")]
# What would begin another line of a configuration, or a command of a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Setting(BaseModel):
    """Base of all settings: an unknown key is a mistake, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=False)

    free_text: ClassVar[frozenset[str]] = frozenset()
    """Keys whose texts may have line ends: they are quoted wherever they go."""

    @model_validator(mode="after")
    def _has_no_control_characters(self) -> Self:
        """Texts go into configurations, where a line end would begin a line of its own."""
        for name in type(self).model_fields.keys() - self.free_text:
            for text in _texts(getattr(self, name)):
                if found := _CONTROL.search(text):
                    raise ValueError(
                        f"`{name}` has the character {found[0]!r}: write it in one line, without "
                        "control characters"
                    )
        return self


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value, but for those of settings inside it, which judge themselves."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _texts(each)
