"""NVLinks that are down, narrow, slow or full of errors, and those that only look like it."""

from __future__ import annotations

import copy

import pytest

from tests.support.rows import each_row

from .wiring import (
    ACTIVE,
    ASLEEP,
    NOT_SUPPORTED,
    TRAFFIC_DISABLED,
    UNKNOWN,
    as_guest,
    cut_peers,
    only,
    rewired,
    take_down,
)

NO_NVLINK = ["not_supported", "invalid_argument"]

LINK_CHECKS = {"nvlink-links", "nvlink-width", "nvlink-errors", "fabric-state", "fabric-manager"}

# --- nvlink-links


@each_row("profile", ["a100x8", "h100x8", "h200x8", "b200x8", "gb200x4"])
def test_a_dead_link_into_a_switch_is_named(document, judged, profile):
    node = document(profile)
    take_down(node, 2, [7])
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 2)}
    count = len(node["nvlink"][2]["links"])
    text = said.text("nvlink-links", 2)
    assert f"1 of {count} links down: 7" in text
    assert f"{count} links up" in text
    assert "nvidia-smi nvlink -s -i 2" in text


@pytest.mark.parametrize("profile", ["a100x8", "h100x8", "b200x8", "gb200x4"])
def test_a_gpu_with_all_links_down_behind_switches_is_broken(document, judged, profile):
    node = document(profile)
    take_down(node, 1)
    said = judged(node)
    assert ("nvlink-links", "block", 1) in said.troubles
    assert {gpu for _, _, gpu in said.troubles} == {1}
    assert f"all {len(node['nvlink'][1]['links'])} links are down" in said.text("nvlink-links", 1)


@each_row("profile", ["a100x8", "h100x8", "b200x8", "gb200x4"])
@each_row("evidence", ["switches", "fabric", "siblings", "name alone"])
def test_all_links_of_all_gpus_down_is_not_a_node_without_nvlink(
    document, judged, profile, evidence
):
    """Whatever is left to tell it by; siblings that are broken in the same way are no excuse."""
    node = document(profile)
    healthy = copy.deepcopy(node)
    for gpu in range(len(node["gpus"])):
        take_down(node, gpu)
        node["gpus"][gpu]["c2c_links"] = NOT_SUPPORTED
        if evidence != "fabric":
            node["fabric"][gpu] = NOT_SUPPORTED
    if evidence != "switches":
        node["pci"] = [each for each in node["pci"] if not each["class"].startswith("0x0680")]
    siblings = {"siblings": [healthy], "name alone": [node, node]}.get(evidence, [])
    said = judged(node, siblings=siblings)
    for gpu in range(len(node["gpus"])):
        assert ("nvlink-links", "block", gpu) in said.troubles


def test_a_board_of_unknown_name_behind_switches_uses_all_its_links(document, judged):
    node = document("h100x8")
    for gpu in node["gpus"]:
        gpu["name"] = "NVIDIA H400"
    take_down(node, 5)
    assert judged(node).troubles == {("nvlink-links", "block", 5)}
    for gpu in range(8):
        take_down(node, gpu)
    assert ("nvlink-links", "block", 0) in judged(node).troubles


@pytest.mark.parametrize("evidence", ["PCI bus", "fabric", "links' ends", "count of links"])
def test_one_sign_of_a_switch_is_enough(document, judged, evidence):
    """GPU 1 of a board that nobody knows has no link up; without a switch that may be meant so."""
    node = as_guest(document("h100x8"))
    node["system"]["units"] = document("h100x8")["system"]["units"]
    for gpu, fabric, links in zip(node["gpus"], node["fabric"], node["nvlink"], strict=True):
        gpu["name"] = "NVIDIA H400"
        if evidence != "fabric":
            fabric["state"] = 0
        if evidence == "links' ends":
            links["links"][0]["remote_type"] = 2
        if evidence == "count of links":
            links["switch_links"] = 18
    if evidence == "PCI bus":
        node["pci"] = document("h100x8")["pci"]
    take_down(node, 1)
    assert ("nvlink-links", "block", 1) in judged(node).troubles


