"""
Check that the NVLinks between GPUs are up, that enough links connect each pair, and that they have
no errors. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from gpufleet.catalog.nvlink_boards import LINKS_OF_BOARD
from gpufleet.checks import fabric
from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.memory import is_for_servers
from gpufleet.checks.nvlink_facts import (
    DRAIN,
    NO_LINKS,
    NVLINK_3,
    REBOOT,
    RESEAT,
    RESET_ALL,
    RESTART_MANAGER,
    Links,
    driver_knows_links,
    has_switches,
    known_links,
    links_of,
    links_or_none,
    links_up,
    nvswitches,
    widths,
)
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    Expectation,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    expectation,
    is_missing,
    twin_answers,
)
from gpufleet.formatting import ranges
from gpufleet.node.topology import LINK_ACTIVE, LINK_UP, islands

# Since Ampere, a bridge between two PCIe boards connects four links of each board. A100 and H100
# NVL have three bridges, which are 12 links. A30, A40 and RTX 3090 have one bridge, which is 4
# links (NVIDIA's product briefs).
LINKS_OF_A_BRIDGE = 4

# Retransmission repairs CRC errors. From 100 errors per second on, they matter (DCGM's limit).
CRC_PER_SECOND_MANY = 100
# From this number of replays or similar errors of one link since the driver was loaded, the health
# checks of an operator of 4000 H100 warn (imbue).
REPLAYS_MANY = 5
# The most recoveries of a link per day. After a recovery, the link had been down for a moment. DCGM
# fails a link with one recovery since DCGM began to watch. This check uses the time since boot, and
# a link may be retrained once while the node boots. (In a running cluster with 5760 NVLink 5 links,
# only one link had recoveries. It had several per hour and failed five days later.)
RECOVERIES_PER_DAY_MAX = 1
BIT_ERROR_RATE_MAX = 1e-12  # DCGM's limit for the effective rate (after correction) of NVLink 5
_DAY = 86400
_MINUTE = 60

_POWER_CYCLE = Step(
    Action.POWER_CYCLE, "power the node off through its BMC, wait a minute, and power it on"
)

_SAID = 6  # the most links or pairs that one message lists


# nvlink-links


@cached_answer
def _up_by_index(node: Reading) -> tuple[int | None, ...]:
    """
    Return the number of active links of each GPU, or None for a GPU that does not report its links.
    """
    known = {gpu.index: links_or_none(gpu) for gpu in node.gpus}
    indexes = range(len(node.document["gpus"]))
    return tuple(len(links.up) if (links := known.get(index)) else None for index in indexes)


def _up_on(sibling: Reading, gpu: GpuReading) -> int | None:
    """
    Return the number of active links of the sibling's GPU at the same position, because not every
    GPU has a bridge.

    If the sibling has a different number of GPUs, its highest number of links is returned.
    """
    counts = _up_by_index(sibling)
    if len(counts) == len(gpu.node.document["gpus"]):
        return counts[gpu.at]
    return max((count for count in counts if count is not None), default=None)


def _count(node: Reading) -> int:
    return len(node.document["gpus"])


@cached_answer
def _is_incomplete(node: Reading) -> bool:
    """
    Return whether a GPU of the node does not answer or is missing. The links of its peers are then
    down.
    """
    on_bus = [
        each
        for each in node.known("pci", default=())
        if str(each.get("class")).startswith("0x03") and each.get("driver") == "nvidia"
    ]
    listed = _count(node)
    return bool(
        node.silent_gpus
        or listed < max(len(on_bus), node.settings.gpus.count or 0)
        or any((count or 0) > listed for count in twin_answers(node, _count))
        or node.known("driver", "excluded", default=())
    )


def nvlink_links(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that enough links are active: the declared number, or else the number on siblings or of
    the board.

    All links of a board are in use if it is connected to NVSwitches, or if the board is only sold
    with NVLink. If a GPU reports that it has no NVLink, this is accepted only if none is expected.
    """
    try:
        links = links_of(gpu)
    except DoesNotApply:
        expected = _links_denied(gpu)
        if not expected:
            raise
        yield _short(gpu, NO_LINKS, expected)
        return
    if links.unread:
        numbers = ", ".join(f"{number} ({why})" for number, why in links.unread)
        raise Unread(f"the state of links {numbers} could not be read")
    expected = _links_expected(gpu, links)
    up = len(links.up)
    if expected and up < expected.value:
        yield _short(gpu, links, expected)
    elif odd := _partial_bridge(links):
        yield Problem(
            Severity.BLOCK if _has_peers(gpu) else Severity.WARN,
            f"{odd}: {_down(links)}",
            f"{LINKS_OF_A_BRIDGE} links per NVLink bridge",
            "NVIDIA's NVLink bridges; gpus.nvlink_links does not declare how many links are "
            "installed",
            _links_remedy(gpu),
        )
    elif links.down:
        yield Problem(
            Severity.INFO,
            f"{up} of {links.count} links are up, because the others are not connected on this node"
            if up
            else "no link is up: there is no NVLink bridge, or no GPU at the bridge's other end",
            "set gpus.nvlink_links to the expected number of links",
            expected.source if expected else "the node's GPUs are alike",
        )


