"""Copy everything that the plan needs to the nodes, without changing a running unit.

pyinfra inventories/prod.py deploys/prepare.py        # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/prepare.py  # only shows what would change

The deploy copies packages, releases and model files, and verifies that each release accepts its
flags. It writes the new units to /var/lib/gpufleet/change/next/. The present units keep running
until the upgrade switches to the new ones.
"""

from gpufleet.fleet.run import hold_nodes, node_plan, refusals
from gpufleet.gpu_software.cuda_toolkit import toolkit_profile
from roles.cuda import cuda
from roles.driver_activation import require_in_service
from roles.firewall import firewall
from roles.nvidia_repository import nvidia_repository
from roles.prepare_vllm import prepare_vllm

with refusals():
    hold_nodes("gpu_node")
    node = node_plan()
    if node:
        if node.settings.gpu_lock:
            require_in_service()
        if node.settings.cuda:
            nvidia_repository(node.settings.cuda.repository)
            cuda(node.settings.cuda, toolkit_profile(node.settings))
        # The ports of planned stages are open before these start, and the ports of running stages
        # stay open until these are replaced.
        firewall(node, node.running)
        prepare_vllm(node)
