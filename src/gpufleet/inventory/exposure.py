"""Warn about the operator's secret files and connections that are open to others.

ssh refuses a key that others can read. gpufleet only warns, because the file's mode concerns only
the operator's machine, checkouts do not preserve the mode, and a rollback must not wait for a
`chmod`.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpufleet.settings import variables
from gpufleet.settings.base import LOOPBACK, KeyPath
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.operator_paths import SECRET_FILES

_STRICT = "ssh_strict_host_key_checking"
_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def exposure_remarks(nodes: Collection[NodeVars], root: Path) -> Iterator[str]:
    """
    Yield a remark for each of these risks:

    - secret files that other users can read or write;
    - connections that do not check the nodes' host keys;
    - servers that need no API key, although they are behind a gateway with keys.

    A variable that many nodes inherit is checked once.
    """
    yield from _ways_past_a_gateway(nodes)
    seen: set[tuple[str, str]] = set()
    files: set[Path] = set()
    for node in nodes:
        for key, (value, origin) in node.variables.items():
            if (key, str(origin)) in seen:
                continue
            seen.add((key, str(origin)))
            if key == _STRICT and str(value).lower() not in {"yes", "true"}:
                yield (
                    f"{origin}: {key}: {value}: with this value, any host that answers at a "
                    "node's address gets a session as root and every secret of the run: "
                    f"remove {key}, and write the nodes' host keys to ssh_known_hosts_file "
                    "(docs/configure/inventory.md)"
                )
            for at, name in _secret_files(value, (key,)):
                file = root / Path(name).expanduser()
                if file not in files and (mode := _open_mode(file)):
                    files.add(file)
                    shown = variables.shown_path(file, root)
                    yield (
                        f"{origin.place_of(*at[1:])}: {'.'.join(map(str, at))}: {shown} has "
                        f"mode {mode:04o}, so other users of this machine can read or "
                        f"change the file: run chmod 600 {shown}"
                    )


def _ways_past_a_gateway(nodes: Collection[NodeVars]) -> Iterator[str]:
    """
    Yield a remark for each setting that opens servers to all clients although the gateway needs
    keys.
    """
    fronts = [front for node in nodes for front in (node.settings.gateway, node.settings.litellm)]
    if not any(front and front.clients for front in fronts):
        return
    said = set()
    for node in nodes:
        servers, firewall = node.settings.servers, node.settings.firewall
        if servers is None or not servers.allow_unauthenticated or servers.api_key_file:
            continue
        if servers.listen in LOOPBACK or (firewall and firewall.clients):
            continue
        place = node.variables[servers.engine][1].place_of("allow_unauthenticated")
        if place not in said:
            said.add(place)
            yield (
                f"{place}: {servers.engine}.allow_unauthenticated: clients of the gateway "
                f"need keys, but any client that reaches a server at {servers.listen} needs "
                f"no key: set `api_key_file` under {servers.engine}, or allow only the "
                "gateways' addresses with `firewall: {clients: [...]}` "
                "(docs/traffic/firewall.md)"
            )


def _secret_files(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield the names of files with secrets, with the paths of their keys."""
    if isinstance(value, list):
        for number, below in enumerate(value):
            yield from _secret_files(below, (*at, number))
    if not isinstance(value, Mapping):
        return
    for key, below in value.items():
        here = (*at, str(key))
        # `key_file` next to a certificate is a private key; in a repository it is a public key.
        named = key in SECRET_FILES or (key == "key_file" and "certificate_file" in value)
        if isinstance(below, str) and (named or at[-1] == "environment_files"):
            yield here, below
        else:
            yield from _secret_files(below, here)


def _open_mode(file: Path) -> int:
    """
    Return the mode of a file that other users can read or write.

    The result is 0 if other users can do neither, or if the file does not exist.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return 0
    return mode if mode & _OTHERS else 0
