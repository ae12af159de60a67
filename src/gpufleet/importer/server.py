"""Define a server as it is started today, and the notes about it.  Leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Note:
    """
    One sentence about what was dropped, renamed or kept.

    `where` is the server's name, "" for the file. `decide`: something is left to the operator.
    """

    text: str
    where: str = ""
    decide: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True)
class ProxyName:
    """
    One of LiteLLM's names for clients.

    `name` is None if it is the server's own; `asks` is LiteLLM's name for the model at the server,
    None if not given. `parameters` are defaults for requests.
    """

    name: str | None = None
    asks: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """
    One `vllm serve`, started in any way.

    `argv` are the arguments of `vllm serve`, as written. `mounts` are a container's paths (inside,
    on the node). `version` is the release that it runs today, if stated. `left_behind` are words
    after the command that a shell does not pass to vLLM.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    mounts: tuple[tuple[str, str], ...] = ()
    version: str | None = None
    notes: tuple[Note, ...] = ()
    proxy_names: tuple[ProxyName, ...] = ()
    replicas: int | None = None
    left_behind: tuple[str, ...] = ()
    secret_variables: frozenset[str] = frozenset()
    """Names in `environment` whose values are secrets that lie elsewhere."""


@dataclass(frozen=True)
class Source:
    """
    Content of a text: servers, LiteLLM names without one, and notes on the whole text.

    `inventory` is the text of an inventory file; "": the text has no hosts. `hosts` are those of
    it, as an inventory file writes them: a name, or (name, its variables).
    """

    launches: tuple[Launch, ...] = ()
    notes: tuple[Note, ...] = ()
    names: tuple[ProxyName, ...] = ()
    inventory: str = ""
    hosts: tuple[Any, ...] = ()
