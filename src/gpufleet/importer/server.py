"""Define a server as it is started now, and the notes about it. Leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.settings.engine_flags import EngineName


@dataclass(frozen=True)
class Note:
    """
    One sentence about a dropped, renamed or kept part.

    `where` is the server's name, or "" for the file. `decide` means that the operator must decide.
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

    `name` is None if it is the server's own. `asks` is LiteLLM's name for the model at the server,
    or None if not given. `parameters` has defaults for requests.
    """

    name: str | None = None
    asks: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """
    One server of an engine, started in any way.

    `argv` has the original arguments of `vllm serve` or `sglang serve`. `mounts` has a container's
    paths (inside, on the node). `version` is the release that it runs now, if stated. `left_behind`
    has words after the command that a shell does not pass to the engine.
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
    """Names in `environment` whose values are secrets that are stored elsewhere."""
    engine: EngineName = "vllm"


@dataclass(frozen=True)
class Source:
    """
    Content of a text: servers, LiteLLM names without one, and notes on the whole text.

    `inventory` is the text of an inventory file, or "" without hosts. `hosts` has its hosts in the
    form of an inventory file: a name, or (name, its variables).
    """

    launches: tuple[Launch, ...] = ()
    notes: tuple[Note, ...] = ()
    names: tuple[ProxyName, ...] = ()
    inventory: str = ""
    hosts: tuple[Any, ...] = ()