def test_fewer_links_on_all_gpus_of_an_unknown_board_may_be_by_design(document, judged):
    """Export variants have links that lead nowhere; only somebody who knows the node can tell."""
    node = document("h100x8")
    for at, gpu in enumerate(node["gpus"]):
        gpu["name"] = "NVIDIA H400"
        take_down(node, at, range(8, 18))
    said = judged(node)
    assert said.troubles == {("nvlink-links", "warn", at) for at in range(8)}
    assert judged(node, {"gpus": {"nvlink_links": 8}}).troubles == set()


def test_a_switch_that_is_dead_for_all_gpus_alike_is_seen_on_a_known_board(document, judged):
    node = document("h100x8")
    for gpu in range(8):
        take_down(node, gpu, [0, 4, 8, 12, 16])
    said = judged(node, siblings=[copy.deepcopy(node)])
    assert {trouble for trouble in said.troubles if trouble[0] == "nvlink-links"} == {
        ("nvlink-links", "block", gpu) for gpu in range(8)
    }


@each_row(
    ("board", "links"),
    [
        ("NVIDIA A100-SXM4-40GB", 12), ("NVIDIA A100-SXM4-80GB", 12), ("NVIDIA A800-SXM4-80GB", 8),
        ("NVIDIA H100 80GB HBM3", 18), ("NVIDIA H200", 18), ("NVIDIA H20", 18), ("NVIDIA H800", 8),
        ("NVIDIA B200", 18), ("NVIDIA GB200", 18),
    ],
)  # fmt: skip
def test_a_known_board_has_all_links_of_its_data_sheet(document, judged, board, links):
    node = document("h100x8")
    for at, gpu in enumerate(node["gpus"]):
        gpu["name"] = board
        take_down(node, at, range(links, 18))
    assert not [each for each in judged(node).troubles if each[0] == "nvlink-links"]

    for at in range(8):
        take_down(node, at, [0])
    assert judged(node).troubles >= {("nvlink-links", "block", at) for at in range(8)}


@each_row("state", [ACTIVE, ASLEEP])
@each_row("profile", ["a100x8", "h100x8", "a100x4-pcie", "gb200x4"])
def test_links_that_sleep_are_up_and_as_wide(document, judged, profile, state):
    node = document(profile)
    for found in node["nvlink"]:
        for link in found["links"]:
            link["state"] = state
    assert judged(node).troubles == set()


@pytest.mark.parametrize("profile", ["a100x8", "a100x4-pcie"])
def test_one_gpus_links_may_sleep_while_its_peers_are_awake(document, judged, profile):
    node = document(profile)
    for link in node["nvlink"][1]["links"][2:]:
        link["state"] = ASLEEP
    said = judged(node)
    assert said.troubles == set()
    assert said.worst("nvlink-width").severity.word == "ok"


def test_a_link_that_carries_no_traffic_is_down(document, judged):
    node = document("b200x8")
    take_down(node, 0, [17], state=TRAFFIC_DISABLED)
    assert ("nvlink-links", "block", 0) in judged(node).troubles


def test_a_pcie_board_without_bridges_is_not_broken(document, judged):
    """A100 and H100 on PCIe have links; where nobody plugged a bridge all of them are down."""
    node = document("a100x4-pcie")
    for gpu in range(4):
        take_down(node, gpu)
    node["p2p"]["nvlink"] = [[None if i == j else 5 for j in range(4)] for i in range(4)]
    said = judged(node)
    assert said.troubles == set()
    assert "no NVLink bridge" in said.worst("nvlink-links", 0).found
    assert judged(document("a100x2-pcie")).troubles == set()


@pytest.mark.parametrize(
    ("settings", "siblings", "severity"),
    [({"gpus": {"nvlink_links": 12}}, 0, "block"), ({}, 2, "block"), ({}, 1, "warn")],
)
def test_a_bridge_that_is_known_to_be_there_is_missed(
    document, judged, settings, siblings, severity
):
    node, healthy = document("a100x4-pcie"), document("a100x4-pcie")
    for gpu in range(4):
        take_down(node, gpu)
    said = judged(node, settings, siblings=[healthy] * siblings)
    for gpu in range(4):
        assert ("nvlink-links", severity, gpu) in said.troubles
    source = said.worst("nvlink-links", 0).source
    assert ("gpus.nvlink_links" in source) if settings else ("of the same kind" in source)


