"""Start, damage and stop the lab: real Linux nodes on this machine.

Every verb converges: it determines the present state and makes the missing parts. So you can repeat
a verb, even after a `kill -9` at any point. Only one verb at a time runs on a lab, and the others
wait.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from gpufleet.errors import FleetError
from lab import (
    active_faults,
    base_image,
    cgroup,
    gpu_simulator,
    network,
    node_disk,
    node_machine,
    node_power,
    root_filesystem,
    services,
    vendor,
)
from lab.active_faults import Broken
from lab.progress import Say, silent, step
from lab.state import (
    NO_GPUS,
    LabNode,
    LabState,
    check_cables,
    check_nodes,
    exclusive,
    forget,
    number_of,
    write,
)

DEFAULT_ID = "lab"
# Two nodes with different hardware: an HGX board, whose eight GPUs are all connected through
# NVSwitch, and a PCIe node with two bridged pairs. A replica of two GPUs fits on both nodes, but
# differently.
DEFAULT_NODES = {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie"}

# Time for a running node to answer before its power is cycled.
_PATIENCE = 15.0  # seconds

_SSH_CONFIG = """\
Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  UpdateHostKeys no
  BatchMode yes
  ConnectTimeout 5
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""


@dataclass(frozen=True)
class NodeStatus:
    """The present state of one node."""

    name: str
    address: str
    profile: str
    on: bool
    ssh: bool
    processes: int
    memory: int  # bytes
    faults: tuple[Broken, ...] = ()
    driver: bool = True  # whether the node was delivered with a driver


