"""List the packages that the roles would install on a node, for a bundle. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.converge.desired import Package, Value
from gpufleet.gpu_software import container_toolkit, rdma
from gpufleet.gpu_software.cuda_toolkit import toolkit_packages, toolkit_profile
from gpufleet.gpu_software.driver_packages import dcgm_packages, driver_packages
from gpufleet.monitoring import dcgm, node_exporter
from gpufleet.node.machine import Machine, System
from gpufleet.serving import vllm_node
from gpufleet.settings.node_settings import NodeSettings

# roles/nvidia_repository.py needs the certificates to download the vendor's key, and
# roles/firewall.py needs nft to load its table.
TOOLS = ("ca-certificates", "nftables")


def packages(settings: NodeSettings, system: System, machine: Machine) -> tuple[Package, ...]:
    """
    Return the packages of a node, in the order of deploys/node.py and deploys/vllm.py.

    Raises `FleetError` for a system with unknown driver packages.
    """
    named = (value for value in _values(settings, system, machine) if isinstance(value, Package))
    return tuple({package.name: package for package in named}.values())


def _values(settings: NodeSettings, system: System, machine: Machine) -> Iterator[Value]:
    yield from map(Package, TOOLS)
    yield from node_exporter.required_state(settings.node_exporter)
    if (lock := settings.gpu_lock) is not None:
        yield from driver_packages(system, lock, machine).wanted
        yield from dcgm_packages(system, lock, machine).wanted
    elif settings.dcgm:
        yield from dcgm.declared_packages(settings.dcgm)
    if settings.cuda:
        yield from toolkit_packages(settings.cuda, toolkit_profile(settings))
    if settings.gpu.rdma:
        yield from rdma.desired_rdma(settings.gpu.rdma, system.id)
    if settings.gpu.container_toolkit:
        yield from container_toolkit.desired_toolkit(settings.gpu.container_toolkit, b"")
    if settings.servers:
        yield from map(Package, vllm_node.PACKAGES)
