"""
An address that one of two gateways has: keepalived's configuration, and its check.  Pure.

The gateways tell each other that they live (VRRP, RFC 9568); when one is silent, or its HAProxy
does not answer, the other takes the address.
"""

from __future__ import annotations

import re

from gpufleet import units
from gpufleet.errors import FleetError
from gpufleet.gateway_settings import VirtualAddress
from gpufleet.monitoring import scrape

UNIT = "keepalived.service"
HOME = "/etc/keepalived"
CONFIGURATION = "keepalived.conf"
CHECK = "/usr/local/libexec/gpufleet/gateway-answers"
# keepalived.conf(5), auth_pass: no more of it is used.
_LONGEST_PASSWORD = 8
_PASSWORD = re.compile(r"[A-Za-z0-9._+:/@%^&*=-]+")


def keepalived(wanted: VirtualAddress, password: bytes) -> bytes:
    """
    Return keepalived's configuration; the password is in it.

    Raises `FleetError` for a password that VRRP would cut, or that is no word there.
    """
    said = password.decode("utf-8", "replace")
    where = f"{wanted.password_file}: see `gateway.virtual_address.password_file` in group_vars"
    if len(said) > _LONGEST_PASSWORD:
        raise FleetError(f"{where}: VRRP uses {_LONGEST_PASSWORD} bytes of a password: shorten it")
    if not _PASSWORD.fullmatch(said):
        raise FleetError(f"{where}: the password has to be one word of letters, digits and ._+:/@-")
    return units.filled(
        "keepalived.conf.j2", address=wanted, password=said, check=CHECK, user="root"
    ).encode()


def check(address: str, port: int) -> bytes:
    """Return the program that keepalived asks whether this gateway answers."""
    place = scrape.at(scrape.local(address), port)
    return f"#!/bin/sh\nexec curl -sf -m 2 -o /dev/null http://{place}/healthy\n".encode()
