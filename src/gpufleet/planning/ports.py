"""
Assign the port on which each replica answers, and its additional ports. Pure.

A port on a node has one user. A model's first replica on a node gets the declared port, and further
replicas get the next free ports. The ports of exporters, foreign programs and other stages are
skipped, and also the declared ports of the node's other models, which are reserved for their first
replica. A running replica keeps its port as long as these rules allow it.

A replica with several servers on a node needs consecutive ports: one for each server, and one for
the supervisor of the servers. The replica gets all of these ports or none.

A model's first replica gets a port other than the declared port only if the declared port is the
default. An explicit port that another setting or a foreign program also uses is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpufleet.formatting import join_names, node_ranges
from gpufleet.settings.node_settings import NodeSettings

LAST_PORT = 65535
OTHERS = "a program that gpufleet does not manage"


@dataclass(eq=False)
class Endpoint:
    """A replica that needs a port on all of its nodes."""

    model: str
    replica: int
    nodes: tuple[str, ...]
    declared: int
    explicit: bool
    """Whether `port` is set explicitly."""
    wished: int | None = None
    """
    The port on which the replica answers now. None if the replica does not run, or if it moves.
    """
    room: int = 1
    """
    Maximum number of replicas on a node. It limits the distance of a replica's port from
    `declared`.
    """
    width: int = 1
    """Number of consecutive ports of the replica on each node."""
    port: int = 0
    """The result: the first port of the replica."""

    def ports(self, first: int) -> range:
        """Return all ports of the replica if `first` is the first."""
        return range(first, first + self.width)


def assign_ports(
    endpoints: Sequence[Endpoint],
    settings: Mapping[str, NodeSettings],
    others: Mapping[str, Collection[int]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Assign each endpoint its port.

    Returns sentences on obstacles, and on models whose first port is not the declared one.
    """
    return _Ports(settings, others, {endpoint.model for endpoint in endpoints}).assign(endpoints)