def _has_peers(gpu: GpuReading) -> bool:
    return len(gpu.node.document["gpus"]) > 1


def _short(gpu: GpuReading, links: Links, expected: Expectation) -> Problem:
    """Return the problem of a GPU with fewer active links than expected."""
    return Problem(
        Severity.BLOCK if _has_peers(gpu) and expected.certain else Severity.WARN,
        _missed(links, expected.value),
        f"{expected.value} links up" if expected.value > 1 else "NVLinks that are up",
        expected.source,
        _links_remedy(gpu),
    )


def _missed(links: Links, expected: int) -> str:
    """
    Return which links are missing, in words: all links, links that do not exist, or inactive links.
    """
    if links.count == 0:
        return "the GPU reports no NVLink"
    if links.up and links.count < expected:
        down = (
            f", of which {len(links.down)} down: {ranges(links.down, ', ')}" if links.down else ""
        )
        return f"{links.count} of {expected} links exist{down}"
    return _down(links)


def _down(links: Links) -> str:
    if not links.up:
        return f"all {links.count} links are down"
    return f"{len(links.down)} of {links.count} links down: {ranges(links.down, ', ')}"


def _links_denied(gpu: GpuReading) -> Expectation | None:
    """
    Return the expected number of links of a GPU that reports no NVLink, or None if none are
    expected.

    If the GPU's model differs from that of most of the node's GPUs (for example, a display board of
    a workstation), it may have no NVLink.
    """
    node = gpu.node
    others = max((count for _, count in _alike(gpu)), default=0)
    name = gpu.known("name", default="")
    odd = name != node.product and name not in LINKS_OF_BOARD
    if odd and node.settings.gpus.nvlink_links is None and others == 0:
        return None
    expected = _links_expected(gpu, NO_LINKS)
    if not expected or expected.value < 1:
        return None
    if not driver_knows_links(gpu) and others == 0:
        raise CannotTell("the driver is too old to report the NVLinks")
    return expected


def _alike(gpu: GpuReading) -> Iterator[tuple[GpuReading, int]]:
    """Yield the node's GPUs with the same name, each with the number of NVLinks on its board."""
    for other in gpu.node.gpus:
        links = known_links(other)
        if links and other.known("name") == gpu.known("name"):
            yield other, links.count


