"""Serve the fleet's models: probe, check, plan, converge, and wait until every endpoint answers.

pyinfra inventories/prod.py deploys/vllm.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/vllm.py     # only shows what would change
"""

from gpufleet.fleet.run import built, fronting, has_gateways, here, refusals, watching
from roles.cuda import cuda, profile
from roles.dcgm import dcgm, profiles, suits
from roles.driver_in_force import in_service
from roles.exporters import access_to_exporters
from roles.firewall import firewall, narrows
from roles.gateway import nodes_are_done, servers_of
from roles.node_exporter import node_exporter
from roles.node_facts import node_facts, recorded
from roles.nvidia_repository import nvidia_repository
from roles.prometheus import targets_of
from roles.vllm import vllm
from roles.watchdog import watched

with refusals():
    node = here()
    # Gateways get what is planned before it starts, and keep what runs until it is replaced.
    gateway = fronting(planned=True, and_running=True)
    if gateway:
        servers_of(gateway)
    if node:
        if node.settings.gpu_lock:
            in_service()
        if node.settings.cuda:
            nvidia_repository(node.settings.cuda.repository)
            cuda(node.settings.cuda, profile(node.settings))
        access = access_to_exporters(node.settings)
        node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access)
        if node.settings.cuda and node.settings.dcgm:
            profiling = bool(node.settings.dcgm.profiling)
            if known := built():
                suits(known[0], node.node.name)
                profiling = profiles(node.settings.dcgm, known[1])
            dcgm(node.settings.dcgm, node.settings.cuda.repository, access, profiling=profiling)
        # What is planned is reachable before it starts, and what runs until it is replaced.
        firewall(node, node.running)
        vllm(node)
        watched(node)
        if narrows(node):
            firewall(node)
        recorded("vllm", name="record what was found")
    planned = fronting(planned=True)
    if has_gateways() and (node or gateway):
        nodes_are_done(name="nodes are done")
    if gateway and planned and gateway.servers != planned.servers:
        servers_of(planned, if_nothing_failed=True)
    # What is planned is watched, where a node does that. pyinfra does it first, for nothing else is
    # to be done on that node.
    watcher = watching(planned=True)
    if watcher:
        targets_of(watcher)
