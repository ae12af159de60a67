"""roles/node_facts.py: gpufleet's own facts of a node, every minute, for the node exporter."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, services

FILES = {
    "/usr/local/libexec/gpufleet": "root:root 755",
    "/usr/local/libexec/gpufleet/node-facts": "root:root 755",
    "/etc/systemd/system/gpufleet-facts.service": "root:root 644",
    "/etc/systemd/system/gpufleet-facts.timer": "root:root 644",
    "/etc/gpufleet/facts.json": "root:root 644",
    "/var/lib/gpufleet": "root:root 755",
    "/var/lib/gpufleet/deploys": "root:root 755",
    "/var/lib/gpufleet/textfile": "root:root 755",
    "/var/lib/gpufleet/textfile/facts.prom": "root:root 644",
    "/var/cache/gpufleet/code": "root:root 700",
}
TIMER = "gpufleet-facts.timer"


def test_the_timer_runs_also_after_a_boot(any_node: Host) -> None:
    assert services(any_node, TIMER) == {TIMER: "active enabled"}


def test_facts_are_for_everybody_and_compiled_programs_for_root(any_node: Host) -> None:
    assert owners(any_node, *FILES) == FILES


def test_nothing_failed_when_facts_were_read(any_node: Host) -> None:
    facts = any_node.file("/var/lib/gpufleet/textfile/facts.prom").content_string
    failed = [line for line in facts.splitlines() if line.startswith("gpufleet_facts_failed{")]
    assert failed
    assert all(line.endswith(" 0") for line in failed), failed