def _links_expected(gpu: GpuReading, links: Links) -> Expectation | None:
    node = gpu.node
    declared = node.settings.gpus.nvlink_links
    if declared is not None:
        return expectation(declared, "gpus.nvlink_links", ())
    of_siblings = list(twin_answers(node, lambda twin: _up_on(twin, gpu)))
    of_node = max((count for count in _up_by_index(node) if count is not None), default=0)
    # If a virtual machine has only one GPU of a host, all links of the GPU are down by design.
    alone = len(node.document["gpus"]) == 1 and not links.up and not any(of_siblings)
    if not alone:
        # Siblings are not used here, because all of them may have the same fault.
        name = gpu.known("name", default="")
        if name in LINKS_OF_BOARD:
            known = Expectation(LINKS_OF_BOARD[name], f"an {name} uses all its links")
            return known if has_switches(node) else _unless_peer_is_gone(gpu, known)
        if has_switches(node):
            alike = of_node == len(links.up) > 0 and set(of_siblings) <= {of_node}
            count = links.count or max((count for _, count in _alike(gpu)), default=1)
            return Expectation(count, "all links lead to NVSwitches", certain=not alike)
    by_siblings = expectation(None, "gpus.nvlink_links", of_siblings)
    if by_siblings:
        return _unless_peer_is_gone(gpu, by_siblings)
    if of_node > len(links.up):
        # A desktop board without an active link may have no bridge, while a pair of boards beside
        # it has one. If the number of GPUs is odd, one GPU has no peer.
        paired = is_for_servers(gpu) and len(node.document["gpus"]) % 2 == 0
        certain = bool(links.up) or paired
        others = Expectation(of_node, "the node's other GPUs", certain)
        return _unless_peer_is_gone(gpu, others)
    return None


def _unless_peer_is_gone(gpu: GpuReading, expected: Expectation) -> Expectation:
    """
    Return the expected links. While one of the node's GPUs is missing, they are marked as
    uncertain.
    """
    if not _is_incomplete(gpu.node):
        return expected
    source = f"{expected.source}; the other end may be a GPU that does not answer"
    return Expectation(expected.value, source, certain=False)


def _partial_bridge(links: Links) -> str | None:
    """Return a text about the peer to which only some links of a bridge lead, or None."""
    if not links.down or links.version < NVLINK_3:
        return None
    for peer, count in links.peers.items():
        if count % LINKS_OF_A_BRIDGE:
            return f"{count} links lead to the GPU at {peer}"
    return None


def _links_remedy(gpu: GpuReading) -> tuple[Step, ...]:
    managed = bool(nvswitches(gpu.node))
    look = (
        f"`nvidia-smi nvlink -s -i {gpu.index}`; look for Xid 74, Xid 144 to 150 and SXid in "
        f"the kernel log"
    )
    return (
        Step(Action.LOOK, look),
        DRAIN,
        *((RESTART_MANAGER,) if managed else ()),
        RESET_ALL,
        REBOOT,
        _POWER_CYCLE,
        RESEAT,
    )


# nvlink-width


def nvlink_widths(node: Reading) -> Iterator[Problem]:
    """
    Check that each pair of GPUs has as many NVLinks as on the siblings, or else as the other pairs.

    NVLink 2 and older connect GPUs unevenly by design (in a DGX-1, by one or two links), so such
    pairs are compared only with siblings. If a pair has too few links because links are inactive,
    the check nvlink-links reports the inactive links, and this check only makes a remark.
    """
    links = {gpu.index: own for gpu in node.gpus if (own := links_or_none(gpu))}
    short = {gpu.index for gpu in node.gpus if gpu.index in links and _is_short(gpu, links)}
    if not any(own.count for own in links.values()):
        if short:
            yield Problem(
                Severity.INFO,
                "no GPU reports a link (see the check nvlink-links)",
                "links",
                "nvlink-links",
            )
            return
        for gpu in node.gpus:
            links_of(gpu)  # raises if the GPU has no NVLink or its links could not be read
        raise DoesNotApply("no GPU answers")
    found = widths(node)
    expected = _widths_expected(node, links)
    narrow = {pair for pair in found if pair in expected and found[pair] < expected[pair].value}
    explained = {pair for pair in narrow if short & set(pair)}
    if explained:
        example = expected[min(explained)]
        yield Problem(
            Severity.INFO,
            f"{_narrow_pairs(explained, found)}, because links are down (see the check "
            f"nvlink-links)",
            f"{example.value} links between two GPUs",
            example.source,
        )
    for index, pairs in _culprits(narrow - explained):
        wanted = expected[pairs[0]]
        yield Problem(
            Severity.BLOCK if wanted.certain else Severity.WARN,
            f"{_narrow_pairs(pairs, found)}, although all expected links are up",
            f"{wanted.value} links between two GPUs",
            wanted.source,
            (
                Step(
                    Action.LOOK,
                    "`nvidia-smi topo -m`, `nvidia-smi nvlink -R` show where each link leads",
                ),
                DRAIN,
                RESET_ALL,
                REBOOT,
                Step(
                    Action.SERVICE, "have the bridges installed as described in the server's manual"
                ),
            ),
            index,
        )
    yield from _slow_links(node)


