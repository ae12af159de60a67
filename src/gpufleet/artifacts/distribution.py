"""
Decide which node builds or downloads an artifact, and from which nodes the others copy it. Pure.

A release works on nodes of one kind. The kind is the system, the machine and the interpreter; other
hardware does not change which wheels fit. One node of the kind has or builds the release, and the
others copy it from that node. A model is distributed in the same way, but to nodes of any kind.

Copies follow two trees of nodes (`sources`). In each tree, a node sends its pieces to two other
nodes. A node that sends in the first tree only receives in the second. Pieces with even numbers use
the first tree, pieces with odd numbers the second. So no node's network link, not even the
source's, has to send or receive more than one copy, and the path to the last of N nodes is log2 N
nodes long. (In a single tree, each node would send two copies, which takes twice as long. A chain
would take the time of one copy, but it would be N nodes long.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Kind: TypeAlias = tuple[str, ...]
"""
A kind of node. Nodes of equal kinds can share a release.

The kind of a release is, for example, ("ubuntu 24.04", "x86_64", "CPython 3.12.3"). The kind of a
model is ().
"""

HALVES = 2
"""The number of halves. The constant in on_node/transfer/peers.py must be equal."""


@dataclass(frozen=True)
class TreeState:
    """
    A node's report about a tree.

    Attributes:
        whole: whether the tree exists and is complete.
        kind: the node's kind.
        digest: the digest of the tree's files; "" if they were not read after the tree was
            completed.
    """

    whole: bool
    kind: Kind
    digest: str = ""


@dataclass(frozen=True)
class Share:
    """
    Nodes of one kind, and the node from which they copy.

    Attributes:
        source: the node that has the artifact or will make it.
        there: whether the source already has the artifact.
        others: the nodes that copy from the source, in order.
    """

    source: str
    there: bool
    others: tuple[str, ...]


@dataclass(frozen=True)
class DistributionPlan:
    """
    From where each node gets an artifact.

    Attributes:
        shares: the nodes that make or have the artifact, each with the nodes that copy from it.
        alone: {node that makes the artifact only for itself: the reason}.
        unknown: the nodes whose files match no accepted digest.
    """

    shares: tuple[Share, ...]
    alone: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    def makes(self, node: str) -> Share | None:
        """Return the share that a node builds for other nodes, or None."""
        return next((each for each in self.shares if each.source == node and not each.there), None)

    def copies(self, node: str) -> Share | None:
        """Return the share in which a node copies, or None."""
        return next((each for each in self.shares if node in each.others), None)


def parse_look(answer: dict[str, Any] | str) -> TreeState | str:
    """Return the parsed answer of a node, or the reason why the answer cannot be used."""
    if isinstance(answer, str):
        return answer
    if answer.get("error"):
        return f"the kind of the node is unknown: {answer['error']}"
    kind = answer.get("kind")
    if not isinstance(kind, list) or not all(isinstance(each, str) for each in kind):
        return "the node reported no kind"
    return TreeState(answer.get("whole") is True, tuple(kind), str(answer.get("digest") or ""))


def plan_distribution(
    wanting: Sequence[str],
    looks: Mapping[str, TreeState | str],
    right: Mapping[Kind, Collection[str]] | None = None,
) -> DistributionPlan:
    """
    Plan which nodes make an artifact and which nodes copy it.

    `wanting` are the nodes of this run that need the artifact and may share it, in the inventory's
    order. `looks` are the reports of these nodes, and of other nodes that may already have the
    artifact. The source is the first node of `wanting` that has the artifact, or else the first
    other node that has it. If no node has it, the first node of `wanting` makes it.

    `right` has the accepted digests by kind of node. If it is None, every digest is accepted. A
    node with a digest that is not accepted keeps its files, but other nodes do not copy from it.
    """
    alone = {
        node: said if isinstance(said := looks.get(node), str) else "the node was not queried"
        for node in wanting
        if not isinstance(looks.get(node), TreeState)
    }
    by_kind: dict[Kind, list[str]] = {}
    for node in wanting:
        if isinstance(found := looks.get(node), TreeState):
            by_kind.setdefault(found.kind, []).append(node)
    shares = []
    unknown: list[str] = []
    for kind, members in by_kind.items():
        there = {
            node: found.digest
            for node in (*members, *sorted(looks))
            if isinstance(found := looks[node], TreeState) and found.whole and found.kind == kind
        }
        lacking = [node for node in members if node not in there]
        if not lacking:
            continue
        having = [node for node in there if right is None or there[node] in right.get(kind, ())]
        unknown += [node for node in there if node not in having]
        source = having[0] if having else lacking[0]
        others = tuple(node for node in lacking if node != source)
        shares.append(Share(source, bool(having), others))
    return DistributionPlan(tuple(shares), alone, tuple(unknown))


def sources(source: str, others: Sequence[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """
    Return for each node of `others` the sources of each half. The best is first, `source` is last.

    After the parent node come the parent's ancestors, because nodes nearer to the source have more
    pieces.

    >>> sources("a", ["b", "c", "d"])["d"]
    (('b', 'a'), ('a',))
    """
    found: dict[str, list[tuple[str, ...]]] = {node: [] for node in others}
    # In a heap, the first half of the nodes are parents. In reverse order, the other half are.
    for order in (list(others), list(reversed(others))):
        for place, node in enumerate(order):
            above, at = [], place
            while at:
                at = (at - 1) // 2
                above.append(order[at])
            found[node].append((*above, source))
    return {node: tuple(halves) for node, halves in found.items()}


def expected_halves(ways: Mapping[str, tuple[tuple[str, ...], ...]]) -> dict[str, tuple[str, ...]]:
    """
    Return for each node the clients that copy from it, as `<client>/<half that it requests>`.

    >>> expected_halves(sources("a", ["b", "c"]))["a"]
    ('b/0', 'c/1')
    """
    found: dict[str, list[str]] = {}
    for node, halves in ways.items():
        for half, names in enumerate(halves):
            found.setdefault(names[0], []).append(f"{node}/{half}")
    return {node: tuple(sorted(names)) for node, names in found.items()}


def describe_action(what: str, verb: str, share: Share, node: str) -> str:
    """
    Return as text what a node does in the distribution.

    >>> describe_action("release 1", "build", Share("gpu-01", False, ("gpu-02",)), "gpu-01")
    'build release 1, once for gpu-01, gpu-02'
    """
    if node != share.source:
        return f"copy {what} from {share.source}" + (
            "" if share.there else f" when {share.source} has it"
        )
    together = ", ".join((share.source, *share.others))
    return f"{verb} {what}" + (f", once for {together}" if share.others else "")


def format_bytes(count: float) -> str:
    """
    Format a number of bytes for display.

    >>> format_bytes(5.3 * 2**30)
    '5.3 GiB'
    >>> format_bytes(5.3 * 2**20)
    '5.3 MiB'
    """
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB"


def describe_sources(answer: Mapping[str, Any]) -> str:
    """
    Return as text how many bytes were copied from each node, with the largest number first.

    `answer` is the report of `on_node/transfer/transfer.py` on a copy.

    >>> describe_sources({"from": {"a": 3 << 30, "b": 1 << 30}, "found": 0})
    '3.0 GiB from a, 1.0 GiB from b'
    """
    given = sorted(answer.get("from", {}).items(), key=lambda each: (-each[1], each[0]))
    parts = [f"{format_bytes(count)} from {name}" for name, count in given]
    if answer.get("found"):
        parts.append(f"{format_bytes(answer['found'])} already here")
    return ", ".join(parts) or "nothing to transfer"
