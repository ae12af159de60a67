"""The machine around the GPUs: when a check fires, when it must not, and when it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpufleet.checks.host import WITHOUT_DRIVER
from tests.support.rows import each_row
from tests.unit.checks.conftest import PROFILES, Judged

Document = Callable[[str], Any]
Judge = Callable[..., Judged]

GIB = 1024
UNREAD = {"missing": "error", "detail": "Input/output error"}
VLLM = {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}
RELEASES, MODELS, CACHE = "/opt/vllm/releases", "/var/lib/vllm/models", "/var/cache/gpufleet/uv"


def serving(width: int = 2, model: str = "/models/m") -> dict[str, Any]:
    """Return variables that declare one model."""
    revision = {} if model.startswith("/") else {"revision": "0" * 40}
    return {
        "vllm": VLLM,
        "serving": {"m": {"model": model, "tensor_parallel": width, **revision}},
    }


def without_driver(document: Any) -> Any:
    """Return the document of a node whose NVIDIA module is not loaded."""
    loaded = document["system"]["modules"]
    document["system"]["modules"] = [name for name in loaded if not name.startswith("nvidia")]
    document["driver"]["init"] = {"missing": "driver_not_loaded", "code": 9}
    for section in ("gpus", "nvlink", "numa", "fabric", "pcie"):
        document[section] = []
    document["p2p"] = {kind: [] for kind in document["p2p"]}
    return document


def of_ours(judged: Judged) -> set[tuple[str, str, int | None]]:
    """Return the troubles that this module's checks have."""
    return {trouble for trouble in judged.troubles if trouble[0] in WITHOUT_DRIVER}


@each_row("profile", PROFILES)
def test_a_healthy_machine_is_no_trouble(document: Document, judged: Judge, profile: str) -> None:
    node = document(profile)
    assert of_ours(judged(node, serving(1), siblings=[node, node])) == set()


# --- Secure Boot


@each_row(
    ("secure", "signer", "refusal", "severity"),
    [
        (True, {"missing": "absent"}, None, "block"),
        (True, "DKMS key", "Loading of module with unavailable key is rejected", "block"),
        (True, "DKMS key", "Loading of unsigned module is rejected", "block"),
        (True, "Canonical Ltd.", None, "ok"),
        (False, {"missing": "absent"}, None, "ok"),
        ({"missing": "absent"}, {"missing": "absent"}, None, "ok"),  # not booted by EFI
        (UNREAD, {"missing": "absent"}, None, "unknown"),
        (True, UNREAD, None, "unknown"),
    ],
)
def test_secure_boot_keeps_a_module_out_that_nobody_it_knows_signed(  # noqa: PLR0917
    document: Document, judged: Judge, secure: Any, signer: Any, refusal: str | None, severity: str
) -> None:
    node = without_driver(document("h100x8"))
    node["system"]["secure_boot"] = secure
    node["driver"]["disk"]["signer"] = signer
    if refusal:
        node["kernel_log"]["lines"].append([7.0, refusal])
    found = judged(node)
    assert found.worst("secure-boot").severity.word == severity
    if severity == "block":
        assert "mokutil --import" in found.text("secure-boot")
        assert refusal is None or refusal in found.text("secure-boot")


