"""
Build the queries that `on_node/preflight/node_look.py` makes on each node. Pure.

This module assigns the ids of pages and servers in the answers. The modules that write lines use
these ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpufleet.artifacts.model_files import checkpoint, listing_url, model_directory
from gpufleet.artifacts.model_lock import Models
from gpufleet.monitoring.exporters import file_of_node
from gpufleet.preflight import alert_lines
from gpufleet.preflight.network_lines import KnownNode, wanted_names
from gpufleet.preflight.service_lines import host_of, services
from gpufleet.preflight.storage_lines import WantedModel
from gpufleet.preflight.tls_lines import TlsServer
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars

PYPI = "https://pypi.org/simple"
"""The package index that uv uses by default (docs.astral.sh/uv/concepts/indexes)."""


@dataclass(frozen=True)
class LookQuestions:
    """The queries for each node, and the values with which the answers are compared."""

    known: Mapping[str, KnownNode]
    models: Mapping[str, tuple[WantedModel, ...]]
    """The models that are planned for each GPU node or run on it."""
    sources: Mapping[str, Mapping[str, str]]
    """The addresses for downloads: {node: {id of a page: address}}."""
    tls: tuple[TlsServer, ...]
    releases: Mapping[str, str] = field(default_factory=dict)
    """The directory of the declared release on each node."""

    @property
    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Return the host names of the servers from which each node downloads."""
        return {
            node: tuple(sorted({urlsplit(url).hostname or "" for url in urls.values()} - {""}))
            for node, urls in self.sources.items()
        }

    def parameters(self, node: str, settings: NodeSettings) -> dict[str, Any]:
        """Return the parameters of the program that runs on a node."""
        pages = {each.key: {"url": each.url, "body": False} for each in services(settings)}
        pages |= {
            key: {"url": url, "body": False} for key, url in self.sources.get(node, {}).items()
        }
        pages |= {key: {"url": url, "body": True} for key, url in _alert_pages(settings)}
        release = self.releases.get(node)
        return {
            "names": list(wanted_names(self.known, self.hosts.get(node, ()))),
            "pages": pages,
            "tls": {each.id: each.parameters() for each in self.tls if each.asked_from == node},
            "models": {
                each.directory: None
                if each.files is None
                else {name: list(digest) for name, digest in each.files.items()}
                for each in self.models.get(node, ())
            },
            "folders": [release] if release else [],
        }


def _alert_pages(settings: NodeSettings) -> Iterator[tuple[str, str]]:
    watch = settings.monitoring
    if watch is None or watch.alertmanager is None:
        return
    at = f"http://{host_of(watch.alertmanager.listen)}:{watch.alertmanager.port}"
    yield alert_lines.METRICS, f"{at}/metrics"
    if watch.prometheus:
        at = f"http://{host_of(watch.prometheus.listen)}:{watch.prometheus.port}"
        yield alert_lines.PROMETHEUS, f"{at}/api/v1/alertmanagers"


def wanted_models(
    homes: Iterable[tuple[str, str]],
    settings: Mapping[str, NodeSettings],
    locks: Mapping[str, Models],
) -> dict[str, tuple[WantedModel, ...]]:
    """
    Return, by node, the model files that the node must have.

    `homes` are pairs of a model and a node. `locks` maps each lock file of models to its content.
    """
    found: dict[str, dict[str, WantedModel]] = {}
    for model, node in sorted(set(homes)):
        here = settings[node]
        served = here.serving.get(model)
        if served is None or here.servers is None:
            continue
        wanted = checkpoint(served)
        lock = locks.get(here.servers.models_lock, {})
        found.setdefault(node, {})[model] = WantedModel(
            model,
            model_directory(served),
            wanted is not None,
            lock.get((wanted.repository, wanted.revision)) if wanted else None,
        )
    return {node: tuple(models.values()) for node, models in found.items()}


def download_pages(
    models: Mapping[str, tuple[WantedModel, ...]], settings: Mapping[str, NodeSettings]
) -> dict[str, dict[str, str]]:
    """
    Return the addresses from which nodes download models and packages: {node: {id of a page:
    address}}.
    """
    found: dict[str, dict[str, str]] = {}
    for node, here in settings.items():
        servers = here.servers
        if servers is None:
            continue
        urls: dict[str, str] = {}
        for each in models.get(node, ()):
            wanted = checkpoint(here.serving[each.model])
            if wanted is not None:
                urls[f"source model {each.model}"] = listing_url(wanted, servers)
        urls |= _package_pages(here)
        if urls:
            found[node] = urls
    return found


def _package_pages(here: NodeSettings) -> dict[str, str]:
    """
    Return the addresses of packages by id. The id for the first engine does not contain its name.
    """
    urls: dict[str, str] = {}
    for name, engine in here.engines.items():
        what = "source packages" + (f" of {name}" if urls else "")
        if not engine.no_index:
            urls[what] = f"{(engine.index_url or PYPI).rstrip('/')}/{name}/"
        links = [each for each in engine.find_links if urlsplit(each).scheme in {"http", "https"}]
        urls |= {f"{what} {number}": url for number, url in enumerate(links)}
    return urls


def tls_servers(
    nodes: Mapping[str, NodeVars], gateway_authorities: str | None, read: Mapping[str, str]
) -> tuple[TlsServer, ...]:
    """
    Return the servers whose certificates are checked.

    `gateway_authorities` is the file of authorities that the gateway's clients trust. If it is
    None, the certificate in the settings is used instead. `read` maps such files to their contents.
    """
    return tuple(_servers(nodes, gateway_authorities, read))


def authority_files(nodes: Mapping[str, NodeVars], given: str | None) -> set[str]:
    """Return the files on this machine whose contents `tls_servers` needs."""
    found = {given} if given else set()
    for node, each in nodes.items():
        tls, gateway = each.settings.exporters.tls, each.settings.gateway
        if tls and tls.ca_file:
            found.add(file_of_node(tls.ca_file, node))
        if gateway and gateway.tls and not given:
            found.add(file_of_node(gateway.tls.certificate_file, node))
    return found


def _servers(
    nodes: Mapping[str, NodeVars], given: str | None, read: Mapping[str, str]
) -> Iterator[TlsServer]:
    watching = [
        node
        for node, each in nodes.items()
        if each.settings.monitoring and each.settings.monitoring.prometheus
    ]
    for node, each in nodes.items():
        here = each.settings
        if (tls := here.exporters.tls) is not None:
            file = file_of_node(tls.ca_file, node) if tls.ca_file else None
            ports = {"node_exporter.port": here.node_exporter.port}
            if here.gpu_node and here.dcgm and here.dcgm.exporter_version:
                ports["dcgm.port"] = here.dcgm.port
            for key, port in ports.items():
                yield TlsServer(
                    watching[0] if watching else node, node, key,
                    str(here.exporters.listen or each.address), port,
                    read.get(file) if file else None,
                    Path(file).name if file else "the system's authorities", by_name=True,
                )  # fmt: skip
        if here.gateway and here.gateway.tls:
            file = given or file_of_node(here.gateway.tls.certificate_file, node)
            # The settings do not contain the host name that clients use. Therefore the line shows
            # the names in the certificate.
            yield TlsServer(
                node, node, "gateway.port", host_of(here.gateway.listen).strip("[]"),
                here.gateway.port, read.get(file), Path(file).name, by_name=False,
            )  # fmt: skip
