"""Check that InfiniBand and RoCE ports are up and fast enough. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    Reading,
    Unread,
    cached_answer,
    expectation,
    is_missing,
    twin_answers,
)
from gpufleet.formatting import join_names

ACTIVE = "4:"  # the link layer's state as the kernel writes it: "4: ACTIVE"
_RATE = re.compile(r"([\d.]+) Gb/sec")  # drivers/infiniband/core/sysfs.c: "400 Gb/sec (4X NDR)"
NAMES_SHOWN = 6

# With NCCL_IB_DISABLE=1, NCCL does not use InfiniBand and RoCE (NCCL's user guide).
_OFF = "NCCL_IB_DISABLE"


@dataclass(frozen=True)
class Port:
    """
    One port ("mlx5_0/1"): whether it is up, its rate in Gbit/s or None, and its adapter's model.
    """

    name: str
    up: bool
    rate: float | None
    model: str | None


def rdma(node: Reading) -> Iterator[Problem]:
    """
    Check that enough RDMA ports are active (the declared number, or the number on siblings), and
    that no port is slow.

    A problem is `block` if replicas may span nodes (`span_nodes`) over the ports. Then every token
    waits for the slowest port, or NCCL uses TCP instead. Otherwise requests are served within one
    node, and a dead port is `WARN`. If no number is expected, an inactive port may simply have no
    cable.
    """
    ports = _ports(node)
    active = [port.name for port in ports if port.up]
    down = [port.name for port in ports if not port.up]
    spanning = _spanning(node)
    expected = expectation(
        node.settings.gpus.rdma_ports, "gpus.rdma_ports", twin_answers(node, _active)
    )
    if expected is not None and len(active) < expected.value:
        yield Problem(
            _severity(spanning, certain=expected.certain),
            f"{len(active)} of {expected.value} RDMA ports are active"
            + (
                f"; down: {join_names(down, NAMES_SHOWN)}"
                if down
                else "; the node has no other port"
            )
            + _at_risk(spanning),
            f"{expected.value} active ports",
            expected.source,
            _LADDER,
        )
    elif down and expected is None:
        yield Problem(
            Severity.WARN if spanning else Severity.INFO,
            f"{len(down)} of {len(ports)} RDMA ports are down: {join_names(down, NAMES_SHOWN)}"
            + _at_risk(spanning),
            "to have the ports checked, declare gpus.rdma_ports",
            "nothing is declared",
            _LADDER if spanning else (),
        )
    yield from _slow(node, ports, spanning)
    modules = node.known("system", "modules", default=["nvidia_peermem"])
    if node.settings.gpus.rdma_ports and active and "nvidia_peermem" not in modules:
        yield Problem(
            Severity.INFO,
            "nvidia_peermem is not loaded: GPUDirect RDMA works only through dma-buf",
            "dma-buf (kernel 5.12, open modules) or nvidia_peermem",
            "NVIDIA's GPUDirect documentation",
        )


_LADDER = (
    Step(
        Action.LOOK,
        "read the state, the physical state and the rate in the output of ibstat (or rdma link)",
    ),
    Step(Action.LOOK, "check the cable, the transceiver and the switch's port"),
    Step(
        Action.CONFIGURE,
        "for InfiniBand, check with sminfo whether a subnet manager runs; if a device is "
        "missing: lspci -d 15b3:, modprobe mlx5_ib",
    ),
    Step(Action.SERVICE, "replace the cable, then the adapter"),
)


def _spanning(node: Reading) -> tuple[str, ...]:
    """Return the models whose replicas may span nodes over RDMA."""
    return tuple(
        name
        for name, model in sorted(node.settings.serving.items())
        if model.span_nodes
        and {**node.settings.engine_of(name).environment, **model.environment}.get(_OFF, "0")
        in {"", "0"}
    )


def _severity(spanning: tuple[str, ...], *, certain: bool) -> Severity:
    return Severity.BLOCK if spanning and certain else Severity.WARN


def _at_risk(spanning: tuple[str, ...]) -> str:
    if not spanning:
        return ""
    return f"; replicas of {join_names(spanning)} may use these ports between nodes"


def _slow(node: Reading, ports: list[Port], spanning: tuple[str, ...]) -> Iterator[Problem]:
    """
    Yield a problem for ports that are slower than the siblings' ports with the same name. Without
    siblings, ports are compared with the node's other ports on adapters of the same model.
    """
    there = [told for told in twin_answers(node, _rates) if told is not None]
    slow: dict[bool, list[tuple[Port, float, str]]] = {True: [], False: []}
    for port in ports:
        if not port.up or port.rate is None:
            continue
        expected = expectation(None, "", (rates.get(port.name) for rates in there))
        if expected is not None:
            if port.rate < expected.value:
                slow[expected.certain].append((port, expected.value, expected.source))
            continue
        like = Counter(
            other.rate
            for other in ports
            if other.up and other.name != port.name and other.model == port.model
        )
        usual, votes = like.most_common(1)[0] if like else (None, 0)
        if usual is not None and votes > 1 and 2 * votes > like.total() and port.rate < usual:
            # A port for storage may be slower by design. Only siblings could show that it is not.
            slow[False].append(
                (port, usual, "the node's other ports on adapters of the same model")
            )
    for certain, found in slow.items():
        if found:
            yield Problem(
                _severity(spanning, certain=certain),
                "slow RDMA ports: "
                + join_names(
                    [f"{port.name} at {port.rate:g} Gbit/s" for port, *_ in found], NAMES_SHOWN
                )
                + _at_risk(spanning),
                ", ".join(sorted({f"{rate:g} Gbit/s" for _, rate, _ in found})),
                ", ".join(sorted({source for *_, source in found})),
                _LADDER,
            )


@cached_answer
def _active(node: Reading) -> int:
    """Return the node's number of active ports. Raises `Unread` if they could not be read."""
    return sum(port.up for port in _ports(node))


@cached_answer
def _rates(node: Reading) -> Mapping[str, float | None]:
    """
    Return the rate of each active port, by the port's name. Raises `Unread` if they could not be
    read.
    """
    return {port.name: port.rate for port in _ports(node) if port.up}


def _ports(node: Reading) -> list[Port]:
    """
    Return all RDMA ports. If the state of a port could not be read, the port counts as inactive.
    """
    devices = node.get("nics", "infiniband", absent=[])
    if not isinstance(devices, list):
        raise Unread("nics.infiniband is not a list")
    return [
        Port(
            f"{device['name']}/{port['port']}",
            str(port["state"]).startswith(ACTIVE),
            _gbit(port["rate"]),
            _model(device),
        )
        for device in devices
        for port in (device["ports"] if isinstance(device["ports"], list) else [])
    ]


def _gbit(rate: Any) -> float | None:
    found = _RATE.match(rate) if isinstance(rate, str) else None
    return float(found[1]) if found else None


def _model(device: Mapping[str, Any]) -> str | None:
    """
    Return a text that identifies the adapter's model. Adapters that manage NVSwitches count as a
    separate model.
    """
    place = device["pci"]
    if is_missing(place) or is_missing(place["device"]):
        return None
    return f"{place['device']} {device.get('manages_switches')}"


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {"rdma": rdma}
