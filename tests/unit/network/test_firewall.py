"""Which ports of a node are whose: the table of nftables, as text and as nft itself reads it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.network import firewall
from gpufleet.node.cluster_network import Network
from gpufleet.on_node.common.stages import started_release
from gpufleet.planning.stage import Running
from gpufleet.serving.unit import render_unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import SettingsError, parse_settings
from gpufleet.settings.serving_settings import Distribution
from gpufleet.templates import TEMPLATES
from tests.support.rows import each_row
from tests.unit.serving.test_rank_units import HEAD, KEYS, SERVED, VLLM, WORKER

PEERS = 'iifname "eth1" ip daddr 10.1.0.1 ip saddr { 10.1.0.2 }'


def settings(**wanted) -> NodeSettings:
    return NodeSettings(vllm=VLLM, serving={"llama": SERVED}).model_copy(
        update={"firewall": parse_settings({"firewall": wanted}).firewall}
    )


def running(stage) -> Running:
    """Return the stage as the probe reads it from its unit."""
    unit = render_unit(stage, SERVED, VLLM, release="0.33.0-1a2b3c4d5e", credentials=KEYS)
    return Running(
        model=stage.model,
        replica=stage.replica,
        node=stage.node,
        gpu_uuids=stage.gpu_uuids,
        port=stage.port,
        rank=stage.node_rank,
        arguments=tuple(started_release(unit.content)["arguments"]),
    )


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize("policy", ["own_ports", "drop"])
def test_between_nodes_everything_is_open_and_from_elsewhere_nothing(policy):
    """By address and interface; the rule for peers stands before the one for everybody else."""
    said = lines(firewall.render_rules([HEAD], settings(policy=policy)))
    assert f"{PEERS} meta l4proto tcp accept" in said
    assert f"{PEERS} udp dport 29500-29515 accept" in said
    closed = said.index("tcp dport { 29500-29515 } counter reject with tcp reset")
    assert said.index(f"{PEERS} meta l4proto tcp accept") < closed
    assert "udp dport { 29500-29515 } counter drop" in said

    worker = firewall.render_rules([WORKER], settings(policy=policy))
    assert 'iifname "eth2" ip daddr 10.1.0.2 ip saddr { 10.1.0.1 }' in worker


def test_what_the_user_of_vllm_lets_in_elsewhere_is_dropped_as_is_what_belongs_to_nobody():
    """The last two rules: others' answers pass, the rest has vLLM's user or none (a SYN cookie)."""
    said = lines(firewall.render_rules([HEAD], settings()))
    assert said[said.index('meta skuid != "vllm" accept') + 1] == "counter drop"
    assert 'oifname "eth1" ip saddr 10.1.0.1 ip daddr { 10.1.0.2 } accept' in said
    assert "tcp sport { 1-1023, 8000 } accept" in said
    # A worker has no endpoint: nobody is let in there.
    assert "tcp sport { 1-1023 } accept" in lines(firewall.render_rules([WORKER], settings()))


def test_own_ports_leaves_everything_else_as_it_is():
    """What is dropped or rejected there are ports of ours, or named by the operator."""
    text = firewall.render_rules([HEAD], settings())
    refused = [line for line in lines(text) if "drop" in line.split() or "reject" in line.split()]
    assert "policy accept" in text
    assert refused == [
        "tcp dport { 29500-29515 } counter reject with tcp reset",
        "udp dport { 29500-29515 } counter drop",
        "counter drop",
    ]
    # Conntrack costs every packet of the node: nothing may switch it on by itself.
    assert "ct state" not in text


def test_clients_and_monitoring_name_who_may_come():
    wanted = {"clients": ["10.9.0.0/16", "fd00::/8"], "monitoring": ["10.8.0.0/24"]}
    said = lines(firewall.render_rules([HEAD], settings(**wanted)))
    # vLLM's own metrics are at its endpoints.
    # Gateways ask the watchdog, and they are among the clients.
    assert "ip saddr { 10.8.0.0/24, 10.9.0.0/16 } tcp dport { 8000, 8406 } accept" in said
    assert "ip6 saddr { fd00::/8 } tcp dport { 8000, 8406 } accept" in said
    assert "tcp dport { 8000, 8406 } counter reject with tcp reset" in said
    assert "ip saddr { 10.8.0.0/24 } tcp dport { 9100 } accept" in said
    assert "tcp dport { 9100 } counter reject with tcp reset" in said


@pytest.mark.parametrize("ports", ["9100", "9000-9999"])
def test_an_exporter_is_not_opened_beside_those_who_may_read_it(ports: str):
    """A UDP port of the same number is another one, and a node without DCGM has no 9400."""
    with pytest.raises(FleetError, match=r"opens 9100.*`firewall.monitoring`"):
        firewall.render_rules([HEAD], settings(open=[{"ports": ports}]))
    firewall.render_rules(
        [HEAD], settings(open=[{"ports": ports, "protocol": "udp"}, {"ports": 9400}])
    )


def test_drop_opens_what_a_node_needs_and_what_is_named():
    wanted = {"policy": "drop", "open": [{"ports": "2049"}, {"ports": 123, "protocol": "udp"}]}
    text = firewall.render_rules([HEAD], settings(**wanted), ssh_port=2222)
    for rule in (
        "policy drop",
        "ct state established,related accept",
        "tcp dport { 2222 } accept",
        "tcp dport { 8000, 8406 } accept",
        "tcp dport 2049 accept",
        "udp dport 123 accept",
        "packet-too-big",
        "nd-neighbor-solicit",
    ):
        assert rule in text
    assert "9100" not in text  # nobody is named who may read the exporters
    assert "tcp sport { 1-1023, 2049, 2222, 8000 } accept" in text


def test_a_watchdog_s_port_is_open_where_one_listens_and_vllm_gets_nothing_by_it():
    """Not on a node without a server, nor where nothing is watched, nor where nobody may ask."""

    def said(stage, vllm=VLLM, **watchdog) -> str:
        served = SERVED.model_copy(update={"watchdog": SERVED.watchdog.model_copy(update=watchdog)})
        firewalled = settings(policy="drop")
        return firewall.render_rules(
            [stage], firewalled.model_copy(update={"vllm": vllm, "serving": {"llama": served}})
        )

    assert "tcp dport { 8000, 8406 } accept" in said(HEAD)
    assert "tcp sport { 1-1023, 8000 } accept" in said(HEAD)
    elsewhere = VLLM.model_copy(update={"watchdog_port": 9500})
    assert "tcp dport { 8000, 9500 } accept" in said(HEAD, elsewhere)
    nobody = VLLM.model_copy(update={"watchdog_port": None})
    for text in (said(WORKER), said(HEAD, mode="off"), said(HEAD, nobody)):
        assert "8406" not in text


def test_drop_lets_a_gateways_clients_in_unless_they_are_named():
    """And the other gateway's word that it lives; whoever reads exporters reads its metrics."""
    address = {"address": "10.9.0.9/24", "interface": "e", "router_id": 1, "password_file": "x"}
    data = settings(policy="drop", monitoring=["10.8.0.0/24"])

    def said(wanted, **more) -> list[str]:
        gateway = {"allow_unauthenticated": True, "allow_plain_http": True, **more}
        known = parse_settings({"gateway": gateway})
        return lines(
            firewall.render_rules([HEAD], wanted.model_copy(update={"gateway": known.gateway}))
        )

    assert "tcp dport { 8443 } accept" in said(data)
    assert "meta l4proto 112 accept" not in said(data)
    assert "meta l4proto 112 accept" in said(data, virtual_address=address)
    assert "ip saddr { 10.8.0.0/24 } tcp dport { 8405, 9100 } accept" in said(data)
    named = settings(policy="drop", open=[{"ports": 8443, "sources": ["10.9.0.0/16"]}])
    assert "tcp dport { 8443 } accept" not in said(named)
    assert "ip saddr { 10.9.0.0/16 } tcp dport 8443 accept" in said(named)


