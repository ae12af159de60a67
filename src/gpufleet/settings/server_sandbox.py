"""Refuse settings that fail in a server's unit, which has no privileges and sees few files.  Pure.

templates/vllm/vllm.service.j2 hides files from the server with PrivateTmp=, ProtectHome= and a
private /dev/shm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from gpufleet.settings import engine_flags
from gpufleet.settings.base import KeyPath
from gpufleet.settings.engine_flags import DEFAULT, SLOT_FLAGS, EngineName, FileFlags
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served

FIRST_FREE_PORT = 1024
# Ports below 1024 need CAP_NET_BIND_SERVICE (capabilities(7)). Only HAProxy's unit has it.
_PORTS_WITH_RIGHTS = frozenset({"gateway.port", "gateway.metrics_port"})

_HOMES = "/home/"
_HIDDEN = {
    "/tmp/": "servers have their own /tmp",  # noqa: S108
    "/var/tmp/": "servers have their own /var/tmp",  # noqa: S108
    "/dev/shm/": "servers have their own /dev/shm, and a restart of the node empties /dev/shm",  # noqa: S108
    "/root/": "servers do not run as root, so they have no access to root's directory",
    "/run/user/": "the system removes a user's directory there when the user logs out",
    _HOMES: "the directories of users are hidden from servers",
}
"""Directories that servers cannot see, each with the reason."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_WORD = re.compile(r"[\w-][\w.-]*")  # the Hub also has such names: gpt2
_HUB_VARIABLES = frozenset(
    {
        "HF_HUB_OFFLINE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "SGLANG_USE_MODELSCOPE",
        "VLLM_USE_MODELSCOPE",
    }
)


