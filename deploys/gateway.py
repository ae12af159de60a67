"""Run HAProxy on the nodes with `gateway`, in front of all vLLM servers.

pyinfra inventories/prod.py deploys/gateway.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/gateway.py     # only shows what would change

A node that has a gateway and no `gateway` in its variables any more loses it, last of all:
docs/operate/removal.md. All other nodes are asked what runs on them, and left alone. The servers
of one that does not answer stay as the gateway has them. No connection is lost:
docs/traffic/gateway.md.
"""

from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import gateway_targets, hold_nodes, refusals
from roles.absent import remove_undeclared, undeclared
from roles.gateway import gateway
from roles.node_exporter import node_exporter
from roles.node_facts import node_facts

with refusals():
    hold_nodes("gateway")
    left = undeclared("gateway")
    node = gateway_targets(required=not left)
    if node:
        # Nodes with GPUs have them of the deploys that probe those.
        if not node.settings.gpu_node:
            node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access_to_exporters(node.settings))
        gateway(node)
    remove_undeclared("gateway", left, last=True)
