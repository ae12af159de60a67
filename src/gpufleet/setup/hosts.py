"""Parse hosts as operators write them. Pure.

A host is a word, a name in an ssh configuration, or an entry of an Ansible inventory. Examples of
words:

gpu-01  admin@gpu-01.example.net  root@192.0.2.11:2222  root@[2001:db8::1]:22
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.errors import FleetError

SSH_PORT = 22
# An optional user, a host or an IPv6 address in brackets, and an optional port.
_WORD = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[^@:\s\[\]]+)(?::(?P<port>\d{1,5}))?"
)
_JUMPS = ("proxyjump", "proxycommand")


@dataclass(frozen=True)
class Host:
    """
    One node, and how SSH connects to it.

    Attributes:
        name: the node's name in the inventory.
        address: the address to connect to.
        user: the login user.
        port: the port of sshd.
        key: the file of the private key. None: SSH uses the keys of the agent or of ~/.ssh.
        configured: whether ~/.ssh/config defines its connection. Deploys read this file too.
        jump: whether SSH connects through a different host, so that gpufleet cannot fetch the key.
    """

    name: str
    address: str
    user: str
    port: int = SSH_PORT
    key: str | None = None
    configured: bool = False
    jump: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables that are written with the node's name in an inventory file."""
        found: dict[str, Any] = {}
        if self.address != self.name and not self.configured:
            found["ssh_hostname"] = self.address
        if self.port != SSH_PORT:
            found["ssh_port"] = self.port
        if self.key:
            found["ssh_key"] = self.key
        return found

    @property
    def known_name(self) -> str:
        """Return the host's name in `known_hosts`."""
        return self.address if self.port == SSH_PORT else f"[{self.address}]:{self.port}"


def parse_hosts(
    words: Iterable[str], configured: Mapping[str, Mapping[str, Any]], user: str
) -> tuple[Host, ...]:
    """
    Parse words into hosts.

    `configured` has the settings of each host in ~/.ssh/config, as paramiko reads them. `user` is
    the login user for hosts that have no user in the word or in ~/.ssh/config. Raises `FleetError`
    with every invalid word.
    """
    found, problems = [], []
    for word in words:
        match = _WORD.fullmatch(word)
        port = int(match["port"] or 0) if match else 0
        if match is None or port > 65535:
            problems.append(
                f"{word}: is not the name of a host: write HOST, USER@HOST or USER@HOST:PORT"
            )
            continue
        name = match["host"].strip("[]")
        said = configured.get(name, {})
        address = str(said.get("hostname", name))
        found.append(
            Host(
                name=name,
                address=address,
                user=match["user"] or str(said.get("user", user)),
                port=port or int(said.get("port", SSH_PORT)),
                configured=bool(said) and address != name,
                jump=any(said.get(each) for each in _JUMPS),
            )
        )
    return _distinct(found, problems)


def hosts_of_inventory(entries: Iterable[Any], user: str) -> tuple[Host, ...]:
    """Return the hosts of an imported inventory. An entry is a name or (name, variables)."""
    found = []
    for entry in entries:
        name, said = (entry, {}) if isinstance(entry, str) else entry
        found.append(
            Host(
                name=name,
                address=str(said.get("ssh_hostname", name)),
                user=str(said.get("ssh_user", user)),
                port=int(said.get("ssh_port", SSH_PORT)),
                key=said.get("ssh_key"),
            )
        )
    return _distinct(found, [])


def words_host(word: str) -> str:
    """Return the host's name in a word. With this name, the host can be found in ~/.ssh/config."""
    match = _WORD.fullmatch(word)
    return match["host"].strip("[]") if match else word


def _distinct(found: Iterable[Host], problems: Iterable[str]) -> tuple[Host, ...]:
    hosts = tuple(dict.fromkeys(found))
    if wrong := (*problems, *_twice(hosts)):
        raise FleetError(*wrong)
    return hosts


def _twice(hosts: Iterable[Host]) -> Iterator[str]:
    names: dict[str, Host] = {}
    places: dict[str, str] = {}
    for host in hosts:
        if host.name in names:
            yield (
                f"{host.name}: is given twice, with different users or ports: remove one of the two"
            )
        elif places.get(host.known_name):
            yield (
                f"{host.name} and {places[host.known_name]} are both {host.known_name}: "
                "remove one of the two"
            )
        names[host.name] = host
        places.setdefault(host.known_name, host.name)
