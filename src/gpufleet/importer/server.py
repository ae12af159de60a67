"""Define a server as it is started now, and notes about it. Leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.settings.engine_flags import EngineName


@dataclass(frozen=True)
class Note:
    """
    One sentence about a part that was dropped, renamed or kept.

    `where` is the server's name, or "" if the note is about the whole file. `decide` means that the
    operator has to decide.
    """

    text: str
    where: str = ""
    decide: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True)
class ProxyName:
    """
    One of the names that LiteLLM offers to clients.

    `name` is None if it is equal to the server's own name. `asks` is the name of the model in
    LiteLLM's requests to the server, or None if unknown. `parameters` are defaults for requests.
    """

    name: str | None = None
    asks: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """
    One server of an engine, however it is started.

    `argv` has the original arguments of `vllm serve` or `sglang serve`. `mounts` has paths of a
    container, as (path in the container, path on the node). `version` is the release that the
    server runs now, if the text has it. `left_behind` has words after the command that a shell
    would not pass to the engine.
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
    """Names of variables in `environment` whose values are secrets that are not in the text."""
    engine: EngineName = "vllm"


@dataclass(frozen=True)
class Source:
    """
    What a text contains: servers, LiteLLM's names for other servers, and notes on the whole text.

    `inventory` is the text of an inventory file, or "" if the text has no hosts. `hosts` are the
    entries of this file: a name, or (name, variables).
    """

    launches: tuple[Launch, ...] = ()
    notes: tuple[Note, ...] = ()
    names: tuple[ProxyName, ...] = ()
    inventory: str = ""
    hosts: tuple[Any, ...] = ()
