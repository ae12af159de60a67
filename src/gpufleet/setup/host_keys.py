"""Fetch host keys, show their fingerprints, and write `known_hosts`."""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import paramiko

from gpufleet.errors import FleetError
from gpufleet.remote.daemon_pool import DaemonPool
from gpufleet.setup.hosts import Host

# Time limit in seconds for an answer. A host needs one or two round trips, but its sshd may first
# look up the name of the caller.
SECONDS = 10
_AT_ONCE = 32


def fetch_keys(hosts: Iterable[Host]) -> dict[str, paramiko.PKey]:
    """
    Return the key that each host presents, by the host's name.

    An attacker in the network may have replaced a key, so the operator must compare its
    `fingerprint`. Raises `FleetError` with every host that presents no key.
    """
    asked = tuple(hosts)
    with DaemonPool(_AT_ONCE) as pool:
        answers = list(pool.map(_ask, asked))
    if problems := [answer for answer in answers if isinstance(answer, str)]:
        raise FleetError(*problems)
    return {
        host.name: answer
        for host, answer in zip(asked, answers, strict=True)
        if not isinstance(answer, str)
    }


def fingerprint(key: paramiko.PKey) -> str:
    """Return a key's fingerprint as `ssh-keygen -l` prints it: `SHA256:...`."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def known_hosts_keys(file: Path, hosts: Iterable[Host]) -> dict[str, str]:
    """
    Return the lines of a `known_hosts` file by host name, for those of the hosts that it contains.

    Raises `FleetError` if the file cannot be read.
    """
    try:
        entries = paramiko.HostKeys(str(file))
    except OSError as error:
        raise FleetError(f"{file}: cannot be read: {error.strerror}") from None
    found = {}
    for host in hosts:
        keys = entries.lookup(host.known_name) or entries.lookup(host.name)
        if keys:
            found[host.name] = "".join(known_hosts_line(host, key) for key in keys.values())
    return found


def known_hosts_line(host: Host, key: paramiko.PKey) -> str:
    """Return the line of `known_hosts` for a host and its key."""
    return f"{host.known_name} {key.get_name()} {key.get_base64()}\n"


def known_hosts_text(lines: Mapping[str, str]) -> str:
    """Return the text of a `known_hosts` file with the lines of all hosts."""
    return "".join(lines.values())


def _ask(host: Host) -> paramiko.PKey | str:
    where = f"{host.name} ({host.known_name})" if host.known_name != host.name else host.name
    if host.jump:
        return (
            f"{where}: is reached through a different host, so gpufleet cannot fetch its "
            "key: give a file that contains the key with --known-hosts"
        )
    try:
        with socket.create_connection((host.address, host.port), timeout=SECONDS) as connection:
            transport = paramiko.Transport(connection)
            try:
                transport.start_client(timeout=SECONDS)
                return transport.get_remote_server_key()
            finally:
                transport.close()
    except (OSError, EOFError, paramiko.SSHException) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"{where}: gpufleet could not get the host key: {said}"