def _is_short(gpu: GpuReading, links: Mapping[int, Links]) -> bool:
    """Return whether nvlink-links reports that links of the GPU are missing."""
    own = links[gpu.index]
    if not own.count:
        return _links_denied(gpu) is not None
    expected = _links_expected(gpu, own)
    return bool(expected and len(own.up) < expected.value) or _partial_bridge(own) is not None


def _widths_expected(
    node: Reading, links: Mapping[int, Links]
) -> dict[tuple[int, int], Expectation]:
    """Return the expected number of links of each pair of GPUs that can be compared."""

    def sibling_widths(twin: Reading) -> tuple[tuple[tuple[int, int], int], ...] | None:
        return tuple(widths(twin).items()) if len(twin.gpus) == len(node.gpus) else None

    by_siblings = expectation(None, "", twin_answers(node, sibling_widths))
    if by_siblings:
        return {
            pair: Expectation(expected, by_siblings.source, by_siblings.certain)
            for pair, expected in by_siblings.value
        }
    if any(found.version < NVLINK_3 for found in links.values() if found.count):
        return {}
    joined = {pair: width for pair, width in widths(node).items() if width}
    within = [pair for island in islands(links, joined) for pair in combinations(sorted(island), 2)]
    widest = max((joined[pair] for pair in within), default=0)
    return {pair: Expectation(widest, "the node's other pairs") for pair in within}


def _narrow_pairs(pairs: Iterable[tuple[int, int]], found: Mapping[tuple[int, int], int]) -> str:
    said = [f"GPUs {one} and {other} by {found[one, other]}" for one, other in sorted(pairs)]
    more = f" and {len(said) - _SAID} more pairs" if said[_SAID:] else ""
    return f"NVLink connects {', '.join(said[:_SAID])}{more}"


