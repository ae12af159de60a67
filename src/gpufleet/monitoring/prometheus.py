"""
Render Prometheus' configuration, and its targets by job, from the inventory and the plan. Pure.

The targets are in files that Prometheus reads again after each change (file_sd), so adding or
removing a node needs no reload. How an exporter is accessed (TLS, a password) belongs to the
configuration, so nodes with the same access share one scrape configuration and one file.

The label `instance` is the node's name, whatever the node's address is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from gpufleet.engines.engine import engines
from gpufleet.monitoring.exporters import file_of_node
from gpufleet.monitoring.metrics.metric import Job
from gpufleet.serving.servers import Server
from gpufleet.settings.monitoring_settings import BasicAuth, Exporters, Monitoring, Tls
from gpufleet.settings.node_variables import NodeVars

Target: TypeAlias = dict[str, Any]
"""One entry of a file_sd file: {"targets": ["192.0.2.21:9100"], "labels": {"instance": ...}}."""

MARK = "# Written by gpufleet; the next run overwrites what is changed here.\n"

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  # only compared with settings, not bound
# The default of Prometheus' scrape_timeout is 10 s. It must not be longer than the interval.
_MOST_SECONDS = 10


@dataclass(frozen=True, order=True)
class Access:
    """How a target is accessed. The files are on this machine. "" means not required."""

    tls: bool = False
    ca_file: str = ""
    username: str = ""
    password_file: str = ""


@dataclass(frozen=True)
class Scrape:
    """One scrape configuration and its targets."""

    name: str
    """
    The name of the scrape configuration and of its targets' file, such as `node` or
    `node-tls-auth`.
    """
    job: Job
    access: Access
    targets: tuple[Target, ...] = field(hash=False)

    @property
    def file(self) -> str:
        """The path of the targets' file, relative to the configuration's directory."""
        return f"targets/{self.name}.json"

    @property
    def content(self) -> str:
        """The content of the targets' file."""
        return json.dumps(list(self.targets), indent=1) + "\n"

    @property
    def secrets(self) -> Iterator[tuple[str, str]]:
        """Pairs of a file beside the configuration and its source file on this machine."""
        if self.access.password_file:
            yield f"credentials/{self.name}.password", self.access.password_file
        if self.access.ca_file:
            yield f"credentials/{self.name}.ca.pem", self.access.ca_file


def unreachable_servers(
    nodes: Mapping[str, NodeVars], servers: Iterable[Server], home: str
) -> list[str]:
    """
    Return a sentence for each node whose vLLM servers listen only on the node itself, so the
    Prometheus on node `home` cannot scrape them.
    """
    alone = {each.node for each in servers if each.node != home} & {
        name for name, each in nodes.items() if _servers_listen(each) in _LOOPBACK
    }
    return [
        f"{name}: `vllm.listen` is {_servers_listen(nodes[name])}, which other machines cannot "
        f"reach, so Prometheus does not scrape the node's vLLM servers"
        for name in sorted(alone)
    ]


# Targets


def scrapes(
    nodes: Mapping[str, NodeVars], servers: Iterable[Server] = (), home: str = ""
) -> tuple[Scrape, ...]:
    """
    Return the scrape configurations of the Prometheus on node `home`. For an external Prometheus,
    `home` is "".

    A job without targets still has an empty file, so its first target needs no reload.
    """
    found: list[Scrape] = []
    ports_of = {
        Job.NODE: {name: each.settings.node_exporter.port for name, each in nodes.items()},
        Job.DCGM: {
            name: each.settings.dcgm.port
            for name, each in nodes.items()
            if each.settings.gpu_node and each.settings.dcgm and each.settings.dcgm.exporter_version
        },
    }
    for job, ports in ports_of.items():
        by_access: dict[Access, list[Target]] = {Access(): []} if not ports else {}
        for name, port in sorted(ports.items()):
            exporters = nodes[name].settings.exporters
            access = _access(exporters, name)
            host = str(exporters.listen or nodes[name].address)
            target = _target(job, host, port, name)
            by_access.setdefault(access, []).append(target)
        found += _named(job, by_access)
    ours = [(_monitor(nodes, home, job), job) for job in (Job.PROMETHEUS, Job.ALERTMANAGER)]
    vllm = tuple(_of_servers(nodes, servers, home))
    found.append(Scrape(str(Job.VLLM), Job.VLLM, Access(), vllm))
    gateways = tuple(
        _target(Job.GATEWAY, str(each.settings.exporters.listen or each.address), port, name)
        for name, each in sorted(nodes.items())
        if each.settings.gateway and (port := each.settings.gateway.metrics_port)
    )
    found.append(Scrape(str(Job.GATEWAY), Job.GATEWAY, Access(), gateways))
    found += [Scrape(str(job), job, Access(), tuple(each)) for each, job in ours]
    return tuple(found)


def keep_silent_targets(
    wanted: Iterable[Scrape], before: Mapping[str, Iterable[Target]], silent: Collection[str]
) -> tuple[Scrape, ...]:
    """
    Return `wanted` with the last known vLLM servers of the nodes in `silent`.

    `before` has the current targets by file. Silent nodes keep their targets, so that Prometheus
    still reports their servers as down.
    """
    return tuple(
        Scrape(
            each.name,
            each.job,
            each.access,
            (
                *each.targets,
                *(
                    target
                    for target in before.get(each.file, ())
                    if target.get("labels", {}).get("instance") in silent
                ),
            ),
        )
        if each.job is Job.VLLM
        else each
        for each in wanted
    )


def targets(wanted: Iterable[Scrape]) -> dict[str, list[Target]]:
    """
    Return the lists of targets (file_sd), by the name of the scrape configuration. The name may be
    that of a job.
    """
    return {each.name: list(each.targets) for each in wanted}