def sandbox_mistakes(settings: NodeSettings) -> Iterator[tuple[KeyPath, str]]:
    """Yield each setting that prevents a server from working, as (path of the key, problem)."""
    yield from _ports(settings)
    for name, served in settings.serving.items():
        here: KeyPath = ("serving", name)
        if served.is_path and (place := _hidden(served.model, homes=True)):
            yield (
                (*here, "model"),
                f"{served.model} is under {place}, which servers cannot see: {_why(place)}; "
                "move the files, for example to /srv/models, or write the model's Hugging "
                "Face id and commit",
            )
        for adapter, each in served.adapters.items():
            if each.is_path and (place := _hidden(each.source, homes=_in_a_home(served))):
                yield (
                    (*here, "adapters", adapter, "source"),
                    f"{each.source} is under {place}, which servers cannot see: "
                    f"{_why(place)}; move the files, for example to /srv/adapters, or write "
                    "the adapter's Hugging Face id and commit",
                )
        for flag, mistake in flag_mistakes(
            served.model,
            served.flags,
            {*settings.engine_of(name).environment, *served.environment},
            served.engine,
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
        if port < FIRST_FREE_PORT:
            yield (
                at,
                f"is {port}, but only root can listen on ports below {FIRST_FREE_PORT}, and "
                f"this program does not run as root: write {FIRST_FREE_PORT} or more (only "
                "a gateway may use a port such as 443)",
            )


def flag_mistakes(
    model: str, flags: Mapping[str, Any], variables: Set[str], engine: EngineName = DEFAULT
) -> Iterator[tuple[str, str]]:
    """Yield each flag that names a file or model which a server cannot open, with the reason."""
    files = engine_flags.of(engine).files
    for flag, name in _named(files, flags):
        if mistake := _path_mistake(files, flag, name, homes=model.startswith(_HOMES)):
            yield flag, mistake
    if variables & _HUB_VARIABLES or "download-dir" in flags:
        return
    # Only some engines support the setting `adapters`.
    listed = "adapters" not in engine_flags.of(engine).accepted
    for flag, name in sorted(_named(files, flags)):
        if flag in files.hub and _HUB_NAME.fullmatch(name):
            adapter = flag in files.adapters
            also = ", or add the adapter to `adapters`" if adapter and listed else ""
            path = " or a relative path" if adapter else ""
            neither = (
                "can neither see that path nor query the Hub" if path else "start without the Hub"
            )
            yield (
                flag,
                f"{name} is a name on the Hub{path}, but servers {neither} "
                "(HF_HUB_OFFLINE=1): copy the files to every node that serves this entry, "
                "and write their absolute path, for example "
                f"/srv/models/{name.rpartition('/')[2]}{also}",
            )
        elif flag in files.hub and _HUB_WORD.fullmatch(name):
            yield flag, _relative(files, flag, name)


def absolute_paths(served: Served) -> Iterator[tuple[str, str]]:
    """Yield each flag that names a file or a directory of the node, with its path."""
    for flag, name in _named(engine_flags.of(served.engine).files, served.flags):
        if name.startswith("/"):
            yield flag, name


def _path_mistake(files: FileFlags, flag: str, path: str, *, homes: bool) -> str | None:
    """
    Return why a server cannot open a path.

    The result is None if the server can open the path, or if the value is not a path.
    """
    if place := _hidden(path, homes=homes):
        return (
            f"{path} is under {place}, which servers cannot see: {_why(place)}; on every "
            "node that serves this entry, move it to a different directory, for example to "
            "/srv/models"
        )
    if not path or path.startswith("/"):
        return None
    if flag in files.hub and (_HUB_NAME.fullmatch(path) or _HUB_WORD.fullmatch(path)):
        return None
    return _relative(files, flag, path)


def _relative(files: FileFlags, flag: str, path: str) -> str:
    """Return the message for a path that is not absolute."""
    what = "file" if flag in files.one_file else "files"
    return (
        f"{path!r} is not an absolute path, but servers start in their own directory: copy "
        f"the {what} to every node that serves this entry, and write the absolute path, for "
        f"example /srv/models/{path.rstrip('/').rpartition('/')[2] or flag}"
    )


def _in_a_home(served: Served) -> bool:
    """Return whether the entry's model is under /home. The sandbox of such a server shows /home."""
    return served.model.startswith(_HOMES)


def _too_few_at_once(here: KeyPath, served: Served) -> Iterator[tuple[KeyPath, str]]:
    """
    Yield a mistake if a replica cannot run as many requests at once as `concurrency` requires.
    """
    flag = SLOT_FLAGS[served.engine]
    seats = served.flags.get(flag)
    # The plan gives a replica several engines only for `objective: throughput`.
    engines = served.data_parallel or (None if served.objective == "throughput" else 1)
    if not isinstance(seats, int) or isinstance(seats, bool) or engines is None:
        return
    if seats * engines < served.concurrency:
        yield (
            (*here, "flags", flag),
            f"is {seats}, so a replica runs {engines * seats} requests at once, but "
            f"`concurrency` is {served.concurrency}: write "
            f"{-(-served.concurrency // engines)} or more here, or set a smaller "
            "`concurrency`",
        )


def _hidden(path: str, *, homes: bool) -> str | None:
    """Return the hidden directory that contains a path, or None. With `homes`, /home is visible."""
    below = path.rstrip("/") + "/"
    places = [place for place in _HIDDEN if not (homes and place == _HOMES)]
    return next((place.rstrip("/") for place in places if below.startswith(place)), None)


def _why(place: str) -> str:
    """Return the reason why servers cannot see a directory of `_HIDDEN`."""
    return _HIDDEN[f"{place}/"]


def _named(files: FileFlags, flags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each flag that names files or models, with each path or Hub name in its value."""
    for flag, value in flags.items():
        for name in _names(flag, value) if flag in files.read else ():
            if not re.fullmatch(files.not_paths.get(flag, r"(?!)"), name):
                yield flag, name


def _names(flag: str, value: Any) -> Iterator[str]:
    """Yield the paths and the names of models in a flag's value."""
    if flag == "default-mm-loras" and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if flag == "default-mm-loras" and isinstance(value, Mapping):
        value = [each for each in value.values() if isinstance(each, str)]
    yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    """
    Yield the texts in a flag's value that may be paths, also in `name=path`, in a list or in JSON.
    """
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError, RecursionError):
            yield from _texts(json.loads(value))
    elif isinstance(value, str):
        name, equals, path = value.partition("=")
        yield path if equals and re.fullmatch(r"[\w.-][\w./:-]*", name) else value
    elif isinstance(value, Mapping):
        for key in ("path", "lora_path", "model", "tokenizer"):
            yield from _texts(value.get(key))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
