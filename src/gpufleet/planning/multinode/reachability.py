"""
Check that the nodes of a replica reach each other and have equal files. Pure.

Two programs run on all nodes of a replica at once: `on_node/reach/preflight.py` reports what each
node has, `on_node/reach/reach.py` lets the nodes exchange packets. This module builds their
parameters and evaluates their documents. Both nodes report on the path between them, so that a
message can name the direction; a silent node is reported, too.

Two nodes' models are compared by the paths and sizes of their files, by the content of files of at
most 16 MiB, and by both ends of larger files (`on_node/reach/model_identity.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpufleet.formatting import count_of, join_names, ranges
from gpufleet.node.cluster_network import Network
from gpufleet.on_node.common.stage_units import is_stage_unit
from gpufleet.planning.multinode.rank_ports import PORTS

LOOK_SECONDS = 8
"""Deadline in seconds: 6 for the node itself (on_node/reach/preflight.py), 2 for the connection."""
EXCHANGE_SECONDS = 7
"""Seconds for the exchange of packets, which takes up to 5 s with a loss of 30 %."""
WAY_SECONDS = 2
"""Seconds to send the program and receive its document."""
CLOCK_SECONDS = 1.0
"""
Maximum difference of two clocks in seconds; tokens, ranks' logs and Ray's leases depend on it.
"""

# Defaults of Ray's --min-worker-port and --max-worker-port (ray start --help).
_RAY_WORKERS = (10002, 19999)

Answers: TypeAlias = Mapping[str, Mapping[str, Any] | str]
"""Each node's document, or a sentence why it has none."""


@dataclass(frozen=True)
class Member:
    """A node of a replica, with the release and the model that it will start."""

    node: str
    network: Network
    release: str
    """The release's id."""
    release_directory: str
    vllm: str
    """vLLM's version in that release."""
    revision: str
    model_directory: str
    user: str
    """The account that reads the model."""

    def __str__(self) -> str:
        """Return the node's name, with its address and interface for the other nodes."""
        return f"{self.node} ({self.network.address}, {self.network.interface})"


@dataclass(frozen=True)
class Replica:
    """A replica over several nodes, in the order of its ranks."""

    id: str
    members: tuple[Member, ...]
    port: int
    """First of the ports between the nodes."""
    ray: bool
    """Whether Ray joins the nodes."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(each.node for each in self.members)

    @property
    def ports(self) -> range:
        return range(self.port, self.port + PORTS)


@dataclass(frozen=True)
class Route:
    """The measured path from one node to another."""

    start: str
    end: str
    failed: Mapping[int, str]
    """Ports without a successful connection, with the reasons."""
    ports: int
    """Number of tested ports."""
    bytes: int | None
    """The largest packet that arrived, in bytes; None if unknown, 0 if none arrived."""
    wanted: int
    """The largest packet that both interfaces may send, in bytes."""
    ahead: float | None
    """Seconds by which the end's clock is ahead of the start's; None if unknown."""
    within: float = 0.0
    lost: float = 0.0
    """Share of small packets that were lost after the first one had arrived."""

    @property
    def connects(self) -> bool:
        return not self.failed

    @property
    def passes_full_packets(self) -> bool:
        return self.bytes is None or self.bytes >= self.wanted

    @property
    def is_good(self) -> bool:
        return self.connects and self.passes_full_packets and not self.has_clock_skew

    @property
    def has_clock_skew(self) -> bool:
        """Return whether the clocks are certainly too far apart."""
        return self.ahead is not None and abs(self.ahead) - self.within > CLOCK_SECONDS

    @property
    def is_dead(self) -> bool:
        """Return whether no connection succeeded and no packet arrived."""
        return len(self.failed) == self.ports and self.bytes == 0


@dataclass(frozen=True)
class ReachabilityResult:
    """The result of a reachability check."""

    replica: Replica
    problems: tuple[str, ...]
    """Reasons why the replica cannot be started; empty if it can."""
    remarks: tuple[str, ...] = ()
    ways: tuple[Route, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`:

            {"replica": "llama-0", "good": true, "problems": [], "remarks": [], "ways":
             [{"from": "gpu-01", "to": "gpu-02", "good": true, "ports": 17, "failed": {},
               "packet_bytes": 9000, "wanted_bytes": 9000, "clock_ahead_s": 0.002}]}
        """
        return {
            "replica": self.replica.id,
            "good": not self.problems,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
            "ways": [
                {
                    "from": way.start,
                    "to": way.end,
                    "good": way.is_good,
                    "ports": way.ports,
                    "failed": {str(port): why for port, why in way.failed.items()},
                    "packet_bytes": way.bytes,
                    "wanted_bytes": way.wanted,
                    "clock_ahead_s": way.ahead,
                }
                for way in self.ways
            ],
        }


