"""What all settings are made of: their base class, and types and constants of several of them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


class Setting(BaseModel):
    """Base of all settings: an unknown key is a mistake, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=False)
