"""Turn bare nodes into GPU nodes with the versions of `gpu_lock`, and check the nodes.

pyinfra inventories/prod.py deploys/node.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/node.py     # only shows what would change

The same command upgrades the driver to a newer version or branch, and also downgrades it
(docs/gpu-nodes/provisioning.md). Nodes without a `gpu_lock` are not changed.
"""

from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import bare_node, hold_nodes, refusals
from gpufleet.gpu_software.driver_packages import dcgm_packages
from gpufleet.monitoring.dcgm import has_profiling
from gpufleet.operations.record_deploy import record_deploy
from roles.absent import remove_undeclared, undeclared
from roles.container_toolkit import container_toolkit
from roles.cuda import cuda
from roles.dcgm import dcgm
from roles.driver_activation import check_driver, driver_activation
from roles.fabric_manager import fabric_manager
from roles.kernel_tuning import kernel_tuning
from roles.node_facts import node_facts
from roles.nvidia_driver import nvidia_driver
from roles.nvidia_imex import nvidia_imex
from roles.nvidia_repository import nvidia_repository
from roles.persistenced import persistenced
from roles.rdma import rdma

with refusals():
    hold_nodes("gpu_lock")
    node = bare_node()
    if node:
        nvidia_repository(node.repository)
        kernel_tuning(node.settings.gpu, len(node.machine.gpus))
        nvidia_driver(node)
        driver_activation(node)
        persistenced(node)
        fabric_manager(node)
        nvidia_imex(node)
        cuda(node.settings.cuda, node.lock.toolkit.profile)
        if node.settings.dcgm:
            packages = dcgm_packages(node.system, node.lock, node.machine).wanted
            profiling = has_profiling(node.settings.dcgm, node.machine)
            access = access_to_exporters(node.settings)
            dcgm(
                node.settings.dcgm, node.repository, access, profiling=profiling, packages=packages
            )
        remove_undeclared("dcgm", undeclared("dcgm"))
        rdma(node.settings.gpu.rdma, node.system.id)
        container_toolkit(node.settings.gpu.container_toolkit)
        check_driver(node)
        # Last, because the facts name the lock, and the node must have its versions by then.
        node_facts(node.settings)
        record_deploy("node", name="record what was found")