# Parameters of the programs


def preflight_parameters(replica: Replica) -> dict[str, dict[str, Any]]:
    """Return the parameters of on_node/reach/preflight.py for each node."""
    addresses = {each.node: each.network.address for each in replica.members}
    return {
        each.node: {
            "address": each.network.address,
            "interface": each.network.interface,
            "ports": list(replica.ports),
            "samples": [list(_RAY_WORKERS)] if replica.ray else [],
            "peers": {node: to for node, to in addresses.items() if node != each.node},
            "release": each.release_directory,
            "model": each.model_directory,
            "user": each.user,
        }
        for each in replica.members
    }


def exchange_parameters(
    replica: Replica, seen: Answers, token: str, seconds: float = EXCHANGE_SECONDS
) -> dict[str, dict[str, Any]]:
    """
    Return the parameters of on_node/reach/reach.py for each node that can take part.

    `seen` are the documents of the first program; ports in use are not tested.
    """
    part = {
        each.node: {
            "address": each.network.address,
            "ports": [*seen_here["free"], *seen_here["spares"]],
            "udp": seen_here["udp"],
            "mtu": _mtu(each, seen_here),
        }
        for each in replica.members
        if isinstance(seen_here := seen.get(each.node), Mapping) and not seen_here["address"]
    }
    return {
        node: {
            "token": token,
            "node": node,
            **own,
            "peers": {other: what for other, what in part.items() if other != node},
            "seconds": seconds,
        }
        for node, own in part.items()
    }


def _mtu(member: Member, seen: Mapping[str, Any]) -> int:
    """Return a node's current MTU, or the planned one if unknown."""
    return seen["mtu"] if isinstance(seen["mtu"], int) else member.network.mtu or 1500


# Evaluation of their documents


_LOOK = {
    "mtu": (int, Mapping),
    "routes": Mapping,
    "free": list,
    "used": Mapping,
    "spares": list,
    "release": Mapping,
    "files": Mapping,
}
_EXCHANGE = {"unbound": Mapping, "connected": Mapping, "clocks": Mapping, "heard": Mapping}


def check_preflights(answers: Answers) -> Answers:
    """Return the answers, with a sentence in place of invalid documents."""
    return {node: _check_document(answer, _LOOK) for node, answer in answers.items()}


def _check_document(
    answer: Mapping[str, Any] | str, keys: Mapping[str, Any]
) -> Mapping[str, Any] | str:
    if isinstance(answer, str):
        return answer
    if answer.get("schema") != 1:
        return f"its answer is invalid: schema is {answer.get('schema')!r}, but must be 1"
    for key, kinds in keys.items():
        if not isinstance(answer.get(key), kinds):
            return f"its answer is invalid: {key} is {answer.get(key)!r}"[:200]
    return answer


def compare(
    replica: Replica, seen: Answers, exchanged: Answers, seconds: float = 0.0
) -> ReachabilityResult:
    """
    Return whether a replica may be started, and every reason why not.

    `seen` are the documents of the first program, `exchanged` the documents of the exchange.
    """
    seen = check_preflights(seen)
    exchanged = {node: _check_document(answer, _EXCHANGE) for node, answer in exchanged.items()}
    try:
        return _compare_replica(replica, seen, exchanged, seconds)
    # A broken node may answer anything; that must not end the check of the others.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{replica.id}: its nodes' answers are invalid ({type(error).__name__}: {error})"
        return ReachabilityResult(replica, (why,), seconds=seconds)


def _compare_replica(
    replica: Replica, seen: Answers, exchanged: Answers, seconds: float
) -> ReachabilityResult:
    known = {node: answer for node, answer in seen.items() if isinstance(answer, Mapping)}
    ways = tuple(_routes(replica, known, exchanged))
    problems = [
        *_missing_answers(replica, seen, exchanged),
        *_address_problems(replica, known),
        *_release_problems(replica, known),
        *_model_problems(replica, known),
        *_port_conflicts(replica, known),
        *_network_problems(replica, ways),
        *_clock_problems(replica, ways),
    ]
    return ReachabilityResult(
        replica,
        tuple(f"{replica.id}: {problem}" for problem in problems),
        tuple(f"{replica.id}: {remark}" for remark in _remarks(replica, known)),
        ways,
        seconds,
    )


