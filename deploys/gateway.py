"""Run HAProxy on the nodes with `gateway`, in front of all vLLM servers.

pyinfra inventories/prod.py deploys/gateway.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/gateway.py     # only shows what would change

If a node runs a gateway, but its variables no longer declare `gateway`, the deploy removes this
gateway as its last step (docs/operate/removal.md). All other nodes are only queried for their
running servers and are not changed. If a node does not answer, the gateway keeps the servers of
this node. No connection is lost (docs/traffic/gateway.md).
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
        # On nodes with GPUs, deploys/node.py and deploys/vllm.py install the facts.
        if not node.settings.gpu_node:
            node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access_to_exporters(node.settings))
        gateway(node)
    remove_undeclared("gateway", left, last=True)
