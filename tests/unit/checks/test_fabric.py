"""GPUs that have not joined the NVLink fabric, and the service that lets them."""

from __future__ import annotations

import copy

import pytest

from gpufleet.checks.fabric import HEALTH, upstream_version
from tests.support.rows import each_row

from .wiring import NOT_SUPPORTED, UNKNOWN, as_guest, only

SERVICE = "nvidia-fabricmanager.service"
NOT_STARTED, IN_PROGRESS, COMPLETED = 1, 2, 3
ALL = range(8)


def refuse_peers(node, *gpus):
    """Let the driver grant these GPUs no access over NVLink, in either direction."""
    matrix = node["p2p"]["nvlink"]
    for one in gpus:
        for other in range(len(matrix)):
            if one != other:
                matrix[one][other] = matrix[other][one] = 5


# --- fabric-state


@each_row("profile", ["h100x8", "b200x8", "gb200x4"])
@each_row(
    ("state", "words"),
    [(NOT_STARTED, "not started"), (IN_PROGRESS, "in progress"), (7, "state 7")],
)
def test_only_a_completed_registration_passes(document, judged, profile, state, words):
    node = document(profile)
    count = len(node["gpus"])
    for found in node["fabric"]:
        found["state"] = state
    refuse_peers(node, *range(count))
    said = judged(node)
    assert said.troubles == {("fabric-state", "block", gpu) for gpu in range(count)}
    text = said.text("fabric-state", 0)
    assert words in text
    assert "error 802" in text
    assert ("NMX" in text) == (profile == "gb200x4")
    assert ("ib_umad" in text) == (profile == "b200x8")


def test_a_node_that_just_booted_may_still_be_at_it(document, judged):
    node = document("h100x8")
    node["system"]["uptime_seconds"] = 45.2
    node["fabric"][0]["state"] = IN_PROGRESS
    assert "booted 45 s ago" in judged(node).text("fabric-state", 0)
    node["system"]["uptime_seconds"] = 301
    assert "ago" not in judged(node).text("fabric-state", 0)


@pytest.mark.parametrize(("status", "words"), [(23, "insufficient resources"), (77, "status 77")])
def test_a_completed_registration_can_have_failed(document, judged, status, words):
    node = document("h100x8")
    node["fabric"][3]["status"] = status
    said = judged(node)
    assert said.troubles == {("fabric-state", "block", 3)}
    assert words in said.text("fabric-state", 3)


BAD_HEALTH = [
    # Bits of the mask as nvml.h has them, what follows.
    (0b01, "block", "bandwidth is degraded"),
    (0b01 << 2, "warn", "a route is being recovered"),
    (0b01 << 4, "block", "a route is unhealthy"),
    (0b01 << 6, "warn", "access timeout"),
    (2 << 8, "block", "GUID"),
    (5 << 8, "block", "too few NVLinks"),
    (8 << 8, "block", "the GPU's state is invalid"),
    (11 << 8, "block", "health bits 8 and up say 11"),
    (2 << 12, "block", "no partition is assigned"),
    (2 << 14, "warn", "global fabric manager"),
    (0b11, "block", "health bits 0 and up say 3"),
]


@each_row("profile", ["h100x8", "b200x8"])
@each_row("case", BAD_HEALTH, ids=lambda case: case[2])
def test_a_health_mask_passes_only_if_every_field_is_known_to_be_good(
    document, judged, profile, case
):
    mask, severity, words = case
    node = document(profile)
    node["fabric"][2]["health_mask"] = mask
    said = judged(node)
    assert said.troubles == {("fabric-state", severity, 2)}
    assert words in said.text("fabric-state", 2)


@pytest.mark.parametrize("mask", [0, 0x1AA, 0x51AA, 0x100])
def test_masks_of_healthy_gpus_pass(document, judged, mask):
    node = document("b200x8")
    for found in node["fabric"]:
        found["health_mask"] = mask
    assert judged(node).troubles == set()


def test_the_fields_of_the_mask_do_not_overlap():
    bits = [field.width << field.shift for field in HEALTH]
    assert sum(bits) == 0xFFFF
    assert all(field.bad.keys().isdisjoint(field.good) for field in HEALTH)


def test_a_field_of_the_mask_that_nobody_knows_yet_is_no_pass_unless_the_summary_is(
    document, judged
):
    node = document("b200x8")
    node["fabric"][1]["health_mask"] |= 1 << 16
    assert judged(node).troubles == set()
    node["fabric"][1]["health_summary"] = 0
    assert judged(node).troubles == {("fabric-state", "unknown", 1)}


@pytest.mark.parametrize(("summary", "words"), [(2, "unhealthy"), (3, "limited"), (9, "9")])
def test_a_bad_summary_counts_without_a_bad_field(document, judged, summary, words):
    node = document("b200x8")
    node["fabric"][4]["health_summary"] = summary
    said = judged(node)
    assert said.troubles == {("fabric-state", "block", 4)}
    assert words in said.text("fabric-state", 4)