def test_a_pair_of_a_server_without_the_bridge_that_the_others_have(document, judged):
    node = document("a100x4-pcie")
    cut_peers(node, 2)
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 2), ("nvlink-links", "block", 3)}
    assert said.worst("nvlink-links", 2).source == "the node's other GPUs"
    assert judged(node, {"gpus": {"nvlink_links": 0}}).troubles == set()


def test_of_desktop_boards_one_pair_with_a_bridge_beside_one_without_may_be_meant_so(
    document, judged
):
    node = document("a100x4-pcie")
    for gpu in node["gpus"]:
        gpu.update(name="NVIDIA GeForce RTX 3090", brand=5)
    cut_peers(node, 2)
    links = {each for each in judged(node).troubles if each[0] in LINK_CHECKS}
    assert links == {("nvlink-links", "warn", 2), ("nvlink-links", "warn", 3)}


def test_siblings_that_are_bridged_alike_say_that_it_is_meant_so(document, judged):
    node = document("a100x4-pcie")
    cut_peers(node, 2)
    assert judged(node, siblings=[copy.deepcopy(node), copy.deepcopy(node)]).troubles == set()


def test_one_bridge_of_three_came_loose(document, judged):
    node = document("a100x4-pcie")
    for gpu in (2, 3):
        take_down(node, gpu, range(8, 12))
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 2), ("nvlink-links", "block", 3)}
    assert "4 of 12 links down: 8-11" in said.text("nvlink-links", 3)


def test_bridged_h100_use_12_of_18_links_by_design(document, judged):
    said = judged(document("h100x2-nvl"))
    assert not {trouble for trouble in said.troubles if trouble[0] in LINK_CHECKS}
    assert "12 of 18 links are up" in said.worst("nvlink-links", 0).found


def test_part_of_a_bridge_is_a_fault_though_nobody_says_how_many_links_there_should_be(
    document, judged
):
    node = document("h100x2-nvl")
    up = [link["link"] for link in node["nvlink"][0]["links"] if link["state"] == ACTIVE]
    for gpu in (0, 1):
        take_down(node, gpu, [up[3]])
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 0), ("nvlink-links", "block", 1)}
    assert "11 links lead to the GPU at" in said.text("nvlink-links", 1)


def test_the_peer_of_a_gpu_that_is_gone_may_still_serve_alone(document, judged):
    """Its links are down because nobody is at their other end."""
    node, healthy = document("a100x4-pcie"), document("a100x4-pcie")
    cut_peers(node, 1)
    node["gpus"][1] = {"index": 1, "missing": "lost", "code": 15}
    node["nvlink"][1] = node["fabric"][1] = node["numa"][1] = {"missing": "lost", "code": 15}
    for other in (0, 2, 3):
        for matrix in (*node["p2p"].values(), node["pcie"]):
            matrix[1][other] = matrix[other][1] = {"missing": "no_gpu"}
    said = judged(node, siblings=[healthy, healthy])
    assert ("nvlink-links", "warn", 0) in said.troubles
    assert not [each for each in said.troubles if each[2] in {2, 3} or each[1:] == ("block", 0)]


def test_of_three_boards_one_has_lost_its_peer(document, judged):
    node = document("a100x4-pcie")
    cut_peers(node, 3)
    said = judged(only(node, 0, 1, 2))
    assert {each for each in said.troubles if each[0] in LINK_CHECKS} == {
        ("nvlink-links", "warn", 2)
    }


@pytest.mark.parametrize(("driver", "level"), [("nvidia", "warn"), ("vfio-pci", "block")])
def test_a_board_on_the_bus_may_be_the_peer_that_is_gone_if_this_system_drives_it(
    document, judged, driver, level
):
    """Of four boards in two pairs one has no link up; who was at the other end of it?"""
    node, healthy = document("a100x4-pcie"), document("a100x4-pcie")
    on_bus = [dict(each) for each in node["pci"] if str(each["class"]).startswith("0x03")]
    take_down(node, 0)
    node["pci"].append({**on_bus[0], "bus_id": "0000:f0:00.0", "driver": driver})
    said = judged(node, siblings=[healthy, healthy])
    assert ("nvlink-links", level, 0) in said.troubles


