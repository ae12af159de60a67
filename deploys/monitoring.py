"""Run Prometheus, Alertmanager and dashboards on the nodes with `monitoring`.

pyinfra inventories/prod.py deploys/monitoring.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/monitoring.py     # only shows what would change

If a node runs these programs, but its variables no longer declare `monitoring`, the deploy removes
them as its last step and keeps the recorded data (docs/operate/removal.md). All other nodes are
only queried for their running servers and are not changed. If a node does not answer, the deploy
continues on the other nodes (docs/monitor/monitoring.md).
"""

from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import hold_nodes, monitoring_targets, refusals
from roles.absent import remove_undeclared, undeclared
from roles.alertmanager import alertmanager
from roles.grafana import grafana
from roles.node_exporter import node_exporter
from roles.node_facts import node_facts
from roles.prometheus import prometheus

with refusals():
    hold_nodes("monitoring")
    left = undeclared("monitoring")
    node = monitoring_targets(required=not left)
    if node:
        # On nodes with GPUs, deploys/node.py and deploys/vllm.py install the facts.
        if not node.settings.gpu_node:
            node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access_to_exporters(node.settings))
        alertmanager(node)
        prometheus(node)
        grafana(node)
    remove_undeclared("monitoring", left, last=True)
