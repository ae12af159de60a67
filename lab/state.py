"""Define a lab's name, its directory, and the state that it stores between commands.

All names of a lab on the machine (bridge, ports, network namespaces, cgroups, nft tables) follow
only from the lab's id, so the lab finds all of them again after a `kill -9`. `lab.json` stores the
values that cannot be derived: the chosen network and the requested nodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import IO, Any

from gpufleet.errors import FleetError

STATE = Path("/var/lib/gpufleet-lab")
CACHE = Path("/var/cache/gpufleet-lab")
CHECKOUT = Path(__file__).resolve().parents[1]
"""The source tree of this lab code; `clean` removes the labs that it has created."""

# Addresses of a lab's /24: .1 is this machine, .11 is gpu-01, and so on.
FIRST_NODE = 10
MIRROR_PORT = 8080
PROXY_PORT = 3128

# The longest interface name is "gf-" + id + "." + a number of three digits. It has 15 characters,
# the kernel's limit (IFNAMSIZ is 16 with the closing NUL). nft identifiers must not have a hyphen,
# so the id has none.
_ID = re.compile(r"[a-z][a-z0-9]{0,7}")
_NODE = re.compile(r"(?:gpu|mon)-([0-9]{2,3})")
_INTERFACE = re.compile(r"eth[1-9]")
LAST_NODE = 240
NO_GPUS = "none"
"""Profile of a node without GPUs, where no part is simulated."""
# The maximum of further networks, because the names of their switches have one digit.
MOST_NETWORKS = 9


@dataclass(frozen=True)
class LabNode:
    """One node of the lab: `gpu-01` has number 1 and the address that ends in .11."""

    name: str
    number: int
    address: IPv4Address
    profile: (
        str  # the hardware it simulates: a file of lab/profiles/ without its suffix, or NO_GPUS
    )
    driver: bool = True  # whether the node was delivered with NVIDIA's driver


@dataclass(frozen=True)
class LabState:
    """One lab's names, paths and stored choices, as a value: changing it writes no file."""

    id: str
    net: IPv4Network | None = None  # None until the first `up` has chosen one
    profiles: Mapping[str, str] = field(default_factory=dict)  # node name -> hardware profile
    # node name -> interface -> its address, such as 10.60.1.1/24; without eth0
    cables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    without_driver: frozenset[str] = frozenset()  # nodes that were delivered without a driver
    checkout: str = str(CHECKOUT)  # the owner of the lab: the source tree that first ran `up`

    # -- where it lies -------------------------------------------------------------------------

    @property
    def dir(self) -> Path:
        return STATE / self.id

    @property
    def key(self) -> Path:
        """Return the private key with which root logs in to the nodes."""
        return self.dir / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.dir / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.dir / "ssh_config"

    def node_dir(self, name: str) -> Path:
        return self.dir / "nodes" / name

    # -- what it is called on the machine ------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Return the name of the bridge and the cgroup; ports are `<prefix>.<number>`."""
        return f"gf-{self.id}"

    @property
    def table(self) -> str:
        """Return the name of the nft table; a node's fault table is `<table>_<number>`."""
        return f"gf_{self.id}"

    def port(self, node: LabNode) -> str:
        """Return the bridge's port of the node's network cable."""
        return f"{self.prefix}.{node.number}"

    def tap(self, number: int | str) -> str:
        """Return the device on the bridge for a node with delayed packets."""
        return f"gd-{self.id}.{number}"

    def switch(self, network: int | str) -> str:
        """
        Return the bridge of an additional network, counted from 1; ports are `<bridge>.<number>`.
        """
        return f"g{network}-{self.id}"

    def netns(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    # -- its network and nodes -----------------------------------------------------------------

    @property
    def subnet(self) -> IPv4Network:
        if self.net is None:
            raise FleetError(f"Lab {self.id!r} is not up: run `gpufleet lab up` first.")
        return self.net

    @property
    def machine(self) -> IPv4Address:
        """Return this machine's address for the nodes."""
        return self.subnet[1]

    @property
    def mirror_url(self) -> str:
        return f"http://{self.machine}:{MIRROR_PORT}"

    @property
    def proxy_url(self) -> str:
        return f"http://{self.machine}:{PROXY_PORT}"

    @property
    def networks(self) -> tuple[IPv4Network, ...]:
        """Return the networks that cables join, in addition to the lab's own."""
        return tuple(
            sorted(
                {
                    IPv4Interface(address).network
                    for cables in self.cables.values()
                    for address in cables.values()
                }
            )
        )

    @property
    def nodes(self) -> tuple[LabNode, ...]:
        """Return all nodes by number."""
        found = (
            LabNode(
                name,
                number_of(name),
                self.subnet[FIRST_NODE + number_of(name)],
                profile,
                driver=name not in self.without_driver,
            )
            for name, profile in self.profiles.items()
        )
        return tuple(sorted(found, key=lambda node: node.number))

    def node(self, name: str) -> LabNode:
        for node in self.nodes if self.profiles else ():
            if node.name == name:
                return node
        have = ", ".join(sorted(self.profiles)) or "none"
        raise FleetError(f"Lab {self.id!r} has no node {name!r} (it has: {have}).")

    # -- remembering ---------------------------------------------------------------------------

    @classmethod
    def load(cls, lab_id: str) -> LabState:
        """Return a lab's stored state; a lab that was never up has only an id."""
        state = cls(checked_id(lab_id))
        try:
            facts: dict[str, Any] = json.loads((state.dir / "lab.json").read_text())
        except FileNotFoundError:
            return state
        profiles = {name: node["profile"] for name, node in facts["nodes"].items()}
        cables = {name: node["cables"] for name, node in facts["nodes"].items() if "cables" in node}
        nodes = facts["nodes"].items()
        return replace(
            state,
            net=IPv4Network(facts["net"]),
            profiles=profiles,
            cables=cables,
            without_driver=frozenset(name for name, node in nodes if not node.get("driver", True)),
            checkout=facts.get("checkout", ""),
        )

    def save(self) -> None:
        """Write `lab.json` for later commands and for readers."""
        nodes = {
            node.name: {
                "address": str(node.address),
                "profile": node.profile,
                **({"cables": self.cables[node.name]} if self.cables.get(node.name) else {}),
                **({} if node.driver else {"driver": False}),
            }
            for node in self.nodes
        }
        facts = {
            "id": self.id,
            "checkout": self.checkout,
            "net": str(self.subnet),
            "nodes": nodes,
            "mirror_url": self.mirror_url,
            "proxy": self.proxy_url,
        }
        write(self.dir / "lab.json", json.dumps(facts, indent=2) + "\n")


def lab_ids() -> list[str]:
    """Return the ids of the labs with files on this machine, up or not."""
    return sorted(
        file.parent.name for file in STATE.glob("*/lab.json") if _ID.fullmatch(file.parent.name)
    )


def checked_id(lab_id: str) -> str:
    """Return the id. Raises `FleetError` if no interface name can be made from it."""
    if not _ID.fullmatch(lab_id):
        raise FleetError(
            f"GPUFLEET_LAB is {lab_id!r}: a lab's id is a lower-case letter and up to seven more "
            "letters or digits, because network interfaces are named after it."
        )
    return lab_id


def check_nodes(profiles: Mapping[str, str]) -> None:
    """Refuse all node names from which no address can be derived."""
    wrong = [
        f"Node {name!r}: lab nodes are named gpu-01 to gpu-{LAST_NODE}, or mon-01 and on where "
        "they have no GPUs, because the number gives the address."
        for name in profiles
        if not _NODE.fullmatch(name) or not 1 <= number_of(name) <= LAST_NODE
    ]
    numbers = [number_of(name) for name in profiles if _NODE.fullmatch(name)]
    if len(set(numbers)) < len(numbers):
        wrong.append("Two nodes have the same number, so they would have the same address.")
    if wrong:
        raise FleetError(*wrong)


def check_cables(
    cables: Mapping[str, Mapping[str, str]], profiles: Mapping[str, str], net: IPv4Network
) -> None:
    """Refuse all cables that cannot be connected."""
    wrong: list[str] = []
    networks: set[IPv4Network] = set()
    for node, interface, address in (
        (node, *cable) for node, own in cables.items() for cable in own.items()
    ):
        where = f"Cable {node}:{interface}={address}"
        if node not in profiles:
            wrong.append(f"{where}: there is no node {node!r}.")
        if not _INTERFACE.fullmatch(interface):
            wrong.append(f"{where}: further interfaces are eth1 to eth9.")
        try:
            network = IPv4Interface(address).network
        except ValueError as error:
            wrong.append(f"{where}: {error}.")
            continue
        if network.prefixlen > 30:
            wrong.append(f"{where}: write the address with its network, as 10.60.1.1/24.")
        if network.overlaps(net):
            wrong.append(f"{where}: {net} is the lab's own, which eth0 is in.")
        networks.add(network)
    if len(networks) > MOST_NETWORKS:
        wrong.append(f"{len(networks)} further networks: at most {MOST_NETWORKS} are possible.")
    if wrong:
        raise FleetError(*wrong)


def number_of(name: str) -> int:
    """Return the number in a node's name."""
    return int(name.partition("-")[2])


def write(path: Path, text: str, mode: int = 0o644) -> bool:
    """
    Make `path` have exactly `text` and `mode`, atomically; return whether it changed.

    A reader sees the old file or the new one, even if this process is killed.
    """
    if path.is_file() and path.read_bytes() == text.encode():
        path.chmod(mode)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    draft.chmod(mode)  # whatever the umask is
    draft.rename(path)
    return True


def forget(folder: Path) -> None:
    """
    Delete a directory atomically, even if this process is killed half-way.

    The next deletion under that name removes the remains of a killed one.
    """
    gone = folder.with_name(f".{folder.name}.gone")
    if gone.exists():
        shutil.rmtree(gone)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone)


@contextmanager
def exclusive(name: str, folder: Path = STATE, limit: float = 300.0) -> Iterator[IO[str]]:
    """
    Hold the lock `name`, which the kernel releases with its process, and yield its file.

    It waits up to `limit` seconds for another command, and then raises `FleetError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.lock"
    with path.open("a") as file:
        if not lock(file, limit):
            raise FleetError(
                f"A different lab command has locked {path} for over {limit:.0f} s: "
                "wait for this command or end it, then try again."
            )
        yield file


def lock(file: IO[str], limit: float, call: Callable[[IO[str], int], None] = fcntl.flock) -> bool:
    """Lock an open file; return False if others hold the lock for `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True
