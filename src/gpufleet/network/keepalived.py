"""
Render keepalived's configuration and check program for an address that two gateways share. Pure.

At any time, one of the two gateways has the virtual address. The gateways send each other VRRP
messages (RFC 9568). If one gateway is silent, or if its HAProxy does not answer or is stopped, the
other gateway takes the address over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

from gpufleet import node_paths
from gpufleet.errors import FleetError
from gpufleet.monitoring import prometheus
from gpufleet.settings.gateway_settings import VirtualAddress
from gpufleet.settings.node_variables import NodeVars
from gpufleet.templates import render_template

UNIT = "keepalived.service"
HOME = "/etc/keepalived"
CONFIGURATION = "keepalived.conf"
CHECK = node_paths.GATEWAY_CHECK
GONE = node_paths.GATEWAY_GONE
"""
A file that contains 1 while HAProxy is stopped, and 0 while it runs. keepalived watches this file.
"""
# keepalived ignores further bytes of a password (keepalived.conf(5), auth_pass).
_LONGEST_PASSWORD = 8
_PASSWORD = re.compile(r"[A-Za-z0-9._+:/@%^&*=-]+")


def keepalived(wanted: VirtualAddress, password: bytes) -> bytes:
    """
    Return keepalived's configuration, which contains the password.

    Raises `FleetError` for a password that VRRP would truncate, or that is not a single word.
    """
    said = password.decode("utf-8", "replace")
    where = f"{wanted.password_file}: see `gateway.virtual_address.password_file` in group_vars"
    if len(said) > _LONGEST_PASSWORD:
        raise FleetError(
            f"{where}: VRRP uses only the first {_LONGEST_PASSWORD} bytes of a password: write a "
            "shorter password"
        )
    if not _PASSWORD.fullmatch(said):
        raise FleetError(f"{where}: the password must be one word of letters, digits and ._+:/@-")
    return render_template(
        "gateway/keepalived.conf.j2",
        address=wanted,
        password=said,
        check=CHECK,
        gone=GONE,
        user="root",
    ).encode()


def slow_hash(configuration: bytes) -> str:
    """
    Return a slow hash of keepalived's configuration, for files that all users can read.

    The configuration contains a password of at most 8 bytes, which could be guessed from a fast
    hash. With scrypt (RFC 7914) and 16 MiB (N = 2**14, r = 8), each guess takes about 50 ms.
    """
    return hashlib.scrypt(configuration, salt=b"gpufleet keepalived", n=1 << 14, r=8, p=1).hex()


def problems(nodes: Mapping[str, NodeVars], home: str) -> Iterator[str]:
    """
    Yield the problems of the virtual address that the gateway on `home` shares, as sentences.

    If two gateways reject each other's messages, both of them use the address at the same time.
    """
    ours = _virtual_address(nodes[home])
    if ours is None:
        return
    address = ours.address.partition("/")[0]
    for name, each in sorted(nodes.items()):
        if each.address == address:
            yield (
                f"{home}: gateway.virtual_address.address: {address} is the own address of {name}: "
                "write an address that no node has"
            )
        theirs = _virtual_address(each)
        # The problem of a pair is reported once, for the gateway whose name comes first.
        if theirs is None or name <= home or theirs.address.partition("/")[0] != address:
            continue
        for key in ("address", "router_id", "password_file"):
            mine, other = getattr(ours, key), getattr(theirs, key)
            if mine != other:
                yield (
                    f"gateway.virtual_address.{key}: {mine} on {home}, but {other} on {name}. The "
                    "two gateways would not see each other, so both would use the address "
                    f"{address} at the same time: write the same value for both gateways"
                )


def _virtual_address(node: NodeVars) -> VirtualAddress | None:
    return node.settings.gateway.virtual_address if node.settings.gateway else None


def check(address: str, port: int) -> bytes:
    """Return the program with which keepalived checks the gateway on this node."""
    place = prometheus.host_port(prometheus.local_address(address), port)
    return f"#!/bin/sh\nexec curl -sf -m 2 -o /dev/null http://{place}/healthy\n".encode()
