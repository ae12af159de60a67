"""Read Kubernetes workloads with a vLLM container from manifests.  Pure.

Contract: a container's command, arguments, variables and replicas are converted. Notes contain the
names of Secrets. The content of a Secret is never copied, neither from its own document nor from a
variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpufleet.importer import shell
from gpufleet.importer.bounded_yaml import items, mapping, scalar_text
from gpufleet.importer.container import as_server, image_note, release_of, starts_server
from gpufleet.importer.server import Launch, Note, Source

_GROUP = "LeaderWorkerSet"
_WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "Pod", _GROUP}
_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
_SHELLS = {"sh", "bash"}
_STAGES = "servers run as services of the node, not in containers"
_WHY = {
    "resources": "the plan decides which GPUs a stage gets",
    "nodeSelector": "a model is declared for groups of the inventory",
    "affinity": "a model is declared for groups of the inventory",
    "tolerations": "a model is declared for groups of the inventory",
    "runtimeClassName": "the plan decides which GPUs a stage gets",
    "livenessProbe": (
        "systemd restarts a server that ends unexpectedly, and `watchdog` restarts a server "
        "that hangs"
    ),
    "readinessProbe": "the gateway checks whether servers are ready",
    "startupProbe": "`start_seconds` limits the time that a start may take",
    "terminationGracePeriodSeconds": "`drain_seconds` limits how long requests may take to finish",
    "restartPolicy": "systemd restarts a stage that dies",
    "securityContext": "the unit has its own sandbox",
    "ports": "`port` sets the port that a server listens on",
}


def is_kubernetes(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every document describes a Kubernetes object."""
    return all("kind" in each and "apiVersion" in each for each in documents)


def read_kubernetes(documents: Sequence[Mapping[str, Any]]) -> Source:
    """Return the servers of workloads, and notes about the other objects."""
    launches: list[Launch] = []
    notes: list[Note] = []
    for document in _flat(documents):
        kind = scalar_text(document.get("kind"))
        name = scalar_text(mapping(document.get("metadata")).get("name")) or kind.lower()
        found = tuple(_servers(document, name)) if kind in _WORKLOADS else ()
        launches += found
        if not found:
            why = (
                "does not run vLLM"
                if kind in _WORKLOADS
                else "is not a kind of workload that gpufleet imports"
            )
            notes.append(Note(f"{kind} `{name}` {why}, so it is left out"))
    return Source(tuple(launches), tuple(notes))