def _culprits(
    narrow: Iterable[tuple[int, int]],
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """
    Yield the GPU that occurs in most of the narrow pairs, with these pairs, until no pair is left.
    Of GPUs that occur equally often, all are yielded.
    """
    left = set(narrow)
    while left:
        votes = Counter(gpu for pair in left for gpu in pair)
        most = max(votes.values())
        worst = sorted(gpu for gpu in votes if votes[gpu] == most)
        for gpu in worst:
            yield gpu, sorted(pair for pair in left if gpu in pair)
        left = {pair for pair in left if not set(pair) & set(worst)}


def _usual_speed(speeds: Sequence[int]) -> int:
    """
    Return the speed of most links. If several speeds are equally frequent, return the highest.

    >>> _usual_speed([25_000, 50_000])
    50000
    """
    return max(Counter(speeds).items(), key=lambda each: (each[1], each[0]))[0]


def _slow_links(node: Reading) -> Iterator[Problem]:
    """
    Yield a problem for each GPU with active links that are slower than most links of the node's
    GPUs with the same name.
    """
    speeds = [
        (gpu, link["link"], link["speed_mbps"])
        for gpu in node.gpus
        for link in links_up(gpu)
        if link["state"] == LINK_ACTIVE and not is_missing(link["speed_mbps"])
    ]
    usual = {
        name: _usual_speed([speed for gpu, _, speed in speeds if gpu.known("name") == name])
        for name in {gpu.known("name") for gpu, *_ in speeds}
    }
    for gpu in node.gpus:
        name = gpu.known("name")
        slow = [
            f"{number} at {speed}"
            for at, number, speed in speeds
            if at is gpu and speed < usual[name]
        ]
        if slow:
            yield Problem(
                Severity.BLOCK,
                f"links are slow: {', '.join(slow)} MB/s",
                f"{usual[name]} MB/s per link",
                "the node's other links",
                (DRAIN, RESET_ALL, REBOOT, RESEAT),
                gpu.index,
            )


# nvlink-errors


def nvlink_errors(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that no link recovers repeatedly or has too many bit errors, and that few links
    retransmit.
    """
    links_of(gpu)
    said: dict[Severity, list[str]] = {}
    for at, link in enumerate(gpu.section("nvlink", "links")):
        if link["state"] in LINK_UP:
            for severity, what in _errors_of(gpu, at):
                said.setdefault(severity, []).append(f"link {link['link']}: {what}")
    for severity, lines in said.items():
        more = f"; and {len(lines) - _SAID} more" if lines[_SAID:] else ""
        yield Problem(
            severity,
            "; ".join(lines[:_SAID]) + more,
            f"no recoveries, fewer than {REPLAYS_MANY} replays, an effective bit error rate of at "
            f"most {BIT_ERROR_RATE_MAX:g}",
            "DCGM's health policy; counted since the driver was loaded",
            _errors_remedy(gpu, severity),
        )


def _errors_remedy(gpu: GpuReading, severity: Severity) -> tuple[Step, ...]:
    look = Step(
        Action.LOOK,
        f"see whether the count grows: `nvidia-smi nvlink -e -i {gpu.index}`, twice, an hour apart",
    )
    if severity is Severity.BLOCK:
        return (look, DRAIN, RESET_ALL, REBOOT, RESEAT)
    return (look,)


def _errors_of(gpu: GpuReading, at: int) -> Iterator[tuple[Severity, str]]:
    """Yield the errors that the counters of one link show. NVLink 5 has different counters."""
    if "effective_ber" in gpu.section("nvlink", "links", at, "errors"):
        yield from _errors_of_nvlink_5(gpu, at)
        return
    for kind, what in (("replay", "replays"), ("ecc", "ECC errors")):
        if count := _counter(gpu, at, kind):
            yield _few_or_many(count, what)
    if count := _counter(gpu, at, "recovery"):
        yield _recoveries(gpu, count)
    crc = _counter(gpu, at, "crc_flit") + _counter(gpu, at, "crc_data")
    if crc and (rate := crc / _uptime(gpu, _MINUTE)) >= CRC_PER_SECOND_MANY:
        yield Severity.WARN, f"{crc:,.0f} CRC errors, {rate:,.0f} a second"


def _errors_of_nvlink_5(gpu: GpuReading, at: int) -> Iterator[tuple[Severity, str]]:
    if failed := _counter(gpu, at, "recovery_failed"):
        yield Severity.BLOCK, f"{failed:,} recoveries failed"
    if count := _counter(gpu, at, "recovery_ok"):
        yield _recoveries(gpu, count)
    if (rate := _counter(gpu, at, "effective_ber")) > BIT_ERROR_RATE_MAX:
        yield Severity.BLOCK, f"effective bit error rate {rate:g}"
    for kind, what in (("receive", "receive errors"), ("integrity", "link integrity errors")):
        if count := _counter(gpu, at, kind):
            yield _few_or_many(count, what)


def _few_or_many(count: float, what: str) -> tuple[Severity, str]:
    return Severity.WARN if count >= REPLAYS_MANY else Severity.INFO, f"{count:,} {what}"


def _recoveries(gpu: GpuReading, count: float) -> tuple[Severity, str]:
    per_day = count * _DAY / _uptime(gpu, _DAY)
    often = per_day > RECOVERIES_PER_DAY_MAX
    rate = f"{per_day:,.0f}" if often else f"{per_day:.2g}"
    return Severity.BLOCK if often else Severity.WARN, f"{count:,} recoveries, {rate} a day"


def _uptime(gpu: GpuReading, least: float) -> float:
    """
    Return the node's uptime in seconds, but at least `least`. A shorter time would not give a
    meaningful rate.
    """
    return max(float(gpu.node.get("system", "uptime_seconds")), least)


def _counter(gpu: GpuReading, at: int, kind: str) -> int | float:
    """Return one counter of a link, or 0 if the driver or the board does not have this counter."""
    try:
        count: int | float = gpu.section("nvlink", "links", at, "errors", kind)
    except (DoesNotApply, CannotTell):
        return 0
    return count


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {**fabric.WITHOUT_DRIVER}

OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "nvlink-width": nvlink_widths,
}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "nvlink-links": nvlink_links,
    "nvlink-errors": nvlink_errors,
    **fabric.OF_GPU,
}
