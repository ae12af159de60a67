"""Judge nodes before a deploy provisions them, and refuse nodes that are not suitable. Pure.

All problems of all nodes are found before any node is changed, from one probe of each node. A node
without a driver is not a problem. `gpu_software/lock_rules.py` decides whether a lock is suitable
for a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.gpu_software import (
    driver_packages,
    kernel_modules,
    rdma,
)
from gpufleet.gpu_software.repository import address_mistake
from gpufleet.node.machine import Machine, System, from_probe
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.settings.cuda_settings import Repository
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.variables import Origin


@dataclass(frozen=True)
class BareNode:
    """
    A node with a `gpu_lock`, with or without a driver.

    Attributes:
        document: the document that the probe printed.
        origins: the place where each of the node's variables was set.
    """

    name: str
    system: System
    machine: Machine
    settings: NodeSettings
    document: Mapping[str, Any] = field(repr=False)
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)

    @property
    def lock(self) -> GpuLock:
        """Return the node's lock."""
        if self.settings.gpu_lock is None:
            raise ValueError(f"{self.name} has no gpu_lock")
        return self.settings.gpu_lock

    @property
    def repository(self) -> Repository:
        """Return the repository of the vendor's packages."""
        if self.settings.cuda is None:
            raise ValueError(f"{self.name} has no cuda.repository")
        return self.settings.cuda.repository


@dataclass(frozen=True)
class Provisioning:
    """The nodes with a lock, by name, and the reasons for refusing the run."""

    nodes: Mapping[str, BareNode]
    refused: tuple[str, ...]


def read_provisioning(
    answers: Mapping[str, Mapping[str, Any] | str], declared: Mapping[str, NodeVars]
) -> Provisioning:
    """
    Judge nodes by the answers of their probes.

    An answer is a document, or the reason if there is no document.
    """
    nodes: dict[str, BareNode] = {}
    refused: list[str] = []
    locked = [name for name in answers if declared[name].settings.gpu_lock is not None]
    if not locked:
        refused.append(
            "no node of this run has `gpu_lock` in its variables, so gpufleet manages no driver: "
            "`gpufleet lock INVENTORY` writes one from the installed versions "
            "(docs/gpu-nodes/lock.md)"
        )
    for name in locked:
        answer = answers[name]
        if isinstance(answer, str):
            refused.append(f"{name}: {answer}; `--exclude {name}` continues without this node")
            continue
        try:
            with refuse_malformed("the probe"):
                node = _bare(name, answer, declared[name])
        except FleetError as error:
            refused += (f"{name}: {problem}" for problem in error.problems)
            continue
        nodes[name] = node
        refused += (f"{name}: {problem}" for problem in _refusals(node))
    return Provisioning(nodes, tuple(refused))


def _bare(name: str, document: Mapping[str, Any], declared: NodeVars) -> BareNode:
    system, machine = from_probe(document)
    return BareNode(name, system, machine, declared.settings, document, declared.origins)


def _refusals(node: BareNode) -> Iterator[str]:
    """Yield the reasons why this node cannot be provisioned as its settings require."""
    lock = node.lock
    if not node.machine.gpus:
        yield (
            "there is no NVIDIA GPU on the node's PCI bus: check `lspci -d 10de:`, or remove the "
            "node from the group that has `gpu_lock`"
        )
    if node.settings.cuda is None:
        yield (
            "gpu_lock is set, but `cuda.repository`, the source of the packages, is not set: set "
            "`cuda.repository` (docs/configure/inventory.md)"
        )
    try:
        driver_packages.driver_packages(node.system, lock, node.machine)
        driver_packages.dcgm_packages(node.system, lock, node.machine)
        if cuda := node.settings.cuda:
            mistaken = address_mistake(cuda.repository.url, node.system)
            yield from filter(None, [mistaken])
    except FleetError as error:
        yield from error.problems
    unloadable = kernel_modules.build_refusal(node.machine, node.settings.gpu.secure_boot)
    yield from filter(None, [unloadable])
    yield from rdma.refusals(node.settings.gpu.rdma, lock, node.document["kernel"])