def test_the_peer_of_a_gpu_that_should_be_there_may_still_serve_alone(document, judged):
    node, healthy = document("a100x4-pcie"), document("a100x4-pcie")
    cut_peers(node, 3)
    node = only(node, 0, 1, 2)
    for said in (judged(node, siblings=[healthy]), judged(node, {"gpus": {"count": 4}})):
        assert ("nvlink-links", "warn", 2) in said.troubles
        assert ("nvlink-links", "block", 2) not in said.troubles


def test_a_gpu_by_itself_has_nobody_to_be_linked_with(document, judged):
    node = as_guest(only(document("h200x8"), 0))
    take_down(node, 0)
    node["fabric"][0]["state"] = 0
    said = judged(node)
    assert not {trouble for trouble in said.troubles if trouble[0] in LINK_CHECKS}


def test_a_gpu_by_itself_with_a_dead_link_is_warned_of(document, judged):
    node = only(document("h100x8"), 0)
    take_down(node, 0, [3])
    assert judged(node).troubles == {("nvlink-links", "warn", 0)}


def test_a_guest_that_does_not_see_its_switches_is_healthy(document, judged):
    assert judged(as_guest(document("h100x8"))).troubles == set()


@each_row("profile", ["rtx4090x2", "l40sx8", "t4x1"])
@each_row("answer", ["not_supported", "invalid_argument"])
def test_boards_without_nvlink_have_no_trouble_with_it(document, judged, profile, answer):
    node = document(profile)
    for found in node["nvlink"]:
        found["links"] = {"missing": answer}
    said = judged(node)
    assert said.troubles == set()
    assert said.worst("nvlink-links", 0).found == "does not apply: this GPU has no NVLink"
    assert said.worst("nvlink-links", 0).severity.word == "ok"


def deny(node, *gpus, answer="not_supported"):
    """Let GPUs answer that they have no NVLink, and grant nobody access over it."""
    count = len(node["gpus"])
    for gpu in gpus:
        node["nvlink"][gpu] = {key: {"missing": answer} for key in ("count", "switch_links")}
        node["nvlink"][gpu]["links"] = {"missing": answer}
        for other in set(range(count)) - {gpu}:
            node["p2p"]["nvlink"][gpu][other] = node["p2p"]["nvlink"][other][gpu] = 5
    return node


@each_row("answer", [*NO_NVLINK, "function_not_found"])
@each_row("profile", ["a100x8", "h100x8", "b200x8", "gb200x4", "a100x4-pcie"])
def test_a_gpu_that_denies_the_nvlink_that_its_neighbours_have(document, judged, profile, answer):
    node = deny(document(profile), 3, answer=answer)
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 3)}
    text = said.text("nvlink-links", 3)
    assert "reports no NVLink" in text
    assert f"{len(document(profile)['nvlink'][3]['links'])} links up" in text


@each_row("evidence", ["name", "switches", "fabric", "siblings", "declared"])
@each_row("answer", NO_NVLINK)
def test_a_node_of_which_all_gpus_deny_their_nvlink(document, judged, evidence, answer):
    """One thing that speaks against it is enough."""
    node, healthy = document("h100x8"), document("h100x8")
    for found in (node, healthy):
        if evidence != "name":
            for gpu in found["gpus"]:
                gpu["name"] = "NVIDIA H400"
        if evidence != "switches":
            found["pci"] = [each for each in found["pci"] if not each["class"].startswith("0x0680")]
    for fabric in node["fabric"]:
        if evidence != "fabric":
            fabric["state"] = 0
    deny(node, *range(8), answer=answer)
    siblings = [healthy, healthy] if evidence == "siblings" else []
    settings = {"gpus": {"nvlink_links": 18}} if evidence == "declared" else {}
    said = judged(node, settings, siblings=siblings)
    links = {each for each in said.troubles if each[0] == "nvlink-links"}
    assert links == {("nvlink-links", "block", gpu) for gpu in range(8)}
    assert said.worst("nvlink-width").severity.word != "ok"
    unknown_count = evidence in {"switches", "fabric"}
    assert ("18 links up" in said.text("nvlink-links", 0)) == (not unknown_count)