def test_a_driver_that_cannot_tell_health_is_not_an_alarm(document, judged):
    node = document("h100x8")
    for found in node["fabric"]:
        found.update(struct=1, health_mask={"missing": "version"})
    said = judged(node)
    assert said.troubles == set()
    assert said.worst("fabric-state", 0).severity.word == "info"


def test_a_gpu_in_another_clique_does_not_reach_the_others(document, judged):
    node = document("gb200x4")
    node["fabric"][2]["clique"] = 7
    said = judged(node)
    assert said.troubles == {("fabric-state", "block", 2)}
    assert "clique 7" in said.text("fabric-state", 2)


@pytest.mark.parametrize("key", ["cluster_uuid", "clique"])
def test_a_membership_that_one_gpu_does_not_tell_is_unknown_of_that_one_alone(
    document, judged, key
):
    node = document("gb200x4")
    node["fabric"][1][key] = UNKNOWN
    node["fabric"][2]["clique"] = 7
    assert judged(node).troubles == {("fabric-state", "unknown", 1), ("fabric-state", "block", 2)}
    node["fabric"][2]["clique"] = node["fabric"][3]["clique"]
    node["fabric"][0][key] = node["fabric"][2][key] = UNKNOWN
    assert judged(node).troubles == {("fabric-state", "unknown", gpu) for gpu in (0, 1, 2)}


def test_a_tray_in_no_cluster_is_odd_where_its_siblings_are_in_one(document, judged):
    node = document("gb200x4")
    sibling = copy.deepcopy(node)
    for found in node["fabric"]:
        found.update(cluster_uuid="0" * 32, clique=0)
    assert judged(node).troubles == set()
    said = judged(node, siblings=[sibling])
    assert said.troubles == {("fabric-state", "block", gpu) for gpu in range(4)}


def test_trays_of_two_racks_are_each_in_their_own_cluster(document, judged):
    node, sibling = document("gb200x4"), document("gb200x4")
    for found in sibling["fabric"]:
        found.update(cluster_uuid="ab" * 16, clique=2)
    assert judged(node, siblings=[sibling]).troubles == set()


@each_row("fabric", [NOT_SUPPORTED, "state 0"])
@each_row("profile", ["a100x2-pcie", "h100x2-nvl", "a100x4-pcie"])
def test_boards_on_pcie_have_no_fabric_and_need_none(document, judged, profile, fabric):
    node = document(profile)
    for at, found in enumerate(node["fabric"]):
        none = {"struct": 2, "state": 0, "status": 0, "clique": 0, "cluster_uuid": "0" * 32}
        node["fabric"][at] = fabric if fabric is NOT_SUPPORTED else {**found, **none}
    said = judged(node)
    assert said.troubles == set()
    assert said.worst("fabric-state", 0).severity.word == "ok"


@each_row("why", ["not_supported", "function_not_found", "invalid_argument"])
@each_row("profile", ["h100x8", "b200x8", "gb200x4"])
def test_one_gpu_without_the_state_that_the_others_tell_is_unknown(document, judged, profile, why):
    node = document(profile)
    node["fabric"][3] = {"missing": why}
    assert judged(node).troubles == {("fabric-state", "unknown", 3)}
    refuse_peers(node, 3)
    assert ("fabric-state", "block", 3) in judged(node).troubles


def test_a_gpu_by_itself_need_not_be_in_the_fabric_of_its_server(document, judged):
    node = only(document("h100x8"), 0)
    node["fabric"][0] = NOT_SUPPORTED
    assert judged(node).worst("fabric-state", 0).severity.word == "ok"


def test_a_display_beside_boards_of_a_fabric_is_in_none(document, judged):
    node = document("h100x8")
    node["gpus"][3].update(name="NVIDIA DGX Display")
    node["nvlink"][3]["links"] = node["fabric"][3] = NOT_SUPPORTED
    assert judged(node).worst("fabric-state", 3).severity.word == "ok"


@pytest.mark.parametrize(
    ("profile", "word"), [("h100x8", "unknown"), ("b200x8", "unknown"), ("a100x8", "ok")]
)
def test_behind_nvswitches_gpus_register_since_hopper(document, judged, profile, word):
    """So none of them may say that there is no such thing; that the driver is too old it may."""
    node = document(profile)
    for old in ("not_supported", "function_not_found"):
        node["fabric"] = [{"missing": old} for _ in node["fabric"]]
        found = judged(node).worst("fabric-state", 0)
        assert found.severity.word == (word if old == "not_supported" else "info")


