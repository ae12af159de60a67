"""RUNS ON THE NODE: check a node of a multi-node replica before it contacts the other nodes.

Takes (`PARAMETERS`):
  address, interface   this node's address and interface in the replica's network
  ports                the ports that the replica uses between its nodes; the first is the ranks'
                       own port
  samples              [[first, last], ...]: ranges of ports; one port of each range is tested
  peers                {node: address} of the other nodes
  release              the directory of the release that will be started
  model, user          the model's directory, and the account that loads the model
Prints one JSON document. A value that could not be read is {"missing": reason}.
  schema      1
  address     null, or the reason why no program can listen on the address
  mtu         MTU of the interface, in bytes
  routes      {node: interface of the route to the node}
  free        TCP ports that are free
  used        {port: {"program", "pid", "unit"}}: the process that uses a port; null if not known
  udp         a port that is free for UDP: the ranks' own port, or else the first free one of the
              ports; null if no port is free
  udp_user    the process that uses the ranks' own port for UDP, as in `used`; null if there is none
              or it is not known
  spares      free ports: one ephemeral port, and one port of each range in `samples`
  release     {"whole": bool, "vllm": version or null, "ray": version or null}
  files       the result of on_node/reach/model_identity.py
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import socket
import sys
from functools import partial
from typing import Any, Dict, Iterator, List, Tuple

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead, read
from gpufleet.on_node.common.commands import run
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.reach import model_identity

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# Enough for reading both ends of two hundred weight files from a slow network file system.
MODEL_SECONDS = 6
LOOK_SECONDS = 5

# States of include/net/tcp_states.h, in the form of /proc/net/tcp and /proc/net/udp.
TCP_LISTEN = "0A"
UDP_BOUND = "07"
TCP_SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
UDP_SOCKETS = ("/proc/net/udp", "/proc/net/udp6")
UNIT = re.compile(r"/([^/\n]+\.service)")


def main() -> None:
    """Print the document."""
    given = PARAMETERS
    watch = Watch()
    watch.ask("files", partial(model_identity.files, given["model"], given["user"]), MODEL_SECONDS)
    watch.ask("routes", partial(routes, given["peers"], given["address"]), LOOK_SECONDS)
    watch.ask("release", partial(release, given["release"]), LOOK_SECONDS)
    wrong = listen_error(given["address"])
    tcp, udp = (
        [port for port in given["ports"] if not wrong and can_bind(kind, given["address"], port)]
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
    )
    taken = [port for port in given["ports"] if not wrong and port not in tcp]
    own = given["ports"][0]
    watch.ask("used", partial(port_users, taken, TCP_SOCKETS), LOOK_SECONDS)
    blocked = [] if wrong or own in udp else [own]
    watch.ask("udp_user", partial(port_users, blocked, UDP_SOCKETS), LOOK_SECONDS)
    answers = watch.answers("files", "routes", "release", "used", "udp_user")
    document = {
        "schema": 1,
        "address": wrong,
        "mtu": read(mtu, given["interface"]),
        "free": tcp,
        "udp": next((port for port in [own, *reversed(udp)] if port in udp), None),
        "spares": [] if wrong else list(free_ports(given["address"], given["samples"])),
        **answers,
        "udp_user": answers["udp_user"].get(str(own)),
    }
    watch.stop()
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def listen_error(address: str) -> str | None:
    """
    Return why no program can listen on an address of this node, or None if a program can.
    """
    try:
        free_port(address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return "no interface has this address"
        return str(error.strerror)
    return None


def free_port(address: str) -> int:
    """Return a TCP port of the ephemeral range that is free on an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        return int(tried.getsockname()[1])


def free_ports(address: str, samples: List[List[int]]) -> Iterator[int]:
    """Yield free ports: one ephemeral port, and one of each range."""
    with contextlib.suppress(OSError):
        yield free_port(address)
    for first, last in samples:
        tried = random.sample(range(first, last + 1), min(50, last + 1 - first))
        yield from [port for port in tried if can_bind(socket.SOCK_STREAM, address, port)][:1]


def can_bind(kind: int, address: str, port: int) -> bool:
    """Return whether a port is free. TCP connections in TIME_WAIT do not matter."""
    with socket.socket(socket.AF_INET, kind) as tried:
        try:
            if kind == socket.SOCK_STREAM:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((address, port))
                tried.listen(1)
            else:
                tried.bind((address, port))
        except OSError:
            return False
    return True


def mtu(interface: str) -> int:
    """Return an interface's MTU in bytes."""
    return int(linux_facts.line("/sys/class/net/%s/mtu" % interface))


def routes(peers: Dict[str, str], address: str) -> Dict[str, Any]:
    """Return {peer: interface through which the kernel sends from `address` to the peer}."""
    return {node: read(route, peer, address) for node, peer in peers.items()}


def route(peer: str, address: str) -> str:
    """Return the interface through which the kernel sends to a peer."""
    done = run("ip", "-o", "route", "get", peer, "from", address, seconds=LOOK_SECONDS)
    found = re.search(r" dev (\S+)", done.out)
    if not found:
        raise CannotRead("error", detail=(done.err.strip() or done.out.strip()).split("\n")[0])
    return found[1]


def release(directory: str) -> Dict[str, Any]:
    """Return the versions of vLLM and Ray in a release, and whether the release is complete."""
    versions: Dict[str, str] = {}
    for name in names(directory + "/lib"):
        for entry in names("%s/lib/%s/site-packages" % (directory, name)):
            found = re.fullmatch(r"(vllm|ray)-([^-]+)\.dist-info", entry)
            if found:
                versions[found[1]] = found[2]
    return {
        "whole": os.path.exists(linux_facts.ROOT + directory + "/.complete"),
        "vllm": versions.get("vllm"),
        "ray": versions.get("ray"),
    }


def names(directory: str) -> List[str]:
    """Return the names in a directory, or an empty list if the directory does not exist."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(linux_facts.ROOT + directory))
    return []


def port_users(ports: List[int], tables: Tuple[str, ...]) -> Dict[str, Any]:
    """
    Return the processes that use ports, from /proc.

    Only root can see the processes of other accounts.
    """
    if not ports:
        return {}
    sockets = port_sockets(set(ports), tables)
    found: Dict[str, Any] = {str(port): None for port in ports}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir("/proc/%s/fd" % pid):
                with contextlib.suppress(OSError):
                    port = sockets.get(os.readlink("/proc/%s/fd/%s" % (pid, descriptor)))
                    if port is not None:
                        found[str(port)] = found[str(port)] or process(pid)
    return found


def port_sockets(ports: Any, tables: Tuple[str, ...]) -> Dict[str, int]:
    """Return {link target in /proc/PID/fd: port} for the sockets that use these ports."""
    found: Dict[str, int] = {}
    for path in tables:
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[3] in (TCP_LISTEN, UDP_BOUND):
                    port = int(words[1].rpartition(":")[2], 16)
                    if port in ports:
                        found["socket:[%s]" % words[9]] = port
    return found


def process(pid: str) -> Dict[str, Any]:
    """Return a process' name and unit."""
    unit = ""
    with contextlib.suppress(OSError), open("/proc/%s/cgroup" % pid, encoding="utf-8") as file:
        units = UNIT.findall(file.read())
        unit = units[-1] if units else ""
    with open("/proc/%s/comm" % pid, encoding="utf-8", errors="replace") as file:
        return {"program": file.read().strip(), "pid": int(pid), "unit": unit}


if __name__ == "__main__":
    main()
