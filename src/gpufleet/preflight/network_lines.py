"""Report on host names, clocks, and the addresses from which nodes download. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.formatting import join_names, node_ranges
from gpufleet.planning.multinode.reachability import CLOCK_SECONDS
from gpufleet.preflight.line import Line, Status, Verdict, by_node, reason, unknown
from gpufleet.remote.query import Answer


def is_ip_address(address: str) -> bool:
    """Return whether an address is an IP address and not a host name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


# -- names


@dataclass(frozen=True)
class KnownNode:
    """The addresses of a node: that in the inventory, and those that the node itself reports."""

    address: str
    """The address to which other nodes and this machine connect: an IP address or a host name."""
    own: frozenset[str] = frozenset()
    """The addresses of the node's network devices. Empty if they are unknown."""


def own_addresses(document: Mapping[str, Any]) -> frozenset[str]:
    """Return the addresses of a node's network devices, from the node's probe."""
    found: set[str] = set()
    nics = document.get("nics")
    devices = nics.get("net") if isinstance(nics, Mapping) else None
    for device in devices if isinstance(devices, list) else ():
        # Each of these values may be {"missing": reason}.
        for value in (device.get("networks"), device.get("ipv6"), [device.get("ipv4")]):
            if isinstance(value, list):
                found.update(each.partition("/")[0] for each in value if isinstance(each, str))
    return frozenset(found)


def wanted_names(nodes: Mapping[str, KnownNode], hosts: Collection[str]) -> tuple[str, ...]:
    """Return the names that every node must resolve: names of nodes and of other servers."""
    every = {*nodes, *(each.address for each in nodes.values()), *hosts}
    return tuple(sorted(name for name in every if not is_ip_address(name)))


def name_lines(
    looks: Mapping[str, Answer],
    nodes: Mapping[str, KnownNode],
    hosts: Mapping[str, Collection[str]],
) -> tuple[Line, ...]:
    """
    Return lines on whether the nodes resolve names to the addresses in the inventory.

    `looks` are the answers of node_look.py. `hosts` has, by node, the host names of the other
    servers that the node uses. If the inventory has an IP address for a node, the node's name need
    not resolve, because programs use the address.
    """
    return by_node(
        "names",
        {node: _names(node, look, nodes, hosts.get(node, ())) for node, look in looks.items()},
    )


def _names(
    node: str, look: Answer, nodes: Mapping[str, KnownNode], hosts: Collection[str]
) -> Verdict:
    if isinstance(look, str):
        return Verdict(
            Status.UNKNOWN, "could not be checked", look, "getent ahosts NAME, on the node"
        )
    names: Mapping[str, Any] = look["names"]
    wrong: list[str] = []
    unread: list[str] = []
    for name in sorted({*hosts, *(each.address for each in nodes.values())}):
        said = names.get(name)
        if isinstance(said, Mapping):
            (wrong if said.get("missing") == "absent" else unread).append(f"{name}: {reason(said)}")
    elsewhere, other = _elsewhere(node, names, nodes)
    fix = "correct DNS or /etc/hosts on these nodes, or the address in the inventory"
    if wrong:
        return Verdict(Status.FAIL, "names do not resolve", "; ".join(wrong), fix)
    if elsewhere:
        return Verdict(Status.FAIL, "names lead elsewhere", "; ".join(elsewhere), fix)
    if other:
        return Verdict(
            Status.WARN, "names of nodes resolve to other addresses", "; ".join(other), fix
        )
    if unread:
        return Verdict(Status.UNKNOWN, "some names could not be resolved", "; ".join(unread), fix)
    resolved = sum(isinstance(names.get(name), list) for name in nodes)
    used = sorted(n for n in {*hosts, *(e.address for e in nodes.values())} if not is_ip_address(n))
    proof = (
        f"{join_names(used)} resolve as declared"
        if used
        else "all addresses are IP addresses, so no name is needed"
    )
    if resolved:
        proof += f"; {resolved} of {len(nodes)} nodes' names resolve, each to its own node"
    return Verdict(Status.OK, "names resolve", proof)