def test_a_gpu_that_denies_the_fabric_that_its_neighbours_are_in(document, judged):
    node = document("h100x8")
    node["fabric"][5]["state"] = 0
    said = judged(node)
    assert said.troubles == {("fabric-state", "block", 5)}
    for found in node["fabric"]:
        found["state"] = 0
    assert ("fabric-state", "block", 0) in judged(node).troubles
    assert judged(only(node, 0)).troubles == set()


@pytest.mark.parametrize("profile", ["a100x8", "h100x8", "a100x4-pcie"])
def test_links_that_the_driver_lets_nobody_use_are_no_links(document, judged, profile):
    """All links are up and each GPU is well, and data would go over PCIe."""
    node = document(profile)
    refuse_peers(node, 0)
    peer = 1
    said = judged(node)
    assert ("fabric-state", "block", 0) in said.troubles
    assert ("fabric-state", "block", peer) in said.troubles
    assert {check for check, *_ in said.troubles} == {"fabric-state"}
    text = said.text("fabric-state", peer)
    assert "NVLinks connect this GPU with GPUs 0" in text
    assert ("MIG" in text) == (profile == "a100x4-pcie")


def test_refused_peers_are_seen_in_a_guest_too(document, judged):
    node = as_guest(document("a100x8"))
    refuse_peers(node, *ALL)
    assert judged(node).troubles == {("fabric-state", "block", gpu) for gpu in ALL}


@pytest.mark.parametrize("what", ["fabric", "p2p"])
def test_a_fabric_that_could_not_be_read_is_unknown(document, judged, what):
    node = document("h100x8")
    if what == "fabric":
        node["fabric"][6] = UNKNOWN
    else:
        node["p2p"]["nvlink"][6][7] = {"missing": "timeout", "seconds": 15}
    said = judged(node)
    assert {each for each in said.troubles if each[0] == "fabric-state"} == {
        ("fabric-state", "unknown", 6)
    }


# --- fabric-manager


@each_row("profile", ["a100x8", "h100x8", "b200x8"])
@each_row("active", ["inactive", "failed", "activating", "deactivating"])
def test_a_service_that_does_not_run_stops_the_node_whatever_gpus_say(
    document, judged, profile, active
):
    node = document(profile)
    node["system"]["units"][SERVICE].update(active=active, sub="dead", result="exit-code")
    said = judged(node)
    assert said.troubles == {("fabric-manager", "block", None)}
    text = said.text("fabric-manager")
    assert f"is {active}" in text
    assert "result exit-code" in text
    assert "systemctl restart nvidia-fabricmanager" in text
    assert ("still report Completed from an earlier start" in text) == (profile != "a100x8")


@pytest.mark.parametrize("load", ["not-found", "masked", "error"])
def test_a_node_with_switches_needs_the_service(document, judged, load):
    node = document("h100x8")
    unit = {"load": load, "active": "inactive", "sub": "dead", "result": "success"}
    node["system"]["units"][SERVICE] = {**unit, "enabled": {"missing": "absent"}}
    said = judged(node)
    assert said.troubles == {("fabric-manager", "block", None)}
    text = said.text("fabric-manager")
    assert ("unmask" if load == "masked" else "nvidia-fabricmanager-570") in text
    assert "4 NVSwitches on the PCI bus" in text


def test_switches_that_the_bus_does_not_show_may_be_managed_from_elsewhere(document, judged):
    """Blackwell's NVSwitches are no PCI functions: a guest's links look like bare metal's."""
    node = document("b200x8")
    node["system"]["units"][SERVICE].update(load="not-found", active="inactive")
    assert judged(node).troubles == {("fabric-manager", "warn", None)}
    for found in node["fabric"]:
        found["state"] = IN_PROGRESS
    assert ("fabric-manager", "block", None) in judged(node).troubles


def test_a_disabled_service_is_gone_after_the_next_boot(document, judged):
    node = document("h100x8")
    node["system"]["units"][SERVICE]["enabled"] = "disabled"
    said = judged(node)
    assert said.troubles == {("fabric-manager", "warn", None)}
    assert "systemctl enable" in said.text("fabric-manager")


VERSIONS = [
    # Package, its version, is installed with driver 570.124.06.
    ("nvidia-fabricmanager-570", "570.124.06-1", True),
    ("nvidia-fabricmanager-570", "570.124.06-0ubuntu0.24.04.1", True),
    ("nvidia-fabricmanager", "1:570.124.06-1.el9", True),
    ("nvidia-fabric-manager", "570.124.06", True),
    ("nvidia-fabricmanager-570", "570.133.20-1", False),
    ("nvidia-fabricmanager-570", "570.124.0-1", False),
    ("nvidia-fabricmanager-575", "575.57.08-1", False),
]