class _Ports:
    def __init__(
        self,
        settings: Mapping[str, NodeSettings],
        others: Mapping[str, Collection[int]],
        placed: Collection[str],
    ) -> None:
        self.users: dict[str, dict[int, str]] = {}
        """By node and port: the settings key, replica or program that uses the port."""
        self.declared: dict[str, dict[int, dict[str, bool]]] = {}
        """By node and port: the models that declare the port, and whether it is explicit."""
        for name, wanted in settings.items():
            taken = dict.fromkeys(others.get(name, ()), OTHERS)
            taken.update({port: key for key, port in wanted.ports.items()})
            self.users[name] = taken
            firsts: dict[int, dict[str, bool]] = defaultdict(dict)
            for model, served in wanted.serving.items():
                if model in placed:
                    firsts[served.port][model] = "port" in served.model_fields_set
            self.declared[name] = firsts
        self.clashes: dict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
        self.stepped: dict[tuple[str, int, int], list[tuple[str, str]]] = defaultdict(list)
        """
        Maps (model, its port, its declared port) to the nodes, each with the user of the declared
        port.
        """
        self.beyond: dict[tuple[str, int], str] = {}

    def assign(self, endpoints: Sequence[Endpoint]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        here: set[tuple[str, str]] = set()
        left = []
        for endpoint in sorted(endpoints, key=_by_name):
            if self._may_keep(endpoint):
                self._take(endpoint, endpoint.wished or 0)
                here.update((endpoint.model, node) for node in endpoint.nodes)
            else:
                left.append(endpoint)
        # Explicit ports are assigned before defaults.
        for endpoint in sorted(left, key=lambda each: (not each.explicit, *_by_name(each))):
            first = not any((endpoint.model, node) in here for node in endpoint.nodes)
            here.update((endpoint.model, node) for node in endpoint.nodes)
            self._find(endpoint, first=first)
        return tuple(self._problems()), tuple(self._remarks())

    def _may_keep(self, endpoint: Endpoint) -> bool:
        """Return whether a running replica's port is allowed by the rules."""
        port = endpoint.wished
        if port is None or port < endpoint.declared or self._in_use(endpoint, port):
            return False
        if endpoint.ports(port)[-1] > LAST_PORT:
            return False
        if port == endpoint.declared:
            return endpoint.explicit or not self._is_reserved(endpoint, port, written=True)
        passed = sum(
            self._has_other_user(endpoint, at) or self._is_port_reserved(endpoint, at)
            for at in range(endpoint.declared, min(port, endpoint.declared + 1000))
        )
        near = port - endpoint.declared < endpoint.room * endpoint.width + passed
        return near and not self._is_reserved(endpoint, port)

    def _find(self, endpoint: Endpoint, *, first: bool) -> None:
        port = endpoint.declared
        written = not endpoint.explicit and self._is_reserved(endpoint, port, written=True)
        fits = endpoint.ports(port)[-1] <= LAST_PORT
        if first and not written and fits and not self._in_use(endpoint, port):
            self._take(endpoint, port)
            return
        users = self._conflicting_keys(endpoint, *endpoint.ports(port))
        if first and endpoint.explicit and users:
            keys = tuple(sorted({f"serving.{endpoint.model}.port", *users}))
            taken = next(at for at in endpoint.ports(port) if self._conflicting_keys(endpoint, at))
            self.clashes[taken, keys] += endpoint.nodes
            endpoint.port = port
            return
        while (last := endpoint.ports(port)[-1]) <= LAST_PORT and (
            self._in_use(endpoint, port) or self._is_reserved(endpoint, port)
        ):
            port += 1
        if last > LAST_PORT:
            self.beyond.setdefault((endpoint.model, last), endpoint.nodes[0])
            endpoint.port = port
            return
        if first:
            having = {
                self.users[node].get(at, "")
                for node in endpoint.nodes
                for at in endpoint.ports(endpoint.declared)
            }
            users = {_without_replica(each) for each in having - {""}}
            users = users or {self._explicit_key(endpoint)}
            self.stepped[endpoint.model, port, endpoint.declared] += [
                (node, user) for node in endpoint.nodes for user in users
            ]
        self._take(endpoint, port)

    def _in_use(self, endpoint: Endpoint, port: int) -> bool:
        wanted = endpoint.ports(port)
        return any(at in self.users[node] for node in endpoint.nodes for at in wanted)

    def _has_other_user(self, endpoint: Endpoint, port: int) -> bool:
        """Return whether the port is used, but not by a replica of the same model."""
        users = (self.users[node].get(port) for node in endpoint.nodes)
        own = f"serving.{endpoint.model}.port"
        return any(
            user and user != own and user[: user.rfind("-")] != endpoint.model for user in users
        )

    def _is_reserved(self, endpoint: Endpoint, port: int, *, written: bool = False) -> bool:
        """
        Return whether a different model on one of the endpoint's nodes declares one of its ports.

        If `written` is true, only ports that the operator sets explicitly count.
        """
        return any(
            self._is_port_reserved(endpoint, at, written=written) for at in endpoint.ports(port)
        )

    def _is_port_reserved(self, endpoint: Endpoint, port: int, *, written: bool = False) -> bool:
        return any(
            model != endpoint.model and (explicit or not written)
            for node in endpoint.nodes
            for model, explicit in self.declared[node].get(port, {}).items()
        )

    def _explicit_key(self, endpoint: Endpoint) -> str:
        """Return the key of another model that sets one of the declared ports explicitly."""
        return next(
            f"serving.{model}.port"
            for node in endpoint.nodes
            for port in endpoint.ports(endpoint.declared)
            for model, explicit in sorted(self.declared[node].get(port, {}).items())
            if model != endpoint.model and explicit
        )

    def _conflicting_keys(self, endpoint: Endpoint, *ports: int) -> set[str]:
        """Return the settings keys that use one of the ports, and `OTHERS` for foreign programs."""
        users = (self.users[node].get(port, "") for node in endpoint.nodes for port in ports)
        return {user for user in users if user.endswith("port") or user == OTHERS}

    def _take(self, endpoint: Endpoint, port: int) -> None:
        endpoint.port = port
        for node in endpoint.nodes:
            user = f"{endpoint.model}-{endpoint.replica}"
            if port == endpoint.declared and endpoint.explicit:
                user = f"serving.{endpoint.model}.port"
            self.users[node].update(dict.fromkeys(endpoint.ports(port), user))

    def _problems(self) -> Iterable[str]:
        for (port, keys), nodes in sorted(self.clashes.items()):
            yield (
                f"port {port} is used by {' and '.join(keys)} on {join_names(set(nodes))}: set a "
                "different port for one of them"
            )
        for (model, port), node in sorted(self.beyond.items()):
            yield (
                f"serving.{model}.port: the replicas on {node} would need port {port}, but the "
                f"highest port is {LAST_PORT}: lower the value"
            )

    def _remarks(self) -> Iterable[str]:
        for (model, port, declared), found in sorted(self.stepped.items()):
            nodes, users = ({each[at] for each in found} for at in (0, 1))
            yield (
                f"{model}: port {port} on {node_ranges(nodes)}, because port {declared} is used "
                f"by {join_names(users)}"
            )


def _without_replica(user: str) -> str:
    """Return the model of a replica's name; other users of ports are returned unchanged."""
    model, _, number = user.rpartition("-")
    return model if number.isdigit() else user


def _by_name(endpoint: Endpoint) -> tuple[str, int]:
    return endpoint.model, endpoint.replica
