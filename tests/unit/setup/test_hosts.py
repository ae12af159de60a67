"""Hosts as operators name them."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.importer.ansible import read_hosts
from gpufleet.setup.hosts import Host, hosts_of_inventory, parse_hosts

INI = """\
[gpu]
gpu-01 ansible_host=192.0.2.11 ansible_user=admin
gpu-02 ansible_port=2222
[gpu:vars]
ansible_become=true
"""
YAML = "all: {hosts: {gpu-01: {ansible_host: 192.0.2.11}}}\n"


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("gpu-01", Host("gpu-01", "gpu-01", "me")),
        ("admin@gpu-01.example.net", Host("gpu-01.example.net", "gpu-01.example.net", "admin")),
        ("root@192.0.2.11:2222", Host("192.0.2.11", "192.0.2.11", "root", 2222)),
        ("[2001:db8::1]:2222", Host("2001:db8::1", "2001:db8::1", "me", 2222)),
    ],
)
def test_a_word_is_a_host_with_its_user_and_port(word: str, host: Host) -> None:
    assert parse_hosts([word], {}, "me") == (host,)


def test_a_name_of_the_ssh_configuration_has_its_address_user_and_port() -> None:
    said = {"hostname": "192.0.2.11", "user": "admin", "port": "2222", "proxyjump": "bastion"}

    (host,) = parse_hosts(["gpu-01"], {"gpu-01": said}, "me")

    assert (host.address, host.user, host.port) == ("192.0.2.11", "admin", 2222)
    assert host.known_name == "[192.0.2.11]:2222"
    assert host.jump
    # Deploys read the same configuration under this name.
    assert "ssh_hostname" not in host.variables


def test_every_wrong_word_is_named_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        parse_hosts(["a@b@c", "gpu-01:port", "gpu-02", "gpu-03:99999"], {}, "me")

    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "a@b@c",
        "gpu-01",
        "gpu-03",
    ]


def test_two_names_of_one_address_are_refused_and_a_word_given_twice_is_one() -> None:
    assert len(parse_hosts(["gpu-01", "gpu-01"], {}, "me")) == 1
    with pytest.raises(FleetError, match=r"gpu-02 and gpu-01 are both 192\.0\.2\.1"):
        parse_hosts(
            ["gpu-01", "gpu-02"],
            {name: {"hostname": "192.0.2.1"} for name in ("gpu-01", "gpu-02")},
            "me",
        )
    with pytest.raises(FleetError, match="gpu-01: is given twice"):
        parse_hosts(["a@gpu-01", "b@gpu-01"], {}, "me")


def test_an_ansible_inventory_gives_its_hosts_with_address_user_and_port() -> None:
    first, second = hosts_of_inventory(read_hosts(INI), "me")

    assert (first.name, first.address, first.user) == ("gpu-01", "192.0.2.11", "admin")
    assert (second.port, second.user) == (2222, "me")
    assert [host.address for host in hosts_of_inventory(read_hosts(YAML), "me")] == ["192.0.2.11"]


def test_a_text_that_is_no_ansible_inventory_is_refused() -> None:
    with pytest.raises(FleetError, match="not an Ansible inventory"):
        read_hosts("models: [a, b]\n")
