"""What pyinfra makes of variables that are not ours: by the connector that a node's name has."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings import node_variables
from gpufleet.settings.variables import Origin
from tests.support.rows import each_row

PLACE = Origin("group_vars/all.yml", 3)


def check(node: str, key: str, value: object) -> str:
    """Return what is said against one variable of one node; "": nothing."""
    try:
        node_variables.check({node: {key: (value, PLACE)}}, {node: ()})
    except FleetError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        ("gpu-01", "ssh_port", 2222),
        ("gpu-01", "_sudo", True),
        ("@docker/image", "docker_identifier", "abc"),
        ("@docker/image", "_sudo", True),
    ],
)
def test_a_variable_of_pyinfras_is_taken_where_its_connector_has_it(
    node: str, key: str, value: object
) -> None:
    assert check(node, key, value) == ""


@each_row(
    ("node", "key", "value", "said"),
    [
        ("gpu-01", "docker_identifier", "abc", "docker_identifier: no setting has this name"),
        ("@docker/image", "docker_identifer", "abc", "docker_identifer: no setting has this name"),
        ("gpu-01", "ssh_prot", 22, "ssh_port"),
        ("gpu-01", "ssh_port", "many", "ssh_port"),
        ("gpu-01", "_sudo", "yes", "_sudo"),
    ],
)
def test_one_that_it_does_not_have_or_of_another_type_is_refused_with_its_place(
    node: str, key: str, value: object, said: str
) -> None:
    found = check(node, key, value)
    assert found.startswith("group_vars/all.yml:3: ")
    assert said in found
