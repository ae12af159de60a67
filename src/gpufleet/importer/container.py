"""Read vLLM containers from `docker run` and docker-compose files.  Pure.

Contract: only the options that concern the server are converted. All other options of the
container, also unknown ones, are reported with the reason for dropping them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gpufleet.importer.other_engines import as_launch, find_engine, started_engine
from gpufleet.importer.server import Launch, Note
from gpufleet.versions import RELEASE

Inside: TypeAlias = Callable[[str], Launch | None]
"""
A function that returns the server in the script of `sh -c`, or None if the script starts none.
"""

_IMAGE = re.compile(rf"vllm[^:@]*(?::v?({RELEASE.pattern}))?(?:@.*)?$")
_ENTRIES = (
    ("vllm", "serve"),
    ("serve",),
    ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    ("python", "-m", "vllm.entrypoints.openai.api_server"),
)

_BUNDLED = {"d", "i", "t", "it", "ti", "dit", "P"}
_ALONE = _BUNDLED | {"detach", "rm", "privileged", "init"}
_ALONE |= {"interactive", "tty", "read-only", "no-healthcheck", "oom-kill-disable", "publish-all"}
_SHORT = {"e": "env", "v": "volume", "p": "publish", "u": "user", "m": "memory", "w": "workdir"}
_SHORT |= {"l": "label", "h": "hostname", "net": "network"}

_NO_CONTAINER = "servers run as services of the node, not in containers"
WHY = {
    "gpus": "the plan decides which GPUs a stage gets",
    "runtime": "the plan decides which GPUs a stage gets",
    "device": "the plan decides which GPUs a stage gets",
    "ipc": f"{_NO_CONTAINER}, and use the node's shared memory",
    "shm-size": f"{_NO_CONTAINER}, and use the node's shared memory",
    "network": f"{_NO_CONTAINER}, and use the node's network",
    "restart": "systemd restarts a server that ends unexpectedly",
    "name": "the unit is named after the model",
    "user": "`vllm.user` sets the user that the servers run as",
    "ulimit": "the unit has the limits that vLLM needs",
    "healthcheck": "a deploy waits until the server answers",
    "env-file": "the file was not read: write its variables under `environment`",
}
"""
The reasons for dropping options of a container, by option.

Options that are not listed are dropped because servers do not run in containers.
"""


_COMPOSE = {
    "container_name": "name",
    "env_file": "env-file",
    "deploy": "gpus",
    "devices": "gpus",
    "network_mode": "network",
    "networks": "network",
    "shm_size": "shm-size",
    "ulimits": "ulimit",
}
"""The option of `docker run` that corresponds to a key of compose, by key."""


def from_run(words: Sequence[str], name: str, inside: Inside) -> Launch:
    """Return the server that `docker run` starts with these arguments."""
    run = _Run()
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            break
        at += 1
        option, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and option and not equals and option not in _ALONE:
            short, attached = option[0], option[1:]  # -p8000:8000
            if short in _SHORT and attached and option not in _SHORT:
                option, equals, value = short, "=", attached
        option = _SHORT.get(option, option)
        if option not in _ALONE and not equals:
            value = words[at] if at < len(words) else ""
            at += 1
        run.take(option, value)
    image, command = (words[at], words[at + 1 :]) if at < len(words) else ("", ())
    return _launch(name, run, image, command, inside)


def from_compose(
    services: Mapping[str, Any], inside: Inside
) -> tuple[tuple[Launch, ...], tuple[Note, ...]]:
    """Return the servers in a compose file's `services`, and notes about all other services."""
    found, notes = [], []
    for name, service in services.items():
        if not isinstance(service, Mapping) or not _is_vllm(service):
            notes.append(Note(f"service `{name}` does not run vLLM, so it is left out"))
            continue
        run = _Run()
        for key, value in service.items():
            run.take_key(str(key), value)
        image = str(service.get("image", ""))
        found.append(_launch(str(name), run, image, run.command, inside))
    return tuple(found), tuple(notes)


def _is_vllm(service: Mapping[str, Any]) -> bool:
    said = (service.get(key) for key in ("image", "command", "entrypoint", "build"))
    return starts_server(said)


def starts_server(said: Iterable[Any]) -> bool:
    """Return whether a container's image, command and arguments start a supported engine."""
    text = " ".join(
        " ".join(map(str, one)) if isinstance(one, list) else str(one) for one in said if one
    )
    return "vllm" in text or started_engine(text) is not None