def _missing_answers(replica: Replica, seen: Answers, exchanged: Answers) -> Iterator[str]:
    for node in replica.nodes:
        for answers in (seen, exchanged):
            answer = answers.get(node)
            if isinstance(answer, str):
                yield f"{node}: {answer}"
                break


def _address_problems(replica: Replica, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield current problems of the chosen interfaces."""
    for each in replica.members:
        if each.node not in seen:
            continue
        if wrong := seen[each.node]["address"]:
            yield f"{each}: no program can listen on this address: {wrong}"
        routes = seen[each.node]["routes"]
        if "missing" in routes:
            continue
        others: dict[str, list[str]] = defaultdict(list)
        for peer, by in routes.items():
            if isinstance(by, str) and by not in {each.network.interface, "lo"}:
                others[by].append(peer)
        for interface, peers in sorted(others.items()):
            yield (
                f"{each} would send to {join_names(peers)} over {interface}: give {each.node} a "
                f"route over {each.network.interface}, or set `cluster_network` to a network that "
                "all these nodes use to send"
            )


def _release_problems(replica: Replica, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield differences between nodes in the planned or the installed release."""
    wanted = {each.node: each.release for each in replica.members}
    if len(set(wanted.values())) > 1:
        yield (
            f"the planned releases differ: {_nodes_by_value(wanted)}. Set the same `vllm` for all "
            "these nodes in group_vars"
        )
    installed: dict[str, dict[str, str]] = {"vLLM": {}, "Ray": {}}
    for each in replica.members:
        found = seen.get(each.node, {}).get("release")
        if found is None:
            continue
        if "missing" in found:
            yield f"{each.node}: {each.release_directory} cannot be read: {_missing_reason(found)}"
            continue
        if not found["whole"]:
            yield (
                f"{each.node} has no complete release {each.release} ({each.release_directory}): "
                "run the deploy again, over all nodes of the replica"
            )
            continue
        installed["vLLM"][each.node] = found["vllm"] or "none"
        if replica.ray:
            installed["Ray"][each.node] = found["ray"] or "none"
            if not found["ray"]:
                yield (
                    f"{each.node} has no Ray in {each.release_directory}: add `ray` to `vllm.lock`"
                )
    for name, versions in installed.items():
        if len(set(versions.values())) > 1:
            split = _nodes_by_value(versions)
            yield (
                f"the installed versions of {name} differ: {split}. Build the releases on these "
                "nodes again"
            )


def _model_problems(replica: Replica, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield differences between nodes in the model."""
    revisions = {each.node: each.revision for each in replica.members}
    if len(set(revisions.values())) > 1:
        yield (
            f"the planned revisions differ: {_nodes_by_value(revisions)}. Set the same `model` and "
            "`revision` for all these nodes"
        )
    whole: dict[str, Mapping[str, Any]] = {}
    for each in replica.members:
        found = seen.get(each.node, {}).get("files")
        if found is None:
            continue
        if "missing" in found and isinstance(found["missing"], str):
            yield (
                f"{each.node}: the model in {each.model_directory} cannot be read as {each.user}: "
                f"{_missing_reason(found)}"
            )
        else:
            whole[each.node] = found
    head = next((node for node in replica.nodes if node in whole), None)
    for node, files in whole.items():
        if head is None or node == head or files == whole[head]:
            continue
        different = sorted(
            name for name in {*files, *whole[head]} if files.get(name) != whole[head].get(name)
        )
        name = different[0]
        more = f", and {count_of(len(different) - 1, 'further file')}" if different[1:] else ""
        yield (
            f"{head} and {node} have different models in {_directory(replica, node)}: {name} is "
            f"{_file(whole[head].get(name))} on {head} and {_file(files.get(name))} on {node}"
            f"{more}: copy the same files to both nodes"
        )


def _file(found: Sequence[Any] | None) -> str:
    return f"{found[0]} bytes, {found[1]}" if found else "missing"


def _directory(replica: Replica, node: str) -> str:
    return next(each.model_directory for each in replica.members if each.node == node)


def _port_conflicts(replica: Replica, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the process that occupies the first port, which ranks need to meet."""
    for each in replica.members:
        here = seen.get(each.node, {})
        users = {"port": _used_ports(here).get(str(replica.port)), "UDP port": here.get("udp_user")}
        for kind, user in users.items():
            if user and not _is_stage(user):
                yield (
                    f"{each}: the ranks of the replica meet at {kind} {replica.port}, but "
                    f"{user['program']} (PID {user['pid']}{_unit_text(user)}) uses this port: stop "
                    "that program, or set `cluster_port`"
                )


def _used_ports(seen: Mapping[str, Any]) -> Mapping[str, Any]:
    used = seen.get("used", {})
    return {} if "missing" in used else used


def _is_stage(user: Mapping[str, Any]) -> bool:
    return is_stage_unit(str(user["unit"]))


def _unit_text(user: Mapping[str, Any]) -> str:
    return f" of {user['unit']}" if user["unit"] else ""


def _routes(
    replica: Replica, seen: Mapping[str, Mapping[str, Any]], exchanged: Answers
) -> Iterator[Route]:
    """Yield each path whose source reported its attempts."""
    mtus = {each.node: _mtu(each, seen[each.node]) for each in replica.members if each.node in seen}
    for start in replica.nodes:
        here = exchanged.get(start)
        if not isinstance(here, Mapping):
            continue
        for end, ports in here["connected"].items():
            there = exchanged.get(end)
            heard = there["heard"].get(start) if isinstance(there, Mapping) else None
            deaf = (
                not isinstance(there, Mapping)
                or "udp" in {*here["unbound"], *there["unbound"]}
                or None in (seen[start]["udp"], seen[end]["udp"])
            )
            clock = here["clocks"].get(end)
            yield Route(
                start,
                end,
                {int(port): why for port, why in ports.items() if why},
                len(ports),
                None if deaf else (heard["bytes"] if heard else 0),
                min(mtus[start], mtus[end], 65535),
                clock["ahead"] if clock else None,
                clock["within"] if clock else 0.0,
                _loss_share(heard) if heard else 0.0,
            )


def _loss_share(heard: Mapping[str, Any]) -> float:
    """Return the share of lost packets; 0 if too few were sent for an estimate."""
    return 1 - heard["datagrams"] / heard["of"] if heard["of"] >= 10 else 0.0


def _network_problems(replica: Replica, ways: Sequence[Route]) -> Iterator[str]:
    """Yield the network problems with their direction; equal problems of many nodes are merged."""
    by_ends = {(way.start, way.end): way for way in ways}
    flaws: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for ends, way in by_ends.items():
        back = by_ends.get((way.end, way.start))
        for sentence in _route_problems(replica, way, back):
            flaws[sentence].add(ends)
    for sentence, pairs in flaws.items():
        yield from _merge_pairs(replica, sentence, pairs)


_LOSSY = "of packets between {from} and {to}"
_APART = "{from} and {to} do not reach each other: no packet arrives in either direction"


def _route_problems(replica: Replica, way: Route, back: Route | None) -> Iterator[str]:
    """Yield a path's problems, with `{from}` and `{to}` in place of the nodes."""
    if way.is_dead:
        yield (
            _APART
            if back is not None and back.is_dead
            else "no packet from {from} arrives at {to}, while the other direction works: check "
            "for a one-sided firewall rule, route or cable"
        )
        return
    # A connection needs both directions, so only the broken direction is reported.
    if way.failed and back is not None and (share := _loss_percent(way, back)):
        yield f"{_LOSSY} about {share} % are lost, so a replica cannot start: check the link"
    elif way.failed and not (back is not None and back.is_dead):
        yield f"{{from}} cannot connect to {{to}} at {_ports(replica, way.failed)}: open the ports"
    if way.bytes == 0:
        yield (
            f"no datagram from {{from}} arrives at {{to}}: also open UDP for ports "
            f"{ranges(replica.ports)}"
        )
    elif not way.passes_full_packets:
        yield (
            f"packets of {way.wanted} bytes, which both interfaces may send, do not arrive from "
            f"{{from}} at {{to}}, but packets of {way.bytes} bytes arrive. So the network between "
            "the nodes has a lower MTU: raise that MTU, or lower the MTU of the interfaces"
        )


def _loss_percent(way: Route, back: Route) -> int:
    """Return the packet loss in percent if it explains the failed connections, else 0."""
    late = {*way.failed.values(), *back.failed.values()} <= {
        "no answer",
        "it closed the connection",
    }
    some = len(way.failed) < way.ports and len(back.failed) < back.ports
    share = round(max(way.lost, back.lost) * 20) * 5
    return share if late and some else 0


def _merge_pairs(replica: Replica, sentence: str, pairs: set[tuple[str, str]]) -> Iterator[str]:
    """Yield a sentence for pairs of nodes, merged: one for each node, with all its partners."""
    members = {each.node: str(each) for each in replica.members}
    mutual = sentence == _APART or sentence.startswith(_LOSSY)
    left = set(pairs)
    while left:
        count = Counter((side, pair[side]) for pair in sorted(left) for side in (0, 1))
        (side, node), _ = count.most_common(1)[0]
        others = {pair[1 - side] for pair in left if pair[side] == node}
        both = {(node, other) for other in others} | {(other, node) for other in others}
        left -= both if mutual else {pair for pair in left if pair[side] == node}
        if mutual and len(others) == 1:
            node, other = sorted({node, *others}, key=replica.nodes.index)
            others = {other}
        named = members[next(iter(others))] if len(others) == 1 else join_names(others)
        one_first = side == 0 or mutual
        start, end = (members[node], named) if one_first else (named, members[node])
        yield sentence.replace("{from}", start).replace("{to}", end)


def _ports(replica: Replica, failed: Mapping[int, str]) -> str:
    """Return the failed ports with their errors: `ports 29500-29507 (Connection refused)`."""
    by_reason: dict[str, list[int]] = defaultdict(list)
    samples: dict[tuple[str, str], None] = {}
    for port, why in failed.items():
        if port in replica.ports:
            by_reason[why].append(port)
        elif replica.ray and _RAY_WORKERS[0] <= port <= _RAY_WORKERS[1]:
            samples["ports {}-{} of Ray's workers".format(*_RAY_WORKERS), why] = None
        else:
            # Their numbers differ in each run.
            samples["ephemeral ports of the system", why] = None
    said = [f"{_ports_text(ports)} ({why})" for why, ports in sorted(by_reason.items())]
    return "; ".join([*said, *(f"{which} ({why})" for which, why in samples)])


def _clock_problems(replica: Replica, ways: Sequence[Route]) -> Iterator[str]:
    """
    Yield nodes whose clock differs from the first node's.

    If the first node's clock cannot be compared, use the other nodes' clocks.
    """
    known = [way for way in ways if way.ahead is not None]
    head = [way for way in known if replica.nodes[0] in {way.start, way.end}]
    said: set[frozenset[str]] = set()
    for way in head or known:
        ends = frozenset((way.start, way.end))
        if way.ahead is None or not way.has_clock_skew or ends in said:
            continue
        said.add(ends)
        first, last = (way.end, way.start) if way.ahead > 0 else (way.start, way.end)
        yield (
            f"{first}'s clock is {abs(way.ahead):.1f} s ahead of {last}'s: synchronise both "
            "clocks with the same time servers (chronyc tracking, timedatectl)"
        )


def _remarks(replica: Replica, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield remarks that do not prevent the start."""
    for each in replica.members:
        used = _used_ports(seen.get(each.node, {}))
        ours = [int(port) for port, user in used.items() if user is None or _is_stage(user)]
        if ours:
            yield (
                f"{each.node}: gpufleet did not test {_ports_text(ours)}, because running programs "
                "use these ports"
            )
    mtus = {each.node: _mtu(each, seen[each.node]) for each in replica.members if each.node in seen}
    if len(set(mtus.values())) > 1:
        sizes = {node: f"an MTU of {mtu}" for node, mtu in mtus.items()}
        yield (
            f"{_nodes_by_value(sizes)}: packets over {min(mtus.values())} bytes do not pass "
            "between all these nodes"
        )


def _ports_text(ports: Sequence[int]) -> str:
    return f"port{'s' if ports[1:] else ''} {ranges(ports)}"


def _nodes_by_value(values: Mapping[str, str]) -> str:
    """Return the nodes of each value: `gpu-01 has 0.33.0, gpu-02 has 0.32.0`."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        by_value[value].append(node)
    return ", ".join(
        f"{join_names(nodes)} {'have' if nodes[1:] else 'has'} {value}"
        for value, nodes in by_value.items()
    )


def _missing_reason(missing: Mapping[str, Any]) -> str:
    words = str(missing["missing"]).replace("_", " ")
    if "seconds" in missing:
        words += f" after {missing['seconds']} s"
    return f"{words} ({missing['detail']})" if missing.get("detail") else words
