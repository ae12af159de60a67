"""Serve the fleet's models: probe, check, plan, converge, and wait until every endpoint answers.

pyinfra inventories/prod.py deploys/vllm.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/vllm.py     # only shows what would change
"""

from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import (
    gateway_targets,
    has_gateways,
    hold_nodes,
    monitoring_targets,
    node_machine,
    node_plan,
    refusals,
)
from gpufleet.gpu_software.cuda_toolkit import toolkit_profile
from gpufleet.monitoring.dcgm import has_profiling, require_published
from gpufleet.operations.apply_firewall import is_narrowed
from gpufleet.operations.record_deploy import record_deploy
from gpufleet.operations.reload_haproxy import wait_for_nodes
from roles.absent import remove_undeclared, undeclared
from roles.cuda import cuda
from roles.dcgm import dcgm
from roles.driver_activation import require_in_service
from roles.firewall import firewall
from roles.gateway import gateway_servers
from roles.node_exporter import node_exporter
from roles.node_facts import node_facts
from roles.nvidia_repository import nvidia_repository
from roles.prometheus import prometheus_targets
from roles.vllm import vllm
from roles.watchdog import watchdog

with refusals():
    hold_nodes("gpu_node", "gateway", "monitoring")
    node = node_plan()
    # Gateways get the planned servers before these start, and keep the running servers until these
    # are replaced.
    gateway = gateway_targets(planned=True, and_running=True)
    if gateway:
        gateway_servers(gateway)
    if node:
        if node.settings.gpu_lock:
            require_in_service()
        if node.settings.cuda:
            nvidia_repository(node.settings.cuda.repository)
            cuda(node.settings.cuda, toolkit_profile(node.settings))
        access = access_to_exporters(node.settings)
        node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access)
        if node.settings.cuda and node.settings.dcgm:
            profiling = bool(node.settings.dcgm.profiling)
            if known := node_machine():
                require_published(known[0], node.node.name)
                profiling = has_profiling(node.settings.dcgm, known[1])
            dcgm(node.settings.dcgm, node.settings.cuda.repository, access, profiling=profiling)
        remove_undeclared("dcgm", undeclared("dcgm"))
        # The ports of planned stages are open before these start, and the ports of running stages
        # stay open until these are replaced.
        firewall(node, node.running)
        vllm(node)
        watchdog(node)
        if is_narrowed(node):
            firewall(node)
        record_deploy("vllm", name="record what was found")
    planned = gateway_targets(planned=True)
    if has_gateways() and (node or gateway):
        wait_for_nodes(name="wait for all nodes")
    if gateway and planned and gateway.servers != planned.servers:
        gateway_servers(planned, if_nothing_failed=True)
    # Monitoring nodes get the planned targets. pyinfra does this first, because these nodes have no
    # other operations.
    watcher = monitoring_targets(planned=True)
    if watcher:
        prometheus_targets(watcher)
