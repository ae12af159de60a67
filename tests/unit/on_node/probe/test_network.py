"""What the probe reads of net devices beside their first address: networks, kinds, parts."""

from __future__ import annotations

import socket
import struct

import pytest

from gpufleet.on_node.common import linux_facts


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """`tree({path: text})`: files that the probe then reads as the machine's."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))

    def write(files):
        for path, text in files.items():
            at = tmp_path / path.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)

    return write


def told(address, prefix, *, local=None):
    """The kernel's answer about one address: struct ifaddrmsg and its attributes."""
    attributes = [(1, address)] + ([(2, local)] if local else [])
    return struct.pack("=BBBBI", socket.AF_INET, prefix, 0, 0, 2) + b"".join(
        struct.pack("=HH", 8, kind) + socket.inet_aton(text) for kind, text in attributes
    )


def test_the_loopback_has_the_network_that_it_has_everywhere():
    """Asked of this machine's own kernel."""
    assert "127.0.0.1/8" in linux_facts.networks("lo")


def test_a_device_without_an_address_has_none():
    with pytest.raises(OSError, match="no-such-0"):
        linux_facts.networks("no-such-0")


def test_a_tunnels_own_end_counts_and_not_the_other():
    assert linux_facts._address(told("10.0.0.2", 32, local="10.0.0.1")) == "10.0.0.1/32"
    assert linux_facts._address(told("10.1.0.5", 16)) == "10.1.0.5/16"


@pytest.mark.parametrize("cut", [8, 10, 12, 15])
def test_an_answer_that_was_cut_has_no_address(cut):
    assert linux_facts._address(told("10.1.0.5", 16)[:cut]) is None


def test_messages_follow_each_other_at_multiples_of_four():
    body = told("10.1.0.5", 16)
    header = struct.pack("=IHHII", 16 + len(body), 20, 0, 1, 0)
    done = struct.pack("=IHHII", 16 + 1, 3, 0, 1, 0) + b"\0\0\0\0"

    found = list(linux_facts._messages(header + body + done))

    assert [kind for kind, _ in found] == [20, 3]
    assert found[0][1] == body


def test_another_machines_networks_are_not_this_ones(monkeypatch):
    monkeypatch.setattr(linux_facts, "ANSWERS", {"ipv4": {"lo": "10.9.0.1"}})

    with pytest.raises(OSError, match="lo"):
        linux_facts.networks("lo")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"uevent": "DEVTYPE=bridge\nINTERFACE=br0\n"}, "bridge"),
        ({"uevent": "INTERFACE=tun0\n", "tun_flags": "0x1001\n"}, "tun"),
        ({"uevent": "INTERFACE=eth0\nIFINDEX=2\n"}, {"missing": "absent"}),
    ],
)
def test_a_kind_is_the_drivers_word(tree, files, wanted):
    tree({f"/sys/class/net/x/{name}": text for name, text in files.items()})

    assert linux_facts.net("x")["kind"] == wanted


def test_a_bonds_parts_are_named(tree):
    tree({f"/sys/class/net/bond0/{name}": "" for name in ("lower_eth2", "lower_eth1", "upper_br")})

    assert linux_facts.net("bond0")["lower"] == ["eth1", "eth2"]