def test_drop_lets_the_fleet_s_other_nodes_copy_releases_from_here():
    """As the settings say where, and nobody else; own_ports leaves it as it is."""
    fellows = ("10.1.0.20", "10.1.0.3")
    rule = "ip saddr { 10.1.0.3, 10.1.0.20 } tcp dport { 8790 } accept"
    dropping = settings(policy="drop")

    assert rule in lines(firewall.render_rules([HEAD], dropping, fellows=fellows))
    assert "8790" not in firewall.render_rules([HEAD], dropping)
    assert "8790" not in firewall.render_rules([HEAD], settings(), fellows=fellows)
    off = VLLM.model_copy(update={"distribution": Distribution(enabled=False)})
    alone = dropping.model_copy(update={"vllm": off})
    assert "8790" not in firewall.render_rules([HEAD], alone, fellows=fellows)


def test_what_runs_as_planned_changes_nothing():
    """So a second deploy has one set of rules, and nothing to narrow afterwards."""
    for stage in (HEAD, WORKER):
        exact = firewall.render_rules([stage], settings())
        assert firewall.render_rules([stage], settings(), running=[running(stage)]) == exact


def test_what_runs_until_it_is_replaced_stays_open():
    """Its nodes, its ports, and its endpoint."""
    old = replace(
        HEAD,
        port=8010,
        group=replace(
            HEAD.group,
            networks=(HEAD.group.networks[0], ("gpu-09", Network("eth0", "10.1.0.9"))),
            cluster_port=29532,
        ),
        nodes=("gpu-01", "gpu-09"),
    )
    text = firewall.render_rules([HEAD], settings(), running=[running(old)])
    own = 'iifname "eth1" ip daddr 10.1.0.1'
    assert f"{own} ip saddr {{ 10.1.0.2, 10.1.0.9 }} meta l4proto tcp accept" in text
    assert f"{own} ip saddr {{ 10.1.0.9 }} udp dport 29532-29547 accept" in text
    assert f"{own} ip saddr {{ 10.1.0.2 }} udp dport 29500-29515 accept" in text
    assert "tcp dport { 29500-29515, 29532-29547 } counter reject" in text
    assert "tcp sport { 1-1023, 8000, 8010 } accept" in text

    alone = firewall.render_rules([], settings(), running=[running(old)])
    assert "ip daddr 10.1.0.1 ip saddr { 10.1.0.9 } meta l4proto tcp accept" in alone


