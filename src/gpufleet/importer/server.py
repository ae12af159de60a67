"""One server as somebody starts it today, and what is told about it.  Leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Note:
    """
    One sentence about what was dropped, renamed or kept.

    `where` is the server's name, "" for the file. `decide`: something is left for a person to do.
    """

    text: str
    where: str = ""
    decide: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True)
class Launch:
    """
    One `vllm serve`, whatever starts it.

    `argv` stands behind `vllm serve`, as written. `mounts` are (path inside, path on the node),
    where a container's differ. `version` is the release that it runs today, if that is said.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    mounts: tuple[tuple[str, str], ...] = ()
    version: str | None = None
    notes: tuple[Note, ...] = ()
