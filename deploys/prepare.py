"""Copy everything that the plan needs to the nodes, and change no running unit.

pyinfra inventories/prod.py deploys/prepare.py        # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/prepare.py  # only shows what would change

Packages, releases, model files and the proof that flags are accepted; the units lie beside those
that run, in /var/lib/gpufleet/change/next/, until the upgrade switches to them.
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
        # What is planned is reachable before it starts, and what runs until it is replaced.
        firewall(node, node.running)
        prepare_vllm(node)
