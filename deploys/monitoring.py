"""Have the nodes with `monitoring` watch the fleet: Prometheus, Alertmanager, dashboards.

pyinfra inventories/prod.py deploys/monitoring.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/monitoring.py     # only shows what would change

All other nodes are asked what runs on them, and left alone. One that does not answer keeps nobody
from being watched: docs/monitor/monitoring.md.
"""

from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import hold_nodes, monitoring_targets, refusals
from roles.alertmanager import alertmanager
from roles.grafana import grafana
from roles.node_exporter import node_exporter
from roles.node_facts import node_facts
from roles.prometheus import prometheus

with refusals():
    hold_nodes("monitoring")
    node = monitoring_targets()
    if node:
        # Nodes with GPUs have them of the deploys that probe those.
        if not node.settings.gpu_node:
            node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access_to_exporters(node.settings))
        alertmanager(node)
        prometheus(node)
        grafana(node)