def test_a_declared_nvlink_that_a_board_never_had_is_missed(document, judged):
    said = judged(document("l40sx8"), {"gpus": {"nvlink_links": 4}})
    assert said.troubles == {("nvlink-links", "block", gpu) for gpu in range(8)}
    assert judged(document("l40sx8"), {"gpus": {"nvlink_links": 0}}).troubles == set()


def test_the_pairs_of_a_gpu_that_denies_its_nvlink_are_not_joined(document, judged):
    node, healthy = deny(document("h100x8"), 7), document("h100x8")
    said = judged(node, siblings=[healthy, healthy])
    assert said.troubles == {("nvlink-links", "block", 7)}
    found = said.worst("nvlink-width")
    assert found.severity.word == "info"
    assert "GPUs 0 and 7 by 0" in found.found


def test_a_gpu_by_itself_in_a_guest_may_have_no_nvlink(document, judged):
    """Hypervisors hand single GPUs over without it; that it is declared is another matter."""
    node = deny(as_guest(only(document("h200x8"), 0)), 0)
    node["fabric"][0]["state"] = 0
    assert not [each for each in judged(node).troubles if each[0] in LINK_CHECKS]
    assert ("nvlink-links", "warn", 0) in judged(node, {"gpus": {"nvlink_links": 18}}).troubles


def test_a_display_beside_linked_boards_has_no_nvlink(document, judged):
    """A DGX Station A100: four boards that are wired to each other, and one for the monitor."""
    node = document("a100x4-pcie")
    cut_peers(node, 2)
    deny(node, 3)
    node["gpus"][3]["name"] = "NVIDIA DGX Display"
    assert "nvlink-links" not in {check for check, _, gpu in judged(node).troubles if gpu == 3}


@pytest.mark.parametrize("profile", ["h100x8", "a100x4-pcie"])
def test_a_driver_without_nvlinks_functions_is_not_asked(document, judged, profile):
    """It is the driver that is too old then, whatever the board has."""
    node = document(profile)
    deny(node, *range(len(node["gpus"])), answer="function_not_found")
    said = judged(node)
    assert not [each for each in said.troubles if each[0] == "nvlink-links"]
    if profile == "h100x8":
        assert "driver is too old" in said.worst("nvlink-links", 0).found


def test_links_that_are_not_there_are_not_down(document, judged):
    """A GPU that lists half of its links, all up."""
    node = document("h100x8")
    node["nvlink"][4]["links"] = node["nvlink"][4]["links"][:9]
    node["nvlink"][4]["switch_links"] = 9
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 4)}
    assert said.worst("nvlink-links", 4).found == "9 of 18 links exist"
    take_down(node, 4, [2])
    assert judged(node).worst("nvlink-links", 4).found == (
        "9 of 18 links exist, of which 1 down: 2"
    )


def test_a_link_whose_state_cannot_be_read_is_unknown(document, judged):
    node = document("h100x8")
    node["nvlink"][4]["links"][9]["state"] = UNKNOWN
    found = judged(node).worst("nvlink-links", 4)
    assert found.severity.word == "unknown"
    assert "9 (unknown, code 999)" in found.found


def test_links_that_cannot_be_read_at_all_are_unknown(document, judged):
    node = document("h100x8")
    node["nvlink"][4]["links"] = UNKNOWN
    said = judged(node)
    for check in ("nvlink-links", "nvlink-errors"):
        assert said.worst(check, 4).severity.word == "unknown"


def test_a_sibling_whose_facts_make_no_sense_is_its_own_trouble(document, judged):
    node, sibling = document("a100x4-pcie"), document("a100x4-pcie")
    for found in sibling["nvlink"]:
        found["links"] = ["garbage"]
    for gpu in sibling["gpus"]:
        gpu["ecc_mode"] = "garbage"
    assert judged(node, siblings=[sibling]).troubles == set()


# --- nvlink-width


