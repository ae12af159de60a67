"""Replace download addresses with addresses on a mirror. Pure.

Roles see only the new addresses, so roles need no separate code for a mirror. The path of a file in
a bundle is the file's original address without the scheme: https://host:81/a/b is at
apt/host_81/a/b.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from gpufleet.settings.litellm_settings import Litellm
    from gpufleet.settings.mirror_settings import Mirror
    from gpufleet.settings.monitoring_settings import Alertmanager, NodeExporter, Prometheus
    from gpufleet.settings.node_settings import NodeSettings
    from gpufleet.settings.serving_settings import EngineSettings

PACKAGES = "apt"
PROGRAMS = "programs"
KEYS = "keys"
HUB = "hub"
# This is the file and not its folder, because object stores have no index pages.
WHEELS = "wheels/index.html"

_ADDRESS = re.compile(r"(?:\w+\+)?(?:https?|ftp|ssh|s3|gs|hf)://[^\s\"'<>]+")

_Program = TypeVar("_Program", "NodeExporter", "Prometheus", "Alertmanager")

_LOOPBACK = re.compile(r"\w+://(127\.\d+\.\d+\.\d+|\[::1\]|localhost)([:/]|$)")


def bundle_path(url: str, kind: str = PACKAGES) -> str:
    """
    Return the path of `url` in a bundle. `kind` is the top folder (default: that of apt archives).

    >>> bundle_path("https://archive.example:8080/debian/")
    'apt/archive.example_8080/debian'
    """
    parts = urlsplit(url)
    path = posixpath.normpath(f"/{unquote(parts.path)}").lstrip("/")
    return f"{kind}/{parts.netloc.replace(':', '_')}/{path}".rstrip("/")


def rewrite_addresses(settings: NodeSettings) -> NodeSettings:
    """
    Return settings whose download addresses are on the mirror. Without a mirror, nothing changes.
    """
    mirror = settings.mirror
    if mirror is None:
        return settings
    changed: dict[str, Any] = {}
    if settings.cuda:
        repository = settings.cuda.repository
        url = mirror.vendor or _of_bundle(mirror, repository.url)
        changed["cuda"] = settings.cuda.model_copy(
            update={"repository": repository.model_copy(update={"url": url})}
        )
    if (toolkit := settings.gpu.container_toolkit) is not None:
        url = _of_bundle(mirror, toolkit.repository)
        changed["gpu"] = settings.gpu.model_copy(
            update={"container_toolkit": toolkit.model_copy(update={"repository": url})}
        )
    for name, engine in settings.engines.items():
        changed[name] = engine.model_copy(update=_engine(mirror, engine))
    if settings.litellm:
        wheels = _wheels(mirror, settings.litellm)
        changed["litellm"] = settings.litellm.model_copy(update=wheels)
    changed["node_exporter"] = _program(mirror, settings.node_exporter)
    if (monitoring := settings.monitoring) is not None:
        servers: dict[str, Any] = {}
        if monitoring.prometheus:
            servers["prometheus"] = _program(mirror, monitoring.prometheus)
        if monitoring.alertmanager:
            servers["alertmanager"] = _program(mirror, monitoring.alertmanager)
        changed["monitoring"] = monitoring.model_copy(update=servers)
    return settings.model_copy(update=changed)


def _program(mirror: Mirror, wanted: _Program) -> _Program:
    """Return a program's settings. If the program has an archive, its address is on the mirror."""
    if wanted.archive is None:
        return wanted
    url = _of_bundle(mirror, wanted.archive.url, PROGRAMS)
    return wanted.model_copy(update={"archive": wanted.archive.model_copy(update={"url": url})})


def _wheels(mirror: Mirror, wanted: EngineSettings | Litellm) -> dict[str, Any]:
    own = tuple(each for each in wanted.find_links if not _ADDRESS.match(each))  # on the node
    if mirror.index_url:
        return {"index_url": mirror.index_url, "find_links": own, "no_index": False}
    if wheels := mirror.wheels or (mirror.url and f"{mirror.url}/{WHEELS}"):
        return {"index_url": None, "find_links": (*own, wheels), "no_index": True}
    return {}


def _engine(mirror: Mirror, engine: EngineSettings) -> dict[str, Any]:
    changed = _wheels(mirror, engine)
    if models := mirror.models or (mirror.url and f"{mirror.url}/{HUB}"):
        changed["hf_endpoint"] = models
    return changed


def _of_bundle(mirror: Mirror, url: str, kind: str = PACKAGES) -> str:
    if mirror.url is None or _is_below(url, mirror.addresses):
        return url
    return f"{mirror.url}/{bundle_path(url, kind)}"


def unreachable_addresses(settings: NodeSettings) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """
    Yield the settings that fail on a node without internet access, as (path of the key, message).

    The addresses in `settings` must already be replaced by the mirror's. All texts are searched,
    also environment variables and flags, because such a node reports a failed download only after
    minutes.
    """
    if not settings.offline:
        return
    allowed = settings.mirror.addresses if settings.mirror else ()
    inside = settings.mirror.inside if settings.mirror else ()
    if settings.mirror is None:
        yield (
            ("offline",),
            (
                "is true, but `mirror` is not set, so nodes have no source for downloads: set "
                "`mirror`"
            ),
        )
        return
    for path, text in _texts(settings.model_dump(mode="json", exclude={"mirror"}), ()):
        for address in _ADDRESS.findall(text):
            if not (_is_below(address, (*allowed, *inside)) or _LOOPBACK.match(address)):
                yield (
                    path,
                    f"contains {address}, which is not on the mirror "
                    f"({', '.join(allowed)}), but `offline` is true: {_remedy(path)}",
                )
    servers = settings.servers
    for key, wanted in (*settings.engines.items(), ("litellm", settings.litellm)):
        if wanted is None or wanted.no_index or wanted.index_url:
            continue
        yield (
            (key,),
            "would download wheels from PyPI, but `offline` is true: set `mirror.url`, "
            "`mirror.wheels` or `mirror.index_url`",
        )
    hub = any(served.hub_sources for served in settings.serving.values())
    if servers and servers.hf_endpoint is None and hub:
        yield (
            ("serving",),
            "has models that nodes would download from the Hugging Face Hub, but `offline` "
            "is true: set `mirror.url` or `mirror.models`, or write paths on the node in "
            "place of the models' ids",
        )


def _remedy(path: tuple[str | int, ...]) -> str:
    overrides = {"cuda": "vendor", "gpu": "url", "node_exporter": "url"}
    known = overrides.get(str(path[0]))
    return (
        f"set `mirror.{known}`, or correct the address"
        if known
        else (
            "write an address on the mirror or, if nodes can reach this address, add it to "
            "`mirror.inside`"
        )
    )


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(below, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _texts(below, (*path, index))


def _is_below(url: str, roots: tuple[str, ...]) -> bool:
    return any(url == root or url.startswith(f"{root}/") for root in roots)