@dataclass
class _Run:
    """The settings of a container that have been read so far."""

    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    port: int | None = None
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    name: str = ""
    notes: list[Note] = field(default_factory=list)

    def take(self, option: str, value: str) -> None:
        """Read one option of `docker run`."""
        match option:
            case "env":
                self._variable(value)
            case "volume" | "mount":
                self._mount(option, value)
            case "publish":
                self._port(value)
            case "entrypoint":
                self.entrypoint = shlex.split(value)
            case "name":
                self.name = value
                self._drop(f"--{option} {value}", option)
            case _ if option in _ALONE:
                self._drop(f"-{option}" if option in _BUNDLED else f"--{option}", option)
            case _:
                # Values of unknown options may contain keys: `--label`, `--health-cmd`.
                said = f"--{option} {value}" if option in WHY else f"--{option}"
                self._drop(said.rstrip(), option)

    def take_key(self, key: str, value: Any) -> None:
        """Read one key of a compose service."""
        match key:
            case "image":
                pass
            case "command":
                self.command = _words(value)
            case "entrypoint":
                self.entrypoint = _words(value)
            case "environment":
                for pair in _pairs(value):
                    self._variable(pair)
            case "volumes":
                for one in _ends(value, "source"):
                    self._mount(key, one)
            case "ports":
                for one in _ends(value, "published"):
                    self._port(one)
            case _:
                told = isinstance(value, str | int) and _COMPOSE.get(key, key) in WHY
                what = f"{key}: {value}" if told else f"`{key}`"
                self._drop(what, _COMPOSE.get(key, key))

    def _variable(self, pair: str) -> None:
        name, equals, value = pair.partition("=")
        if equals:
            self.environment[name] = value
        else:  # the value is that of the caller's environment
            self.environment[name] = f"${name}"

    def _mount(self, option: str, text: str) -> None:
        if option == "mount":
            parts = dict(part.partition("=")[::2] for part in text.split(","))
            source = parts.get("source", parts.get("src", ""))
            target = parts.get("target", parts.get("dst", parts.get("destination", "")))
        else:
            source, _, rest = text.partition(":")
            target = rest.split(":")[0]
        if source and target:
            self.mounts.append((target, source))

    def _port(self, text: str) -> None:
        outer = text.rpartition("/")[0] or text
        published = outer.split(":")[-2:-1] or [outer]
        if published[0].isdigit() and self.port is None:
            self.port = int(published[0])
        else:
            self._drop(f"port {text}", "publish")

    def _drop(self, what: str, option: str) -> None:
        self.notes.append(Note(f"{what} is dropped: {WHY.get(option, _NO_CONTAINER)}"))


def _launch(name: str, run: _Run, image: str, command: Sequence[str], inside: Inside) -> Launch:
    words = [*run.entrypoint, *command]
    shell = words[0].rpartition("/")[2] if words else ""
    if shell in {"sh", "bash"} and len(words) > 2 and (inner := inside(words[2])):
        server = replace(inner, environment={**run.environment, **inner.environment})
    else:
        server = as_server(image, words, run.environment, run.port)
    notes = [*run.notes, *server.notes]
    if image:
        notes.insert(0, image_note(image))
    return Launch(
        run.name or name,
        server.argv,
        server.environment,
        run.port,
        tuple(run.mounts),
        release_of(image),
        tuple(notes),
        engine=server.engine,
    )


def as_server(
    image: str, words: Sequence[str], environment: Mapping[str, str], port: int | None
) -> Launch:
    """
    Return the server that a container's command starts. The server has no name yet.

    `port` is the port that the container publishes, or None.
    """
    own = without_entry(words)
    if found := find_engine(words):
        _, behind, engine = found
        words = words[behind:]
    elif own == [*words] and "vllm" not in image and (named := started_engine(image)):
        engine = named  # the image starts the engine, so the command has only options
    else:
        return Launch("", tuple(own), environment)
    return as_launch(engine, "", words, environment, published=port is not None)


def without_entry(words: Sequence[str]) -> list[str]:
    """
    Return a container's command without the program at its beginning, such as `/opt/bin/vllm
    serve`.
    """
    named = [words[0].rpartition("/")[2], *words[1:]] if words else []
    for entry in _ENTRIES:
        if tuple(named[: len(entry)]) == entry:
            return list(words[len(entry) :])
    return list(words)


def release_of(image: str) -> str | None:
    """
    Return the release of vLLM in an image's name, or None.

    >>> release_of("vllm/vllm-openai:v0.10.2"), release_of("vllm/vllm-openai:latest")
    ('0.10.2', None)
    """
    match = _IMAGE.search(image)
    return match[1] if match else None


def image_note(image: str) -> Note:
    """Return the note that reports that an image is dropped."""
    version = release_of(image)
    today = f": the image has vLLM {version}" if version else ""
    return Note(f"image {image} is dropped, because `version` in settings sets the release{today}")


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    return [str(one) for one in value] if isinstance(value, list) else []


def _ends(value: Any, near: str) -> Iterator[str]:
    """Yield each entry of a list of volumes or ports as text, for example `near:target`."""
    for one in value if isinstance(value, list) else ():
        if isinstance(one, Mapping):
            yield f"{one.get(near, '')}:{one.get('target', '')}"
        else:
            yield str(one)


def _pairs(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield str(name) if one is None else f"{name}={_text(one)}"
    elif isinstance(value, list):
        yield from map(str, value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