def test_a_pair_that_is_narrower_than_the_others_with_all_links_up(document, judged):
    """Bridges plugged crosswise: GPUs 0 and 2 have links of each other's pairs."""
    node = document("a100x4-pcie")
    crossed = {(0, n): 2 for n in range(8, 12)} | {(2, n): 0 for n in range(8, 12)}
    rewired(node, crossed | {(1, n): 3 for n in range(8, 12)} | {(3, n): 1 for n in range(8, 12)})
    said = judged(node, siblings=[document("a100x4-pcie"), document("a100x4-pcie")])
    narrow = {each for each in said.troubles if each[0] == "nvlink-width"}
    assert narrow == {("nvlink-width", "block", gpu) for gpu in range(4)}
    assert "GPUs 0 and 1 by 8" in said.text("nvlink-width", 0)
    assert "12 links between two GPUs" in said.text("nvlink-width", 0)


def test_a_pair_that_is_narrow_because_of_a_dead_link_is_told_once(document, judged):
    node = document("h100x8")
    take_down(node, 3, [0])
    said = judged(node)
    assert said.troubles == {("nvlink-links", "block", 3)}
    found = said.worst("nvlink-width")
    assert found.severity.word == "info"
    assert "GPUs 0 and 3 by 17" in found.found


def test_the_gpu_that_most_narrow_pairs_have_in_common_is_named(document, judged):
    """A link into a switch whose other end the driver does not count: up, and of no use."""
    node = document("h100x8")
    node["nvlink"][6]["links"][0]["remote_type"] = 1
    said = judged(node)
    assert ("nvlink-width", "block", 6) in said.troubles
    assert {gpu for check, _, gpu in said.troubles if check == "nvlink-width"} == {6}


def test_a_narrow_pair_is_seen_beside_a_gpu_that_denies_its_nvlink(document, judged):
    node = deny(document("h100x8"), 7)
    node["nvlink"][6]["links"][0]["remote_type"] = 1
    assert judged(node).troubles == {("nvlink-links", "block", 7), ("nvlink-width", "block", 6)}


def test_a_slow_link_is_named(document, judged):
    node = document("h100x8")
    node["nvlink"][2]["links"][5]["speed_mbps"] = 13281
    said = judged(node)
    assert said.troubles == {("nvlink-width", "block", 2)}
    assert "5 at 13281 MB/s" in said.text("nvlink-width")


def test_of_speeds_that_as_many_links_have_the_higher_one_is_expected(document, judged):
    node = document("h100x8")
    for index, found in enumerate(node["nvlink"]):
        for link in found["links"]:
            link["speed_mbps"] = 13281 if index < 4 else 26562
    assert judged(node).troubles == {("nvlink-width", "block", index) for index in range(4)}


def test_nvlink_2_joins_gpus_unevenly_by_design(document, judged):
    """A DGX-1: of its first four GPUs some pairs share two links, some one."""
    node = document("a100x4-pcie")
    wiring = {0: [1, 2, 3, 3], 1: [0, 2, 2, 3], 2: [0, 1, 1, 3], 3: [0, 0, 1, 2]}
    for gpu, peers in wiring.items():
        node["gpus"][gpu].update(name="Tesla V100-SXM2-32GB", compute_capability=[7, 0])
        node["nvlink"][gpu]["links"] = node["nvlink"][gpu]["links"][: len(peers)]
        for number, link in enumerate(node["nvlink"][gpu]["links"]):
            link["version"] = 3
            rewired(node, {(gpu, number): peers[number]})
    node["p2p"]["nvlink"] = [[None if i == j else 0 for j in range(4)] for i in range(4)]
    assert not [each for each in judged(node).troubles if each[0] in LINK_CHECKS]


# --- nvlink-errors

DAY = 86400