def _access(exporters: Exporters, node: str) -> Access:
    tls: Tls | None = exporters.tls
    auth: BasicAuth | None = exporters.basic_auth
    return Access(
        tls=tls is not None,
        ca_file=file_of_node(tls.ca_file, node) if tls and tls.ca_file else "",
        username=auth.username if auth else "",
        password_file=file_of_node(auth.password_file, node) if auth else "",
    )


def _named(job: Job, by_access: Mapping[Access, list[Target]]) -> Iterator[Scrape]:
    """
    Yield the scrape configurations of a job, one for each kind of access. They are named after the
    job and the access, and numbered if two names would be equal.
    """
    seen: dict[str, int] = {}
    for access, found in sorted(by_access.items()):
        parts = [str(job), *(["tls"] if access.tls else []), *(["auth"] if access.username else [])]
        name = "-".join(parts)
        seen[name] = seen.get(name, 0) + 1
        numbered = name if seen[name] == 1 else f"{name}-{seen[name]}"
        yield Scrape(numbered, job, access, tuple(found))


def _of_servers(
    nodes: Mapping[str, NodeVars], servers: Iterable[Server], home: str
) -> Iterator[Target]:
    for each in servers:
        node = nodes.get(each.node)
        address = server_address(node, here=each.node == home) if node else None
        if address is None:
            continue
        labels = {"stage": each.stage, "model": each.model}
        if each.number:
            labels["server"] = str(each.number)
        yield _target(Job.VLLM, address, each.port, each.node, **labels)


def server_address(node: NodeVars, *, here: bool) -> str | None:
    """
    Return the address of a node's model servers, or None if the scraper cannot reach them.

    `here` is True if the scraper runs on the same node.
    """
    listens = _servers_listen(node)
    if listens in _LOOPBACK:
        return listens if here else None
    return node.address if listens in _ANY else listens


def _servers_listen(node: NodeVars) -> str:
    return node.settings.servers.listen if node.settings.servers else ""


def _monitor(nodes: Mapping[str, NodeVars], home: str, job: Job) -> Iterator[Target]:
    """
    Yield the targets for Prometheus or Alertmanager servers: that on node `home`, and those on
    other nodes if `home` can reach them.
    """
    for name, node in sorted(nodes.items()):
        monitoring = node.settings.monitoring
        server = monitoring and (
            monitoring.prometheus if job is Job.PROMETHEUS else monitoring.alertmanager
        )
        if not server or (name != home and server.listen in _LOOPBACK):
            continue
        if name == home:
            address = local_address(server.listen)
        else:
            address = node.address if server.listen in _ANY else server.listen
        yield _target(job, address, server.port, name)


def _target(job: Job, host: str, port: int, instance: str, **labels: str) -> Target:
    return {
        "targets": [host_port(host, port)],
        "labels": {"instance": instance, "job": str(job), **labels},
    }


def host_port(host: str, port: int) -> str:
    """
    Return host and port as one address, with brackets around an IPv6 address.

    >>> host_port("2001:db8::1", 9090)
    '[2001:db8::1]:9090'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(listen: str) -> str:
    """Return the address that a client on the same node uses for a server that binds `listen`."""
    return "127.0.0.1" if listen in _ANY else listen


# prometheus.yml


def prometheus_yml(monitoring: Monitoring, wanted: Iterable[Scrape]) -> str:
    """
    Return Prometheus' configuration. It refers to rules/, targets/ and credentials/ beside it.

    Prometheus also reads own-targets/<name>.json and own-rules/*.yml, which are for your own
    targets and rules.
    """
    server = monitoring.prometheus
    seconds = server.scrape_seconds if server else 15
    document: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{seconds}s",
            "scrape_timeout": f"{min(seconds, _MOST_SECONDS)}s",
            "evaluation_interval": f"{seconds}s",
        },
        "rule_files": ["rules/*.yml", "own-rules/*.yml"],
        "scrape_configs": [_scrape_config(each) for each in wanted],
    }
    if monitoring.external_labels:
        document["global"]["external_labels"] = dict(sorted(monitoring.external_labels.items()))
    if alertmanager := monitoring.alertmanager:
        place = host_port(local_address(alertmanager.listen), alertmanager.port)
        document["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [place]}]}]}
    return MARK + yaml.safe_dump(document, sort_keys=False)


def _scrape_config(wanted: Scrape) -> dict[str, Any]:
    config: dict[str, Any] = {"job_name": wanted.name}
    access, files = wanted.access, dict(wanted.secrets)
    if access.tls:
        config["scheme"] = "https"
        own = [file for file in files if file.endswith(".pem")]
        config["tls_config"] = {"ca_file": own[0]} if own else {}
    if access.username:
        config["basic_auth"] = {
            "username": access.username,
            "password_file": next(file for file in files if file.endswith(".password")),
        }
    config["file_sd_configs"] = [{"files": [wanted.file, f"own-targets/{wanted.name}.json"]}]
    if wanted.job is Job.VLLM:
        config["metric_relabel_configs"] = list(_engines_own_names())
    return config


def _engines_own_names() -> Iterator[dict[str, Any]]:
    """
    Yield the relabelings that restore the colon in the names of servers' metrics.

    Prometheus before 3 requests the OpenMetrics format, for which SGLang's client library
    (prometheus_client 0.26) replaces each `:` with `_` (measured with SGLang 0.5.23 and Prometheus
    2.42).
    """
    for engine in engines():
        yield {
            "source_labels": ["__name__"],
            "regex": f"{engine.prefix.rstrip(':')}_(.+)",
            "target_label": "__name__",
            "replacement": f"{engine.prefix}${{1}}",
        }
