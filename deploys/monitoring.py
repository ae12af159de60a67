"""Run Prometheus, Alertmanager and dashboards on the nodes with `monitoring`.

pyinfra inventories/prod.py deploys/monitoring.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/monitoring.py     # only shows what would change

A node that has them and no `monitoring` in its variables any more loses them, last of all, but for
what is recorded: docs/operate/removal.md. All other nodes are asked what runs on them, and left
alone. One that does not answer does not stop the rest: docs/monitor/monitoring.md.
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
        # Nodes with GPUs have them of the deploys that probe those.
        if not node.settings.gpu_node:
            node_facts(node.settings)
        node_exporter(node.settings.node_exporter, access_to_exporters(node.settings))
        alertmanager(node)
        prometheus(node)
        grafana(node)
    remove_undeclared("monitoring", left, last=True)