def _flat(documents: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if scalar_text(document.get("kind")).endswith("List"):
            yield from map(mapping, items(document.get("items")))
        else:
            yield document


def _servers(document: Mapping[str, Any], name: str) -> Iterator[Launch]:
    spec = mapping(document.get("spec"))
    template = spec.get("template")
    group = mapping(spec.get("leaderWorkerTemplate"))
    if group:  # the leader starts the server, and the workers join it
        template = group.get("leaderTemplate") or group.get("workerTemplate")
    pod = mapping(mapping(template).get("spec")) or spec
    replicas = spec.get("replicas")
    containers = [mapping(each) for each in items(pod.get("containers"))]
    servers = [each for each in containers if _is_vllm(each)]
    notes = [
        Note(f"container `{scalar_text(each.get('name'))}` does not run vLLM, so it is left out")
        for each in containers
        if each not in servers
    ]
    if group:
        notes.append(
            Note(
                f"a replica has {scalar_text(group.get('size')) or 'several'} Pods in this "
                "file: set `span_nodes: true` if one node does not have enough GPUs for a "
                "replica",
                decide=True,
            )
        )
    notes += (
        Note(f"`{key}` is dropped: {_WHY.get(key, _STAGES)}")
        for key in pod
        if key not in {"containers", "volumes"}
    )
    paths = {
        scalar_text(volume.get("name")): scalar_text(mapping(volume.get("hostPath")).get("path"))
        for volume in map(mapping, items(pod.get("volumes")))
    }
    for server in servers:
        own = name if len(servers) == 1 else f"{name}-{scalar_text(server.get('name'))}"
        yield _Container(server, paths).launch(
            own, replicas if isinstance(replicas, int) and replicas > 0 else None, notes
        )
        notes = []


def _is_vllm(container: Mapping[str, Any]) -> bool:
    said = (container.get(key) for key in ("image", "command", "args"))
    return starts_server(said)


@dataclass
class _Container:
    """One container that is converted to a server."""

    said: Mapping[str, Any]
    paths: Mapping[str, str]
    """
    The path on the node for each volume, by the volume's name. "": the volume is not such a path.
    """
    environment: dict[str, str] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    expansion: shell.Expansion = field(default_factory=shell.Expansion)
    """Limits the size of texts after `$(NAME)` is replaced."""

    def launch(self, name: str, replicas: int | None, notes: Sequence[Note]) -> Launch:
        """
        Return the server. `notes` are notes about the container's pod, which are added to the
        server's.
        """
        for each in map(mapping, items(self.said.get("env"))):
            self._variable(scalar_text(each.get("name")), each)
        for each in map(mapping, items(self.said.get("envFrom"))):
            self._variables(each)
        command = [scalar_text(each) for each in items(self.said.get("command"))]
        words = [
            self._expanded(w) for w in [*command, *map(scalar_text, items(self.said.get("args")))]
        ]
        server = None
        if len(words) > 2 and words[0].rpartition("/")[2] in _SHELLS:
            inner = shell.launches(words[2], name)
            if inner:
                server = replace(inner[0], environment={**self.environment, **inner[0].environment})
        image = scalar_text(self.said.get("image"))
        ports = [mapping(each).get("hostPort") for each in items(self.said.get("ports"))]
        port = next((each for each in ports if isinstance(each, int)), None)
        server = server or as_server(image, words, self.environment, port)
        self.notes += server.notes
        for key in self.said:
            if key not in {"name", "image", "command", "args", "env", "envFrom", "volumeMounts"}:
                self.notes.append(Note(f"`{key}` is dropped: {_WHY.get(key, _STAGES)}"))
        mounts = tuple(self._mounts())
        return Launch(
            name,
            server.argv,
            server.environment,
            port,
            mounts,
            release_of(image),
            (*([image_note(image)] if image else []), *notes, *self.notes),
            replicas=replicas,
            secret_variables=frozenset(self.secrets),
            engine=server.engine,
        )

    def _variable(self, name: str, said: Mapping[str, Any]) -> None:
        source = mapping(said.get("valueFrom"))
        if not source:
            self.environment[name] = self._expanded(scalar_text(said.get("value")))
        elif secret := mapping(source.get("secretKeyRef")):
            self.environment[name] = ""
            self.secrets.add(name)
            self.notes.append(
                Note(
                    f"{name} comes from key `{scalar_text(secret.get('key'))}` of the Secret "
                    f"`{scalar_text(secret.get('name'))}`, which is not copied",
                    decide=True,
                )
            )
        else:
            where = ", ".join(source)
            self.notes.append(
                Note(
                    f"{name} is dropped, because its value is not in this file ({where})",
                    decide=True,
                )
            )

    def _variables(self, said: Mapping[str, Any]) -> None:
        for key, below in said.items():
            self.notes.append(
                Note(
                    f"`envFrom` {key} `{scalar_text(mapping(below).get('name'))}` is "
                    "dropped, because its variables are not in this file: add the "
                    "variables that vLLM needs",
                    decide=True,
                )
            )

    def _expanded(self, text: str) -> str:
        """
        Return a text after known variables `$(NAME)` are replaced. `$$` becomes a dollar sign.
        """

        def value(match: re.Match[str]) -> str:
            if match[1] is None:
                return "$"
            if match[1] in self.secrets:
                return match[0]
            return self.expansion.add(self.environment.get(match[1], match[0]))

        return _REFERENCE.sub(value, text)

    def _mounts(self) -> Iterator[tuple[str, str]]:
        for each in map(mapping, items(self.said.get("volumeMounts"))):
            name, path = scalar_text(each.get("name")), scalar_text(each.get("mountPath"))
            outer = self.paths.get(name, "")
            if outer and path:
                yield path, outer
            else:
                self.notes.append(
                    Note(
                        f"the volume `{name}` at {path} is dropped, because it is not a path on "
                        "the node"
                    )
                )
