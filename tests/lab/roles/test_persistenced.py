"""roles/persistenced.py: the daemon that keeps GPUs initialised while nobody uses them.

The lab's unit has Ubuntu's `--no-persistence-mode`, which the role undoes on Ubuntu alone: the mode
itself is off on these Debian nodes.
"""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, services

SERVICE = "nvidia-persistenced.service"
DROP_IN = f"/etc/systemd/system/{SERVICE}.d/gpufleet.conf"


def test_the_daemon_runs_also_after_a_boot(gpu_node: Host) -> None:
    assert services(gpu_node, SERVICE) == {SERVICE: "active enabled"}
    assert owners(gpu_node, DROP_IN) == {DROP_IN: "root:root 644"}