def _elsewhere(
    node: str, names: Mapping[str, Any], nodes: Mapping[str, KnownNode]
) -> tuple[list[str], list[str]]:
    """
    Return two lists of problems on `node`: addresses that lead to a different machine, and names of
    nodes that do.
    """
    addresses, others = [], []
    for name, known in nodes.items():
        # On a node, its own name often resolves to a loopback address (Debian: 127.0.1.1).
        if name == node:
            continue
        at = names.get(known.address)
        there = set(at) if isinstance(at, list) else {known.address}
        if isinstance(at, list) and known.own and there - known.own:
            addresses.append(
                f"{known.address} resolves to {join_names(at)}, but {name} has different addresses"
            )
        said = names.get(name)
        if name == known.address or not isinstance(said, list):
            continue
        # If a node has no probe, its other addresses are unknown, so one match is enough.
        strange = set(said) - known.own - there if known.own else not there & set(said)
        if strange:
            others.append(
                f"{name} resolves to {join_names(said)}, but the inventory has {known.address}"
            )
    return addresses, others


# -- clocks


@dataclass(frozen=True)
class ClockReading:
    """
    The limits between which the difference of a node's clock from this machine's clock lies, in
    seconds.
    """

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Return the estimated difference in seconds."""
        return (self.low + self.high) / 2

    @property
    def within(self) -> float:
        """Return the largest possible error of `middle` in seconds: half of the round trip."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """Return the difference as text for a sentence: `+0.012 s (within 0.040 s)`."""
        return f"{self.middle:+.3f} s (within {self.within:.3f} s)"


def clock_reading(sent: float, answered: float, began: float, ended: float) -> ClockReading:
    """
    Return the limits of a node's clock difference, from one query and its answer.

    All times are in seconds since 1970. `sent` and `answered` are the times of the query and the
    answer by this machine's clock. `began` and `ended` are the times at which the program on the
    node began and ended, by the node's clock. The running time of the program is not part of the
    result.

    >>> clock_reading(100.0, 101.0, 105.25, 105.75)
    ClockReading(low=4.75, high=5.25)
    """
    return ClockReading(ended - answered, began - sent)


def clock_lines(clocks: Mapping[str, ClockReading | str]) -> tuple[Line, ...]:
    """
    Return lines on clocks that differ from this machine's clock, or from each other.

    If a clock certainly differs by more than `CLOCK_SECONDS`, the line is FAIL. If all nodes agree
    with each other but not with this machine, this machine's clock may be wrong, so the lines are
    WARN.
    """
    known = {node: each for node, each in clocks.items() if isinstance(each, ClockReading)}
    found: dict[str, Verdict] = {}
    together = _agree(known)
    for node, clock in clocks.items():
        if isinstance(clock, str):
            found[node] = Verdict(
                Status.UNKNOWN, "could not be checked", clock, "date -u, on the node"
            )
        else:
            found[node] = _clock(clock, together=together)
    apart = [Line("clocks", f"{one} and {other}", verdict) for one, other, verdict in _pairs(known)]
    return (*_shortened(by_node("clocks", found), known), *apart)


def _clock(clock: ClockReading, *, together: bool) -> Verdict:
    fix = "timedatectl set-ntp true, on the node or on this machine"
    if abs(clock.middle) - clock.within > CLOCK_SECONDS:
        what = "the clock differs from this machine's"
        if together:
            return Verdict(
                Status.WARN, f"{what}: this machine's clock may be wrong", str(clock), fix
            )
        return Verdict(Status.FAIL, what, str(clock), fix)
    if clock.within > CLOCK_SECONDS:
        proof = f"the round trip took {2 * clock.within:.1f} s, which is too long for a comparison"
        return Verdict(
            Status.UNKNOWN,
            "could not be checked",
            proof,
            "run gpufleet preflight again when the network is less busy",
        )
    return Verdict(Status.OK, "the clock agrees with this machine's", "")


def _shortened(lines: tuple[Line, ...], known: Mapping[str, ClockReading]) -> Iterator[Line]:
    """
    Yield the lines. For clocks that agree, the proof is replaced with their largest difference.
    """
    for line in lines:
        if line.status is not Status.OK:
            yield line
            continue
        good = {n: c for n, c in known.items() if _clock(c, together=False).status is Status.OK}
        worst = max(good, key=lambda n: abs(good[n].middle) + good[n].within)
        limit = f"at most {CLOCK_SECONDS:g} s are allowed"
        proof = f"largest difference {good[worst]} on {worst}; {limit}"
        yield Line(line.check, line.subject, Verdict(Status.OK, line.verdict.what, proof))


def _agree(clocks: Mapping[str, ClockReading]) -> bool:
    return len(clocks) > 1 and not [*_pairs(clocks)]


def _pairs(clocks: Mapping[str, ClockReading]) -> Iterator[tuple[str, str, Verdict]]:
    """
    Yield the node whose clock is furthest ahead and the node whose clock is furthest behind, if the
    two certainly differ.
    """
    if not clocks:
        return
    first = max(clocks, key=lambda node: clocks[node].low)
    last = min(clocks, key=lambda node: clocks[node].high)
    apart = clocks[first].low - clocks[last].high
    if apart > CLOCK_SECONDS:
        proof = f"{first} is at least {apart:.3f} s ahead of {last}"
        fix = f"timedatectl set-ntp true, on {first} and {last}"
        yield first, last, Verdict(Status.FAIL, "their clocks differ", proof, fix)


# -- where nodes download


def source_lines(
    looks: Mapping[str, Answer],
    wanted: Mapping[str, Mapping[str, str]],
    incomplete: Mapping[str, bool],
    inventory: str,
) -> tuple[Line, ...]:
    """
    Return lines on whether nodes can reach the servers from which they download.

    `wanted` is {node: {id of a page: address}}. `incomplete` has, by node, whether a model is
    incomplete. If one is, the node needs the servers now, otherwise at the next deploy.
    """
    found = {}
    for node, look in looks.items():
        if not wanted.get(node):
            continue
        if isinstance(look, str):
            remedy = f"gpufleet probe {inventory}"
            found[node] = Verdict(Status.UNKNOWN, "could not be checked", look, remedy)
            continue
        answers = {url: _page(look, key) for key, url in wanted[node].items()}
        if failed := {url: why for url, (good, why) in answers.items() if not good}:
            now = incomplete.get(node, False)
            found[node] = Verdict(
                Status.FAIL if now else Status.WARN,
                "cannot reach the sources of downloads that it needs now"
                if now
                else "cannot reach the sources of its next downloads",
                "; ".join(f"{url}: {why}" for url, why in sorted(failed.items())),
                "allow the connection in the network, or set `mirror` or `vllm.hf_endpoint`",
            )
        else:
            proof = "; ".join(f"{url} answers {why}" for url, (_, why) in sorted(answers.items()))
            found[node] = Verdict(Status.OK, "reaches all sources of its downloads", proof)
    if found:
        return by_node("sources", found)
    if not looks:
        return (unknown("sources", "no node was queried", f"gpufleet validate {inventory}"),)
    proof = (
        "no node downloads anything, because models and packages are in local directories of "
        "the nodes"
    )
    return (Line("sources", node_ranges(looks), Verdict(Status.OK, "needs no source", proof)),)


def _page(look: Mapping[str, Any], key: str) -> tuple[bool, str]:
    """
    Return whether a server was reached, and its status. If it was not reached, return the reason
    instead.
    """
    page = look["pages"].get(key) or {"error": "the node was not queried"}
    if "missing" in page:
        return False, reason(page)
    status = page.get("status")
    if status is None:
        return False, str(page.get("error"))
    if status == 404:
        return False, "404: the server answers, but does not have this file"
    # The Hub answers 401 or 403 for a model that needs a token, so the server was reached.
    return status < 500, str(status)