class Lab:
    """One lab, by its id; `Lab.open("lab").up({"gpu-01": "h100x8"})`. Needs root."""

    def __init__(self, facts: LabState, say: Say = silent) -> None:
        self.facts = facts
        self.say = say

    @classmethod
    def open(cls, lab_id: str | None = None, say: Say = silent) -> Lab:
        """
        Return the lab `lab_id` (default: $GPUFLEET_LAB, or else "lab"), up or not.

        `say` receives progress lines.
        """
        return cls(LabState.load(lab_id or os.environ.get("GPUFLEET_LAB") or DEFAULT_ID), say)

    @property
    def state(self) -> Path:
        """Return the directory of lab.json, ssh_config, known_hosts, id_ed25519 and the secrets."""
        return self.facts.dir

    def root(self, name: str) -> Path:
        """Return the node's root directory, which is accessible while the lab is up."""
        return self.facts.node_dir(self.facts.node(name).name) / "root"

    # -- verbs ---------------------------------------------------------------------------------

    def up(
        self,
        profiles: Mapping[str, str] | None = None,
        cables: Mapping[str, Mapping[str, str]] | None = None,
        without_driver: Collection[str] | None = None,
        packages: Collection[str] = (),
    ) -> None:
        """
        Make exactly these nodes run (name -> hardware profile), reachable and unharmed.

        With None, these are the nodes of the last `up`, or the two default nodes. A running node
        stays up. A node that is no longer in the mapping is removed with all its files. `cables`
        are interfaces in addition to eth0: {"gpu-01": {"eth1": "10.60.1.1/24"}}. Nodes
        `without_driver` are delivered with GPUs, but without NVIDIA software. If a node changes
        between with and without driver, all its files are created again. `packages` are installed
        in the base image, because installing them on many nodes would take too long.

        Raises `FleetError`.
        """
        with self._alone():
            self._refresh()
            wanted = dict(profiles or self.facts.profiles or DEFAULT_NODES)
            check_nodes(wanted)
            bare = self._without_driver(wanted, profiles is None, without_driver)
            gpu_simulator.check_profiles(wanted)
            base_image.ensure_packages(self.say)
            base = base_image.build(self.say, packages)
            kept = self.facts.cables if profiles is None else {}
            self._settle(wanted, kept if cables is None else cables, bare)
            network.up(self.facts)
            self._write_files()
            if self.facts.without_driver:
                vendor.build_kernels(self.state)
            services.start(self.facts, self.say)
            self._boot(base)

    def down(self) -> None:
        """Switch everything off and leave only files under `state`."""
        with self._alone():
            self._refresh()
            self._down()

    def purge(self) -> None:
        """Run `down`, then delete the lab: nodes' files, keys and secrets."""
        with self._alone():
            self._refresh()
            self._down()
            forget(self.state)
            self.facts = LabState(self.facts.id)

    def power(self, name: str, action: str) -> None:
        """
        Cut a node's power (`off`), switch it on (`on`), or both (`cycle`); `on` waits for sshd.

        `off` is not a shutdown: it first cuts the link, so that no peer is informed, and then kills
        every process.
        """
        if action not in ("off", "on", "cycle"):
            raise FleetError(f"Power {action!r} is unknown: use off, on or cycle.")
        with self._alone():
            node = self._present(name)
            if action in ("off", "cycle"):
                network.pull_cables(self.facts, node)
                node_power.off(self.facts, name)
            if action in ("on", "cycle"):
                network.heal(self.facts, node)
                self._start([node])

    def net(self, name: str, action: str, amount: str | int | None = None) -> None:
        """
        Damage a node's link, or repair it.

        The verbs are `cut`, `heal`, `loss` with a percentage, `delay` with milliseconds, `rate`
        with a rate in tc's form (`1mbit`), and `deaf` with the node whose packets are lost. Verb
        and value can also be one word: `net("gpu-01", "loss 30")`.
        """
        verb, _, rest = action.partition(" ")
        value = str(rest if amount is None else amount)
        with self._alone():
            node = self._present(name)
            if verb == "cut":
                network.pull_cables(self.facts, node)
            elif verb == "heal":
                network.heal(self.facts, node)
            elif verb == "loss" and value.isdigit():
                network.lose(self.facts, node, int(value))
            elif verb == "delay" and value.isdigit() and int(value) <= 10_000:
                network.delay(self.facts, node, int(value))
            elif verb == "deaf" and value != name:
                network.deafen(self.facts, node, self.facts.node(value))
            elif verb == "rate" and re.fullmatch(r"[0-9]+[kmg]?bit", value):
                network.throttle(self.facts, node, value)
            else:
                raise FleetError(
                    f"Net {verb!r} {value!r} must be cut, heal, loss PERCENT (0 to 100), delay "
                    "MILLISECONDS (0 to 10000), deaf OTHER-NODE or rate RATE (such as 1mbit)."
                )

    def fault(self, name: str, fault: str, gpu: int | None = None) -> Broken:
        """
        Set a fault on a node's hardware or software, which stays through reboots until `clear`.

        `fault` is a name of lab/faults/. A node can have several faults. `gpu` is the index of the
        GPU with the fault; the default for a fault of one GPU is 0. The node can be on or off; a
        running node gets the fault at once. Raises `FleetError` for a fault that the node's
        hardware cannot have.
        """
        with self._alone():
            node = self._present(name)
            if node.profile == NO_GPUS:
                raise FleetError(f"{name} has no simulated hardware, so it cannot have faults.")
            home = self.facts.node_dir(name)
            new = active_faults.parse_fault(fault, gpu, node.profile, driver=node.driver)
            before = active_faults.read(home)
            after = (*(each for each in before if each != new), new)
            lines = active_faults.machine_with(node.profile, after).nvml
            active_faults.remember(home, after)
            gpu_simulator.override(home / "root", lines)
            self._furnish(node)
            return new

    def clear(self, name: str) -> tuple[Broken, ...]:
        """Remove all faults from a node, and return the removed ones."""
        with self._alone():
            node = self._present(name)
            home = self.facts.node_dir(name)
            before = active_faults.read(home)
            active_faults.remember(home, ())
            self._furnish(node)
            return before

    def faults(self, name: str) -> tuple[Broken, ...]:
        """Return the faults of a node."""
        self._refresh()
        return active_faults.read(self.facts.node_dir(self.facts.node(name).name))

    def status(self) -> list[NodeStatus]:
        """Return the present state of every node, within a second or two."""
        self._refresh()
        if not self.facts.profiles:
            return []
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(self._status, self.facts.nodes))

    # -- steps of up ---------------------------------------------------------------------------

    def _without_driver(
        self, wanted: Mapping[str, str], again: bool, asked: Collection[str] | None
    ) -> frozenset[str]:
        """Return the nodes without a driver: the `asked` ones, or those of the last up."""
        if asked is None:
            return self.facts.without_driver if again else frozenset()
        if unknown := set(asked) - set(wanted):
            raise FleetError(
                f"Without a driver: {', '.join(sorted(unknown))} would not be in this lab "
                f"(it has: {', '.join(sorted(wanted))})."
            )
        return frozenset(asked)

    def _settle(
        self,
        wanted: Mapping[str, str],
        cables: Mapping[str, Mapping[str, str]],
        without_driver: frozenset[str],
    ) -> None:
        """Choose network and nodes, store them, and remove unwanted nodes."""
        # One lock for all labs, because two labs must not choose the same network.
        with exclusive("networks"):
            net = network.choose(self.facts)
            if self.facts.net and net != self.facts.net:
                self.say(f"the lab moves from {self.facts.net} to {net}")
                self._down()
            check_cables(cables, wanted, net)
            if cables != self.facts.cables:
                network.pull(self.facts)
            self.facts = replace(
                self.facts,
                net=net,
                profiles=dict(wanted),
                cables=dict(cables),
                without_driver=without_driver,
            )
            self.facts.save()
        node_disk.mount(self.facts, self.say)
        # Remains of a killed removal.
        for rest in self.state.glob("nodes/.*.gone"):
            shutil.rmtree(rest)
        for home in self._homes():
            if home.name not in wanted:
                self.say(f"{home.name}: removed, because it is no longer requested")
                self._remove(home)

    def _write_files(self) -> None:
        """Write the files for logging in, and the lab's secrets."""
        facts = self.facts
        root_filesystem.new_key(facts.key, f"gpufleet-{facts.id}")
        known, hosts = [], []
        for node in facts.nodes:
            root_filesystem.new_host_key(facts, node)
            known.append(f"{node.name},{node.address} {root_filesystem.host_key(facts, node)}\n")
            hosts.append(f"Host {node.name}\n  HostName {node.address}\n")
        common = _SSH_CONFIG.format(key=facts.key, known_hosts=facts.known_hosts)
        write(facts.known_hosts, "".join(known))
        write(facts.ssh_config, "".join(hosts) + common)
        (facts.dir / "secrets").mkdir(exist_ok=True)
        (facts.dir / "secrets").chmod(0o700)
        for name in ("api-key", "cluster-key", "hf-token"):
            if not (secret := facts.dir / "secrets" / name).exists():
                write(secret, secrets.token_urlsafe(32) + "\n", 0o600)

    def _boot(self, base: Path) -> None:
        """Start every node, and wait until it answers."""
        (self.state / "nodes").mkdir(exist_ok=True)
        (self.state / "nodes").chmod(0o700)  # setuid programs inside: root only
        running, off = [], []
        for node in self.facts.nodes:
            if node_power.is_on(self.facts, node.name) and self._has_its_hardware(node):
                self._furnish(node)
                network.plug(self.facts, node)
                running.append(node)
            else:
                node_power.off(self.facts, node.name)  # remove the remains of a killed node
                root_filesystem.unmount(self.facts.node_dir(node.name))
                if root_filesystem.mount(self.facts, node, base):
                    self.say(f"{node.name}: starts with new files: image or driver changed")
                off.append(node)
        silent_ones = self._silent(running, _PATIENCE) if running else []
        for node in silent_ones:
            self.say(f"{node.name}: runs but does not answer SSH, so its power is cycled")
            node_power.off(self.facts, node.name)
        self._start([*off, *silent_ones])

    def _start(self, nodes: list[LabNode]) -> None:
        """Switch on the nodes that are off, all at once, and wait until they answer."""
        if not nodes:
            return
        with step(f"boot {', '.join(node.name for node in nodes)}", self.say):
            for node in nodes:
                if not node_power.is_on(self.facts, node.name):
                    node_power.off(self.facts, node.name)
                    network.plug(self.facts, node)
                    self._furnish(node)
                    node_power.on(self.facts, node)
            if dead := self._silent(nodes, node_power.BOOT_LIMIT):
                raise FleetError(
                    *(
                        f"{node.name} did not answer SSH within {node_power.BOOT_LIMIT:.0f} s; its "
                        f"console said: {node_power.console(self.facts, node.name)}."
                        for node in dead
                    )
                )

    def _has_its_hardware(self, node: LabNode) -> bool:
        """
        Return whether the node was started with this profile's hardware; a change needs it off.
        """
        there = node_machine.profile_of(self.facts.node_dir(node.name) / "root")
        as_made = root_filesystem.made_for(self.facts.node_dir(node.name), node)
        if there != node.profile or not as_made:
            kind = "" if node.driver else " without a driver"
            self.say(f"{node.name}: is switched off to become {node.profile}{kind}")
        return there == node.profile and as_made

    def _furnish(self, node: LabNode) -> None:
        """Write the node's own files to its root; a running node follows."""
        root_filesystem.furnish(self.facts, node)
        home = self.facts.node_dir(node.name)
        if node.profile == NO_GPUS:
            node_machine.place_nothing(home / "root")
            return
        have = active_faults.read(home)
        wanted = active_faults.still_possible(have, node.profile, driver=node.driver)
        for gone in set(have) - set(wanted):
            self.say(f"{node.name}: {gone} is cleared, because {node.profile} cannot have it")
        if wanted != have:
            active_faults.remember(home, wanted)
        changes = node_machine.place(
            home / "root",
            active_faults.machine_with(node.profile, wanted, node.name),
            without_driver=not node.driver,
            running=node_power.is_on(self.facts, node.name),
        )
        if node_power.is_on(self.facts, node.name):
            node_machine.follow(node_power.group(self.facts, node.name), home / "root", changes)
        node_machine.mark_placed(home / "root")

    def _silent(self, nodes: list[LabNode], limit: float) -> list[LabNode]:
        """Return the nodes whose sshd does not answer within `limit` seconds."""
        with ThreadPoolExecutor(64) as pool:
            greeted = pool.map(lambda node: node_power.answers(node, limit), nodes)
            return [node for node, well in zip(nodes, greeted, strict=True) if not well]

    # -- steps of down -------------------------------------------------------------------------

    def _down(self) -> None:
        services.stop(self.facts)
        for home in self._homes():
            node_power.off(self.facts, home.name)
            root_filesystem.unmount(home)
        node_disk.unmount(self.facts)
        cgroup.remove(self.facts.prefix)
        network.remove(self.facts)

    def _remove(self, home: Path) -> None:
        """Remove one node with all its files."""
        node_power.off(self.facts, home.name)
        root_filesystem.unmount(home)
        network.unplug(self.facts, home.name, number_of(home.name))
        forget(home)

    # -- what is there -------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[object]:
        return exclusive(f"lab-{self.facts.id}")

    def _refresh(self) -> None:
        """Load the lab's state again, because another command may have changed it."""
        self.facts = LabState.load(self.facts.id)

    def _homes(self) -> list[Path]:
        """Return the directory of every node that has left files, requested or not."""
        return sorted(self.state.glob("nodes/[!.]*-*"))

    def _present(self, name: str) -> LabNode:
        """Return the node. Raises `FleetError` if the lab is down."""
        self._refresh()
        node = self.facts.node(name)
        if not (self.facts.node_dir(name) / "root").is_mount():
            raise FleetError(f"Lab {self.facts.id!r} is down: run `gpufleet lab up` first.")
        return node

    def _status(self, node: LabNode) -> NodeStatus:
        processes = cgroup.pids(f"{node_power.group(self.facts, node.name)}/machine/payload")
        return NodeStatus(
            node.name,
            str(node.address),
            node.profile,
            on=node_power.is_on(self.facts, node.name),
            ssh=node_power.answers(node, 0.5),
            processes=len(processes),
            memory=node_power.memory(self.facts, node.name),
            faults=active_faults.read(self.facts.node_dir(node.name)),
            driver=node.driver,
        )
