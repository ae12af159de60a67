"""What each role leaves on a node, a file a role, read by testinfra on the lab of the walk.

These tests change nothing. After tests/lab/test_walkthrough.py they read what it has left; alone
they run the deploys first.
"""

from __future__ import annotations

import pytest
import testinfra
from testinfra.host import Host

from tests.lab.upgrade_fleet import GATEWAY
from tests.lab.walk import NODES, TlsFleet


@pytest.fixture(scope="package")
def hosts(walk: TlsFleet) -> dict[str, Host]:
    """The nodes of the fleet after all deploys, each over one SSH connection."""
    walk.finish()
    config = str(walk.state.ssh_config)
    control = f"-o ControlMaster=auto -o ControlPersist=60 -o ControlPath={walk.project}/%h"
    return {
        node: testinfra.get_host(f"ssh://{node}", ssh_config=config, ssh_extra_args=control)
        for node in (*NODES, GATEWAY)
    }


@pytest.fixture(params=NODES)
def gpu_node(hosts: dict[str, Host], request: pytest.FixtureRequest) -> Host:
    """Each node with GPUs."""
    return hosts[request.param]


@pytest.fixture
def server_node(hosts: dict[str, Host]) -> Host:
    """The node that has replica 0's server, which may span all nodes by now."""
    return hosts[NODES[0]]


@pytest.fixture(params=(*NODES, GATEWAY))
def any_node(hosts: dict[str, Host], request: pytest.FixtureRequest) -> Host:
    """Each node of the fleet."""
    return hosts[request.param]


@pytest.fixture
def gateway_node(hosts: dict[str, Host]) -> Host:
    """The node in front of the others, which watches them, too."""
    return hosts[GATEWAY]
