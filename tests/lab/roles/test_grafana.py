"""roles/grafana.py: gpufleet's dashboards, and where to find its Prometheus, in a Grafana.

The Grafana is a stand-in (tests/lab/walk.py): the role gives files, and starts its unit.
"""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, services
from tests.lab.walk import GRAFANA

FILES = {
    "/etc/grafana/provisioning/datasources/gpufleet.yml": "root:root 644",
    "/etc/grafana/provisioning/dashboards/gpufleet.yml": "root:root 644",
    f"/etc/systemd/system/{GRAFANA}.d/gpufleet.conf": "root:root 644",
    "/var/lib/gpufleet/dashboards/gpufleet-fleet.json": "root:root 644",
    "/var/lib/gpufleet/dashboards/gpufleet-gpu.json": "root:root 644",
    "/var/lib/gpufleet/dashboards/gpufleet-model.json": "root:root 644",
    "/var/lib/gpufleet/dashboards/gpufleet-node.json": "root:root 644",
}


def test_it_runs_also_after_a_boot(gateway_node: Host) -> None:
    assert services(gateway_node, GRAFANA) == {GRAFANA: "active enabled"}


def test_dashboards_are_files_that_it_can_read_and_not_change(gateway_node: Host) -> None:
    assert owners(gateway_node, *FILES) == FILES