@each_row(("package", "version", "fits"), VERSIONS)
def test_the_service_has_the_drivers_version_to_the_last_number(
    document, judged, package, version, fits
):
    node = document("h100x8")
    del node["system"]["packages"]["nvidia-fabricmanager-570"]
    node["system"]["packages"][package] = {"version": version, "held": True}
    said = judged(node)
    assert said.troubles == (set() if fits else {("fabric-manager", "block", None)})
    if not fits:
        text = said.text("fabric-manager")
        assert f"{package} {version} is installed with driver 570.124.06" in text
        assert "nvidia-fabricmanager-570 in version 570.124.06" in text


def test_its_development_package_says_nothing_of_the_service(document, judged):
    node = document("h100x8")
    node["system"]["packages"]["nvidia-fabricmanager-dev-570"] = {
        "version": "570.86.15-1",
        "held": False,
    }
    assert judged(node).troubles == set()


def test_a_service_from_no_package_started_so_its_version_fits(document, judged):
    node = document("h100x8")
    del node["system"]["packages"]["nvidia-fabricmanager-570"]
    said = judged(node)
    assert said.troubles == set()
    assert "no package contains" in said.worst("fabric-manager").found


def test_nvlink_5_needs_nvlsm_as_well(document, judged):
    node = document("b200x8")
    del node["system"]["packages"]["nvlsm"]
    said = judged(node)
    assert said.troubles == {("fabric-manager", "block", None)}
    assert "nvlsm is not installed" in said.text("fabric-manager")


@each_row(
    ("profile", "why"),
    [
        ("gb200x4", "switch trays"),
        ("a100x4-pcie", "no NVSwitch"),
        ("h100x2-nvl", "no NVSwitch"),
        ("rtx4090x2", "no NVSwitch"),
        ("t4x1", "no NVSwitch"),
    ],
)
def test_without_switches_of_its_own_a_node_needs_no_manager(document, judged, profile, why):
    """If it is installed without need, it fails at each boot, without harm."""
    node = document(profile)
    node["system"]["units"][SERVICE] = {
        "load": "loaded", "active": "failed", "sub": "failed", "enabled": "enabled",
        "result": "exit-code",
    }  # fmt: skip
    said = judged(node)
    assert said.troubles == set()
    assert why in said.worst("fabric-manager").found


def test_in_a_guest_that_does_not_see_the_switches_the_manager_is_the_hosts(document, judged):
    said = judged(as_guest(document("h100x8")))
    assert "host of this virtual machine" in said.worst("fabric-manager").found


def test_the_manager_is_judged_while_the_driver_is_silent(document, judged):
    node = document("h100x8")
    node["driver"]["init"] = {"missing": "driver_not_loaded", "code": 9}
    node["driver"]["version"] = {"missing": "driver_not_loaded"}
    for section in ("gpus", "nvlink", "numa", "fabric"):
        node[section] = []
    node["pcie"], node["p2p"] = [], {kind: [] for kind in node["p2p"]}
    assert judged(node).worst("fabric-manager").severity.word == "ok"
    node["system"]["units"][SERVICE]["active"] = "failed"
    assert judged(node).worst("fabric-manager").severity.word == "block"
    node["driver"]["module"] = {"missing": "absent"}
    assert [each.severity.word for each in judged(node).of("fabric-manager")] == ["block", "info"]
    node["pci"] = []
    assert judged(node).worst("fabric-manager").severity.word == "unknown"


@pytest.mark.parametrize("missing", ["no_program", "absent"])
@pytest.mark.parametrize("profile", ["h100x8", "b200x8"])
def test_without_a_package_manager_its_version_is_not_known_and_no_alarm(
    document, judged, profile, missing
):
    node = document(profile)
    node["system"]["packages"] = {"missing": missing, "detail": "dpkg-query"}
    said = judged(node)
    assert said.troubles == set()
    assert said.worst("fabric-manager").severity.word == "info"
    assert "its version is unknown" in said.worst("fabric-manager").found


@pytest.mark.parametrize("detail", [{}, {"detail": "systemd does not run here"}])
def test_without_systemd_nobody_knows_of_the_service(document, judged, detail):
    node = document("h100x8")
    node["system"]["units"] = {"missing": "absent", **detail}
    said = judged(node)
    assert said.troubles == {("fabric-manager", "unknown", None)}
    assert "systemd does not run here" in said.worst("fabric-manager").found


@pytest.mark.parametrize("what", ["units", "packages"])
def test_a_manager_that_could_not_be_asked_about_is_unknown(document, judged, what):
    node = document("h100x8")
    node["system"][what] = {"missing": "timeout", "seconds": 5}
    assert judged(node).troubles >= {("fabric-manager", "unknown", None)}


@pytest.mark.parametrize(
    ("version", "part"),
    [("570.124.06-1", "570.124.06"), ("1:580.95.05-1", "580.95.05"), ("unknown", None)],
)
def test_the_vendors_part_of_a_packages_version(version, part):
    assert upstream_version(version) == part