ERRORS = [
    # Up to NVLink 4.
    ("h100x8", {"replay": 4}, DAY, "info", "4 replays"),
    ("h100x8", {"replay": 5}, DAY, "warn", "5 replays"),
    ("h100x8", {"ecc": 5}, DAY, "warn", "5 ECC errors"),
    ("h100x8", {"recovery": 2}, DAY, "block", "2 recoveries, 2 a day"),
    ("h100x8", {"recovery": 1}, DAY, "warn", "1 recoveries, 1 a day"),
    # A node that has just booted: what little there is makes no rate yet.
    ("h100x8", {"recovery": 1}, 40, "warn", "1 recoveries, 1 a day"),
    ("h100x8", {"recovery": 2}, 40, "block", "2 recoveries, 2 a day"),
    ("h100x8", {"recovery": 1}, 0, "warn", "1 recoveries, 1 a day"),
    ("b200x8", {"recovery_ok": 1}, 0, "warn", "1 recoveries, 1 a day"),
    ("h100x8", {"crc_flit": 5000}, 0, "ok", "passed"),
    ("h100x8", {"crc_flit": 6000}, 40, "warn", "100 a second"),
    ("h100x8", {"recovery": 1}, 100 * DAY, "warn", "1 recoveries, 0.01 a day"),
    ("h100x8", {"crc_flit": 50 * DAY, "crc_data": 50 * DAY}, DAY, "warn", "100 a second"),
    ("h100x8", {"crc_flit": 40 * DAY, "crc_data": 50 * DAY}, DAY, "ok", "passed"),
    ("h100x8", {"crc_flit": 1_000_000}, 100 * DAY, "ok", "passed"),
    ("a100x4-pcie", {"recovery": 9}, DAY, "block", "9 recoveries"),
    # NVLink 5.
    ("b200x8", {"effective_ber": 3e-12}, DAY, "block", "effective bit error rate 3e-12"),
    ("b200x8", {"effective_ber": 1e-12}, DAY, "ok", "passed"),
    ("b200x8", {"effective_ber": 1.5e-254, "symbol_ber": 1.5e-254}, DAY, "ok", "passed"),
    ("b200x8", {"recovery_failed": 1}, 100 * DAY, "block", "1 recoveries failed"),
    ("gb200x4", {"recovery_ok": 505}, 5 * DAY, "block", "505 recoveries, 101 a day"),
    ("gb200x4", {"recovery_ok": 2}, 30 * DAY, "warn", "2 recoveries"),
    ("b200x8", {"receive": 5}, DAY, "warn", "5 receive errors"),
    ("b200x8", {"integrity": 2}, DAY, "info", "2 link integrity errors"),
]


@each_row("case", ERRORS, ids=lambda case: f"{case[0]} {case[1]} in {case[2]} s")
def test_errors_of_a_link(document, judged, case):
    profile, errors, uptime, severity, words = case
    node = document(profile)
    node["system"]["uptime_seconds"] = uptime
    node["nvlink"][1]["links"][11]["errors"].update(errors)
    said = judged(node)
    found = said.worst("nvlink-errors", 1)
    assert found.severity.word == severity
    assert words in found.found
    if severity not in {"ok", "info"}:
        assert said.troubles == {("nvlink-errors", severity, 1)}
        assert "link 11" in found.found
    else:
        assert said.troubles == set()


def test_a_bad_link_is_told_apart_from_a_worrying_one(document, judged):
    node = document("h100x8")
    node["nvlink"][0]["links"][2]["errors"]["replay"] = 100
    node["nvlink"][0]["links"][3]["errors"]["recovery"] = 100
    block, warn = judged(node).of("nvlink-errors", 0)
    assert (block.severity.word, "link 3" in block.found) == ("block", True)
    assert (warn.severity.word, "link 2" in warn.found) == ("warn", True)


@pytest.mark.parametrize(("profile", "kind"), [("h100x8", "recovery"), ("b200x8", "effective_ber")])
def test_a_counter_that_could_not_be_read_is_unknown(document, judged, profile, kind):
    node = document(profile)
    node["nvlink"][1]["links"][0]["errors"][kind] = UNKNOWN
    assert judged(node).worst("nvlink-errors", 1).severity.word == "unknown"


def test_a_counter_that_the_driver_does_not_have_says_nothing(document, judged):
    node = document("h100x8")
    for found in node["nvlink"]:
        for link in found["links"]:
            link["errors"]["ecc"] = NOT_SUPPORTED
    assert judged(node).troubles == set()


def test_recoveries_cannot_be_judged_without_knowing_since_when(document, judged):
    node = document("h100x8")
    node["system"]["uptime_seconds"] = {"missing": "error", "detail": "no /proc"}
    node["nvlink"][1]["links"][0]["errors"]["recovery"] = 1
    assert judged(node).worst("nvlink-errors", 1).severity.word == "unknown"