def test_nixl_s_ports_are_between_nodes_too():
    stage = replace(HEAD, group=replace(HEAD.group, side_channel_port=5600), data_parallel=4)
    assert "tcp dport { 5600-5603, 29500-29515 } counter reject" in firewall.render_rules(
        [stage], settings()
    )


def test_what_must_never_be_open_is_not_opened():
    with pytest.raises(FleetError) as refused:
        firewall.render_rules(
            [HEAD], settings(open=[{"ports": "29000-29600"}, {"ports": "29515", "protocol": "udp"}])
        )
    assert len(refused.value.problems) == 2
    assert (
        "firewall.open: 29000-29600 overlaps 29500-29515, which the nodes of a replica use"
        in str(refused.value)
    )


@each_row("name", ["eth*", 'eth"1', "eth 1", "", "a" * 16])
def test_a_name_that_nft_would_take_for_something_else_is_refused(name):
    networks = (("gpu-01", Network(name, "10.1.0.1")), HEAD.group.networks[1])
    stage = replace(HEAD, group=replace(HEAD.group, networks=networks))
    if not name:  # any interface, as of what runs
        assert "iifname" not in firewall.render_rules([stage], settings()).replace(
            'iifname "lo"', ""
        )
        return
    with pytest.raises(FleetError, match="nftables does not accept"):
        firewall.render_rules([stage], settings())


@each_row(
    ("ports", "said"),
    [
        ("0", "must be 1 or more"),
        ("65536", "must be at most 65535"),
        ("9000-8000", "begins with the larger of the two ports: write 8000-9000"),
        ("ssh", "must be a port or a range of ports,"),
        ("1-2-3", "must be a port or a range of ports,"),
        (True, "must be a port or a range of ports,"),
    ],
)
def test_a_mistake_in_ports_is_named(ports, said):
    with pytest.raises(SettingsError, match=said):
        settings(open=[{"ports": ports}])


VARIATIONS = {
    "default": {},
    "drop": {"policy": "drop"},
    "all": {
        "clients": ["10.9.0.0/16", "10.9.1.0/24", "fd00::/8"],
        "monitoring": ["10.8.0.0/24", "fd01::/64"],
        "open": [
            {"ports": "2049-2051"},
            {"ports": "2050-2060", "sources": ["10.2.0.0/16", "fd02::/16"]},
            {"ports": 51820, "protocol": "udp"},
            {"ports": 51821, "protocol": "udp", "sources": ["10.2.0.0/16"]},
        ],
    },
}
VARIATIONS["drop, all"] = VARIATIONS["all"] | VARIATIONS["drop"]


@pytest.mark.skipif(
    not shutil.which("nft")
    or subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0,
    reason="nft, or a network of one's own to ask it in, is missing here",
)
@each_row("name", VARIATIONS)
@each_row("stages", [[], [HEAD], [HEAD, replace(HEAD, replica=1, port=8001)]], ids=len)
def test_nft_takes_it_and_takes_it_again(name, stages):
    """Twice in a row: the second replaces the first. vLLM's user is not on this machine."""
    text = firewall.render_rules(stages, settings(**VARIATIONS[name])).replace('"vllm"', '"nobody"')
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", 't=$(cat); echo "$t" | nft -f - && echo "$t" | nft -f -'],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + text


def test_what_is_wrong_on_a_node_is_said():
    well = {
        "error": "",
        "loaded": "table inet gpufleet {\n\taccept\n}",
        "canonical": "table inet gpufleet {\n\taccept\n}",
        "saved": True,
        "pending": False,
        "service": "active",
    }
    assert list(firewall.problems(well)) == []
    for changed, said in (
        ({"loaded": None}, "is not loaded"),
        (
            {"loaded": "table inet gpufleet {\n\taccept\n\tdrop\n}"},
            "differ from the declared rules: + drop",
        ),
        ({"saved": False}, "and would be loaded after a reboot"),
        ({"pending": True}, "not confirmed"),
        ({"service": "inactive"}, "gpufleet-firewall.service is inactive"),
        ({"error": "nft: no permission"}, "nft: no permission"),
    ):
        (problem,) = firewall.problems(well | changed)
        assert said in problem
    assert list(firewall.problems({})) == ["the firewall could not be queried"]


def test_the_docs_show_what_a_node_has():
    docs = (TEMPLATES.parent / "docs/traffic/firewall.md").read_text()
    assert firewall.render_rules([HEAD], settings()).rstrip() in docs