def test_a_module_that_is_loaded_was_let_in(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["system"]["secure_boot"] = True
    node["driver"]["disk"]["signer"] = {"missing": "absent"}
    assert of_ours(judged(node)) == set()


# --- nouveau


def test_nouveau_blocks_in_place_of_the_driver_and_warns_beside_it(
    document: Document, judged: Judge
) -> None:
    node = document("h100x8")
    node["system"]["modules"].append("nouveau")
    assert judged(node).troubles == {("nouveau", "warn", None)}
    assert "blacklist nouveau" in judged(node).text("nouveau")
    assert ("nouveau", "block", None) in judged(without_driver(node)).troubles


# --- ACS and IOMMU


def redirecting(node: Any, *places: int) -> Any:
    for at in places or range(len(node["system"]["acs"])):
        node["system"]["acs"][at]["redirect"] = True
    return node


@each_row(
    ("profile", "severity"),
    [
        ("l40sx8", "warn"),
        ("a100x4-pcie", "warn"),
        ("h100x8", "info"),  # NVLink joins every pair
        ("gb200x4", "info"),
        ("rtx4090x2", "info"),  # GeForce has no P2P that could be redirected
        ("t4x1", "ok"),
    ],
)
def test_acs_matters_where_gpus_talk_over_pcie(
    document: Document, judged: Judge, profile: str, severity: str
) -> None:
    node = document(profile)
    node["system"]["acs"] = node["system"]["acs"] or [{"bus_id": "0000:00:01.0", "redirect": 0}]
    found = judged(redirecting(node, 0))
    assert found.worst("iommu-acs").severity.word == severity
    assert of_ours(found) == ({("iommu-acs", "warn", None)} if severity == "warn" else set())


def test_acs_names_its_bridges(document: Document, judged: Judge) -> None:
    node = redirecting(document("l40sx8"), 1)
    assert node["system"]["acs"][1]["bus_id"] in judged(node).worst("iommu-acs").found


@pytest.mark.parametrize(
    ("profile", "severity"), [("l40sx8", "unknown"), ("h100x8", "ok"), ("t4x1", "ok")]
)
def test_acs_that_only_root_may_read_is_unknown_where_it_matters(
    document: Document, judged: Judge, profile: str, severity: str
) -> None:
    node = document(profile)
    node["system"]["acs"], node["user"] = {"missing": "no_permission"}, {"uid": 1000}
    found = judged(node)
    assert found.worst("iommu-acs").severity.word == severity
    assert (severity == "unknown") == ("only root" in found.text("iommu-acs"))


def test_a_bridge_that_does_not_answer_is_unknown(document: Document, judged: Judge) -> None:
    node = document("l40sx8")
    node["system"]["acs"][2]["redirect"] = {"missing": "lost", "detail": "0000:16:00.0"}
    assert judged(node).troubles == {("iommu-acs", "unknown", None)}


@pytest.mark.parametrize(("status", "severity"), [(1, "info"), (3, "info"), (4, "warn")])
def test_p2p_that_the_driver_refuses_is_told(
    document: Document, judged: Judge, status: int, severity: str
) -> None:
    node = document("l40sx8")
    node["p2p"]["read"][0][4] = status
    found = judged(node)
    assert found.worst("iommu-acs").severity.word == severity
    assert "0-4" in found.text("iommu-acs")


def test_an_iommu_that_translates_is_told(document: Document, judged: Judge) -> None:
    node = document("l40sx8")
    node["system"]["iommu"]["types"] = {"DMA-FQ": 30, "identity": 2}
    assert judged(node).worst("iommu-acs").severity.word == "info"
    assert "iommu=pt" in judged(node).text("iommu-acs")


# --- room on disk


@each_row(
    ("free", "settings", "severity"),
    [
        (11.9, serving(), "block"),
        (12.1, serving(), "warn"),
        (29.9, serving(), "warn"),
        (30.1, serving(), None),
        (11.9, {}, "warn"),  # nothing is to be installed
        (4.9, {"vllm": VLLM | {"device": "cpu"}}, "block"),
        (9.9, {"vllm": VLLM | {"device": "cpu"}}, "warn"),
        (10.1, {"vllm": VLLM | {"device": "cpu"}}, None),
    ],
)
def test_a_release_needs_its_room(
    document: Document, judged: Judge, free: float, settings: Any, severity: str | None
) -> None:
    node = document("h100x8")
    node["system"]["disks"] = {
        path: {"mount": "/", "size_mib": 100 * GIB, "free_mib": int(free * GIB)}
        for path in ("/", RELEASES, MODELS)
    }
    found = judged(node, settings)
    assert found.troubles == ({("disk-space", severity, None)} if severity else set())
    assert len(found.of("disk-space")) == 1  # one filesystem is one trouble
    if severity:
        assert f"{free:.1f} GiB are free on /, where /opt/vllm/releases is" in found.text(
            "disk-space"
        )


@pytest.mark.parametrize(
    ("release", "severity"), [("0.32.0-ab12", "warn"), ("0.31.0-ab12", "block")]
)
def test_a_full_disk_blocks_nobody_whose_release_is_built(
    document: Document, judged: Judge, release: str, severity: str
) -> None:
    node = document("h100x8")
    node["system"]["disks"] = {"/": {"mount": "/", "size_mib": 100 * GIB, "free_mib": 1 * GIB}}
    node["system"]["releases"] = [release]
    assert judged(node, serving()).troubles == {("disk-space", severity, None)}


@each_row(
    ("path", "settings", "fires"),
    [
        (MODELS, serving(2, "org/model"), True),
        (MODELS, serving(2, "/models/there"), False),
        (MODELS, {}, False),
        (CACHE, serving(), True),
        (CACHE, {}, False),
    ],
)
def test_a_disk_of_its_own_is_judged_by_what_is_to_come_there(
    document: Document, judged: Judge, path: str, settings: Any, fires: bool
) -> None:
    node = document("h100x8")
    node["system"]["disks"][path] = {"mount": "/data", "size_mib": 50 * GIB, "free_mib": 9 * GIB}
    found = judged(node, settings)
    assert found.troubles == ({("disk-space", "warn", None)} if fires else set())


def test_room_that_was_not_asked_for_is_unknown(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["system"]["disks"] = {"/opt/vllm/rel": {"mount": "/", "size_mib": 1, "free_mib": 1}}
    assert judged(node).troubles == {("disk-space", "unknown", None)}


# --- clock, shared memory, memory


def test_a_clock_that_nobody_keeps_is_a_warning(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["system"]["clock"] = {"synchronized": False, "max_error_us": 16000000}
    assert judged(node).troubles == {("clock", "warn", None)}


@each_row(
    ("profile", "size", "free", "settings", "severity"),
    [
        ("h100x8", 64, 64, {}, "block"),  # a container's default
        ("h100x8", 900000, 160, {}, "block"),  # full
        ("h100x8", 64, 64, serving(2), "block"),
        ("h100x8", 64, 64, serving(1), "warn"),
        ("h100x8", 8191, 8000, {}, "warn"),
        ("h100x8", 8192, 161, {}, None),
        ("t4x1", 64, 64, {}, "warn"),
        ("t4x1", 1024, 1024, {}, None),
    ],
)
def test_ranks_need_shared_memory(  # noqa: PLR0917
    document: Document,
    judged: Judge,
    profile: str,
    size: int,
    free: int,
    settings: Any,
    severity: str | None,
) -> None:
    node = document(profile)
    node["system"]["shm"] = {"size_mib": size, "free_mib": free}
    found = judged(node, settings)
    assert found.troubles == ({("shared-memory", severity, None)} if severity else set())
    if severity:
        assert f"{free} of {size} MiB" in found.text("shared-memory")


def test_little_memory_is_a_warning_that_names_huge_pages(
    document: Document, judged: Judge
) -> None:
    node = document("h100x8")
    node["system"]["memory_available_mib"] = 20 * GIB
    assert judged(node).troubles == set()
    node["system"]["memory_available_mib"] = 20 * GIB - 1
    assert judged(node).troubles == {("host-memory", "warn", None)}
    assert "huge pages" not in judged(node).worst("host-memory").found
    assert judged(node).worst("host-memory").expected == "20 GiB: 4 GiB, plus 2 GiB per GPU"
    node["system"]["hugepages"] = {"total": 900000, "free": 900000, "size_kib": 2048}
    assert "1757.8 GiB are reserved as huge pages" in judged(node).worst("host-memory").found


# --- RDMA


def down(node: Any, count: int) -> Any:
    for device in node["nics"]["infiniband"][:count]:
        device["ports"][0]["state"] = "1: DOWN"
    return node


def test_ports_are_counted_against_the_declaration_then_the_siblings(
    document: Document, judged: Judge
) -> None:
    sibling = document("h100x8")
    ports = len(sibling["nics"]["infiniband"])
    assert ports
    node = down(document("h100x8"), 1)
    warned = {("rdma", "warn", None)}
    assert judged(node).troubles == set()
    assert judged(node).worst("rdma").severity.word == "info"
    assert judged(node, siblings=[sibling, sibling]).troubles == warned
    assert judged(node, {"gpus": {"rdma_ports": ports}}).troubles == warned
    text = judged(node, {"gpus": {"rdma_ports": ports}}).text("rdma")
    assert "mlx5_0/1" in text
    assert "gpus.rdma_ports" in text
    assert (
        judged(node, {"gpus": {"rdma_ports": ports - 1}}, siblings=[sibling] * 2).troubles == set()
    )
    assert judged(down(node, ports), {"gpus": {"rdma_ports": 0}}).troubles == set()


def test_an_adapter_that_is_gone_is_missed(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    ports = len(node["nics"]["infiniband"])
    node["nics"]["infiniband"] = {"missing": "absent"}
    found = judged(node, {"gpus": {"rdma_ports": ports}})
    assert found.troubles == {("rdma", "warn", None)}
    assert "the node has no other port" in found.text("rdma")


def test_siblings_with_other_gpus_say_nothing(document: Document, judged: Judge) -> None:
    assert ("rdma", "warn", None) not in judged(
        document("t4x1"), siblings=[document("h100x8")] * 3
    ).troubles


# --- facts that are missing


@each_row(
    ("check", "fact"),
    [
        ("nouveau", "modules"),
        ("clock", "clock"),
        ("shared-memory", "shm"),
        ("host-memory", "memory_available_mib"),
        ("disk-space", "disks"),
    ],
)
def test_what_cannot_be_read_is_unknown(
    document: Document, judged: Judge, check: str, fact: str
) -> None:
    node = document("h100x8")
    node["system"][fact] = UNREAD
    found = judged(node)
    assert (check, "unknown", None) in found.troubles
    assert fact in found.text(check)


def test_rdma_that_cannot_be_read_is_unknown(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["nics"]["infiniband"] = UNREAD
    assert judged(node).troubles == {("rdma", "unknown", None)}


# --- host-ecc


@each_row(
    ("corrected", "uncorrected", "severity"),
    [(0, 0, "ok"), (900, 0, "ok"), (1100, 0, "warn"), (0, 1, "warn"), (-1, 0, "unknown")],
)
def test_errors_of_the_machines_memory_are_a_warning(
    document: Document, judged: Judge, corrected: int, uncorrected: int, severity: str
) -> None:
    """The recorded machines are up for ten days."""
    node = document("h100x8")
    node["system"]["memory_errors"] = {"corrected": corrected, "uncorrected": uncorrected}

    assert judged(node).worst("host-ecc").severity.word == severity


@each_row("told", [{"missing": "absent"}, None])
def test_a_machine_whose_memory_is_not_watched_is_not_judged(
    document: Document, judged: Judge, told: Any
) -> None:
    node = document("h100x8")
    node["system"]["memory_errors"] = told
    if told is None:
        del node["system"]["memory_errors"]

    assert judged(node).troubles == set()
    assert judged(node).worst("host-ecc").found.startswith(("does not apply", "not checked"))
