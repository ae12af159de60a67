"""Settings that a server's unit cannot follow: it has no rights and sees few files.  Pure.

What is hidden is what templates/vllm/vllm.service.j2 hides: PrivateTmp=, ProtectHome= and a
/dev/shm of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served

_FIRST_FREE_PORT = 1024
# capabilities(7): below 1024 CAP_NET_BIND_SERVICE is needed. HAProxy's unit alone has it.
_PORTS_WITH_RIGHTS = frozenset({"gateway.port", "gateway.metrics_port"})

_HIDDEN = ("/tmp/", "/var/tmp/", "/dev/shm/", "/root/", "/run/user/")  # noqa: S108
_HOMES = "/home/"

# Flags of `vllm serve` that name files which it reads.
_READ = frozenset(
    {
        "allowed-local-media-path",
        "chat-template",
        "generation-config",
        "hf-config-path",
        "lora-modules",
        "reasoning-parser-plugin",
        "speculative-config",
        "tokenizer",
        "tool-parser-plugin",
    }
)
# Of these a relative path can be nothing else: a tokenizer or an adapter may be a Hub's name.
_FILES = frozenset({"chat-template", "reasoning-parser-plugin", "tool-parser-plugin"})
# Of these vLLM would also take a Hub's name, which servers cannot ask: `offline_variables`.
_OF_THE_HUB = frozenset(
    {"generation-config", "hf-config-path", "lora-modules", "speculative-config", "tokenizer"}
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_VARIABLES = frozenset(
    {"HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "VLLM_USE_MODELSCOPE"}
)
# What vLLM takes for the text of a template (vllm/entrypoints/chat_utils.py).
_IS_TEMPLATE = re.compile(r"[{}\n]")


def sandbox_mistakes(settings: NodeSettings) -> Iterator[tuple[KeyPath, str]]:
    """Yield what no server could start with, each with the path of its key."""
    yield from _ports(settings)
    if settings.vllm is None:
        return
    for name, served in settings.serving.items():
        here: KeyPath = ("serving", name)
        if served.is_path and (place := _hidden(served.model, homes=True)):
            yield (
                (*here, "model"),
                f"{served.model} is under {place}, which servers cannot see: they have their "
                "own /tmp, and no access to /root; move the files, as to /srv/models, or name "
                "the model by its Hugging Face id and commit",
            )
        for adapter, each in served.adapters.items():
            if each.is_path and (place := _hidden(each.source, homes=_in_a_home(served))):
                yield (
                    (*here, "adapters", adapter, "source"),
                    f"{each.source} is under {place}, which servers cannot see: move the files, as "
                    "to /srv/adapters, or name the adapter by its Hugging Face id and commit",
                )
        for flag, mistake in flag_mistakes(
            served.model, served.flags, {*settings.vllm.environment, *served.environment}
        ):
            yield (*here, "flags", flag), mistake
        yield from _too_few_at_once(here, served)


def _ports(settings: NodeSettings) -> Iterator[tuple[KeyPath, str]]:
    ports: dict[KeyPath, int] = {
        tuple(key.split(".")): port
        for key, port in settings.ports.items()
        if key not in _PORTS_WITH_RIGHTS
    }
    for name, served in settings.serving.items():
        ports["serving", name, "port"] = served.port
        ports["serving", name, "cluster_port"] = served.cluster_port
    for at, port in ports.items():
        if port < _FIRST_FREE_PORT:
            yield (
                at,
                f"is {port}, and only root can listen below {_FIRST_FREE_PORT}: this program is "
                f"not root; write {_FIRST_FREE_PORT} or more (a gateway may have 443)",
            )


def flag_mistakes(
    model: str, flags: Mapping[str, Any], variables: Set[str]
) -> Iterator[tuple[str, str]]:
    """Yield the flags that name a file or a model that a server cannot open, each with why."""
    for flag in flags:
        for name in _texts(flags[flag]) if flag in _READ else ():
            if mistake := _path_mistake(flag, name, homes=model.startswith(_HOMES)):
                yield flag, mistake
    if variables & _HUB_VARIABLES or "download-dir" in flags:
        return
    for flag in sorted(_OF_THE_HUB & flags.keys()):
        for name in _texts(flags[flag]):
            if _HUB_NAME.fullmatch(name):
                also = ", or list it under `adapters`" if flag == "lora-modules" else ""
                yield (
                    flag,
                    f"{name} is a name on the Hub, and servers start without it "
                    "(HF_HUB_OFFLINE=1): copy its files to every node that serves this and write "
                    f"their absolute path, as /srv/models/{name.rpartition('/')[2]}{also}",
                )


def _path_mistake(flag: str, path: str, *, homes: bool) -> str | None:
    """Return why a server cannot open a path; None: it can, or the path is no path."""
    if place := _hidden(path, homes=homes):
        return (
            f"{path} is under {place}, which servers cannot see: move it, as to /srv/models, on "
            "every node that serves this"
        )
    if path.startswith(("./", "../", "~")) or (
        flag in _FILES and not path.startswith("/") and not _IS_TEMPLATE.search(path)
    ):
        return (
            f"{path!r} is not an absolute path, and servers start in their own directory: copy the "
            "file to every node that serves this and write its absolute path, as "
            f"/srv/models/{path.rpartition('/')[2] or flag}"
        )
    return None


def _in_a_home(served: Served) -> bool:
    """Return whether a server sees /home, which holds its model."""
    return served.model.startswith(_HOMES)


def _too_few_at_once(here: KeyPath, served: Served) -> Iterator[tuple[KeyPath, str]]:
    """Warn of a server with fewer seats than `concurrency`."""
    seats = served.flags.get("max-num-seqs")
    # Only throughput has the plan choose engines.
    engines = served.data_parallel or (None if served.objective == "throughput" else 1)
    if not isinstance(seats, int) or isinstance(seats, bool) or engines is None:
        return
    if seats * engines < served.concurrency:
        yield (
            (*here, "flags", "max-num-seqs"),
            f"is {seats}: {engines * seats} requests run at once in a replica, and `concurrency` "
            f"asks for {served.concurrency}; write {-(-served.concurrency // engines)} or more, or "
            "a smaller `concurrency`",
        )


def _hidden(path: str, *, homes: bool) -> str | None:
    """Return the directory below which a path is hidden; with `homes`, /home is not."""
    below = path.rstrip("/") + "/"
    places = _HIDDEN if homes else (*_HIDDEN, _HOMES)
    return next((place.rstrip("/") for place in places if below.startswith(place)), None)


def _texts(value: Any) -> Iterator[str]:
    """Yield what may be a path in a flag's value: of `name=path`, of a list, of JSON."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError, RecursionError):
            yield from _texts(json.loads(value))
    elif isinstance(value, str):
        name, equals, path = value.partition("=")
        yield path if equals and re.fullmatch(r"[\w.-]+", name) else value
    elif isinstance(value, Mapping):
        for key in ("path", "model", "tokenizer"):
            yield from _texts(value.get(key))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
