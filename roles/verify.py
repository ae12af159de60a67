"""Verify everything that a node should serve. Read-only."""

from __future__ import annotations

from gpufleet.artifacts.operator_files import release_of
from gpufleet.fleet.exporter_access import access_to_exporters
from gpufleet.fleet.run import NodePlan
from gpufleet.monitoring import dcgm, node_exporter
from gpufleet.operations.apply_firewall import LOOK_SECONDS, node_rules
from gpufleet.operations.verify_node import verify_endpoints, verify_firewall
from gpufleet.serving import vllm_node
from gpufleet.serving.readiness import Endpoint


def verify(here: NodePlan) -> None:
    """Verify this node's firewall, stages and exporters; fail the node with all problems."""
    if here.settings.firewall:
        verify_firewall(node_rules(here), name="verify the firewall", _timeout=LOOK_SECONDS)
    access = access_to_exporters(here.settings)
    metrics = [node_exporter.metrics(here.settings.node_exporter, access, facts=True)]
    if here.settings.dcgm and here.settings.dcgm.exporter_version:
        metrics.append(dcgm.metrics(here.settings.dcgm, access))
    verify_endpoints(endpoints(here), metrics, name="verify endpoints and exporters", _timeout=300)


def endpoints(here: NodePlan) -> tuple[Endpoint, ...]:
    """Return this node's endpoints in the plan, without any change."""
    builds = {each.engine: release_of(each) for each in here.settings.used_engines}
    secrets = vllm_node.credentials(here.stages, here.settings)
    rendered = vllm_node.unit_files(here.stages, here.settings, builds, secrets)
    return vllm_node.endpoints(rendered, here.settings)
