"""What breaks at the next reboot: told while everything still runs, and stopping nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpufleet.checks.next_reboot import WITHOUT_DRIVER
from tests.support.rows import each_row
from tests.unit.checks.conftest import PROFILES, Judged

Document = Callable[[str], Any]
Judge = Callable[..., Judged]

ABSENT = {"missing": "absent"}
UNREAD = {"missing": "timeout", "seconds": 5, "detail": "modinfo"}
NEW = "6.8.0-99-generic"


def kernel(name: str, nvidia: Any, signer: Any = "a key", **which: bool) -> dict[str, Any]:
    flags = {"running": False, "newest": False} | which
    return {"kernel": name, "nvidia": nvidia, "signer": signer, **flags}


def with_newer(node: Any, nvidia: Any, signer: Any = "a key") -> Any:
    """Return the document of a node on which a newer kernel was installed since boot."""
    node["driver"]["kernels"][-1]["newest"] = False
    node["driver"]["kernels"].append(kernel(NEW, nvidia, signer, newest=True))
    return node


@each_row("profile", PROFILES)
def test_a_healthy_machine_is_no_trouble(document: Document, judged: Judge, profile: str) -> None:
    found = judged(document(profile))
    assert {one.severity.word for check in WITHOUT_DRIVER for one in found.of(check)} == {"ok"}


# --- the module of the next boot


def test_another_module_on_the_disk_is_told(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["driver"]["kernels"][0]["nvidia"] = node["driver"]["disk"]["version"] = "580.95.05"
    found = judged(node)
    assert found.troubles == {("reboot-module", "warn", None)}
    assert "580.95.05" in found.worst("reboot-module").found
    assert "570.124.06" in found.worst("reboot-module").found


def test_what_counts_is_the_kernel_of_the_next_boot(document: Document, judged: Judge) -> None:
    node = with_newer(document("h100x8"), "580.95.05")
    assert judged(node).troubles == {("reboot-module", "warn", None)}
    node = with_newer(document("h100x8"), "570.124.06")
    node["driver"]["kernels"][0]["nvidia"] = "565.57.01"
    assert judged(node).troubles == set()


def test_a_module_that_is_gone_from_the_disk_is_told(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["driver"]["kernels"][0]["nvidia"] = ABSENT
    found = judged(node)
    assert found.troubles == {("reboot-module", "warn", None)}
    assert (
        "the node will have no driver after the next reboot" in found.worst("reboot-module").found
    )


@pytest.mark.parametrize("asked", [True, False])
def test_a_new_kernel_without_a_module_is_told(
    document: Document, judged: Judge, asked: bool
) -> None:
    node = with_newer(document("h100x8"), ABSENT, ABSENT)
    node["system"]["reboot_required"] = asked
    found = judged(node)
    assert found.troubles == {("reboot-kernel", "warn", None)}
    assert f"kernel {NEW} " in found.worst("reboot-kernel").found
    assert ("/run/reboot-required" in found.worst("reboot-kernel").found) == asked
    assert f"dkms autoinstall -k {NEW}" in found.text("reboot-kernel")


@pytest.mark.parametrize("kernels", [[], ABSENT])
def test_a_container_has_no_kernel_to_boot(document: Document, judged: Judge, kernels: Any) -> None:
    node = document("h100x8")
    node["driver"]["kernels"] = kernels
    node["driver"]["disk"] = ABSENT
    found = judged(node)
    assert found.troubles == set()
    assert "does not apply" in found.worst("reboot-kernel").found


@pytest.mark.parametrize("what", ["kernels", "nvidia"])
def test_a_module_that_cannot_be_read_is_unknown(
    document: Document, judged: Judge, what: str
) -> None:
    node = document("h100x8")
    if what == "kernels":
        node["driver"]["kernels"] = UNREAD
    else:
        node["driver"]["kernels"][0]["nvidia"] = UNREAD
    found = judged(node)
    assert {(check, word) for check, word, _ in found.troubles} == {
        ("reboot-module", "unknown"),
        ("reboot-kernel", "unknown"),
    }


def test_a_driver_that_is_not_loaded_is_another_checks_business(
    document: Document, judged: Judge
) -> None:
    node = with_newer(document("h100x8"), ABSENT)
    node["driver"]["module"] = ABSENT
    node["driver"]["kernels"][0]["nvidia"] = ABSENT
    assert {check for check, _, _ in judged(node).troubles} & set(WITHOUT_DRIVER) == set()
    node = with_newer(document("h100x8"), "570.124.06", ABSENT)
    node["driver"]["module"], node["system"]["secure_boot"] = ABSENT, True
    assert {check for check, _, _ in judged(node).troubles} & set(WITHOUT_DRIVER) == set()


# --- its signature


@each_row(
    ("secure", "signer", "severity"),
    [
        (True, ABSENT, "warn"),
        (True, "a key", "ok"),
        (False, ABSENT, "ok"),
        (ABSENT, ABSENT, "ok"),
        (UNREAD, ABSENT, "unknown"),
        (True, UNREAD, "unknown"),
    ],
)
@each_row("newer", [True, False])
def test_secure_boot_will_want_a_signature(  # noqa: PLR0917
    document: Document, judged: Judge, secure: Any, signer: Any, severity: str, newer: bool
) -> None:
    """Of the kernel that boots next, whichever module is loaded now."""
    node = document("h100x8")
    node["system"]["secure_boot"] = secure
    if newer:
        node = with_newer(node, "570.124.06", signer)
    else:
        node["driver"]["kernels"][0]["signer"] = node["driver"]["disk"]["signer"] = signer
    found = judged(node)
    assert found.worst("reboot-signature").severity.word == severity
    if severity == "warn":
        assert found.troubles == {("reboot-signature", "warn", None)}
        assert "mokutil --import" in found.text("reboot-signature")


def test_a_module_that_is_not_there_needs_no_signature(document: Document, judged: Judge) -> None:
    node = with_newer(document("h100x8"), ABSENT, ABSENT)
    node["system"]["secure_boot"] = True
    assert judged(node).troubles == {("reboot-kernel", "warn", None)}


# --- unattended upgrades


UBUNTU = ["Ubuntu:noble", "Ubuntu:noble-security"]
BRANCHED = {"libnvidia-compute-570": "570.124.06-0ubuntu1", "nvidia-dkms-570-open": "570.124.06-1"}
NVIDIAS = {"nvidia-open": "590.48.01-1ubuntu1", "libnvidia-compute": "590.48.01-1ubuntu1"}
DEBIANS = {"nvidia-kernel-dkms": "535.183.01-1~deb12u1"}
OTHERS = {
    "nvidia-container-toolkit": "1.17.0-1",
    "libnvidia-container1": "1.17.0-1",
    "nvidia-cuda-toolkit": "12.0.140~12.0.1-4ubuntu0.24.04.1",
    "datacenter-gpu-manager-4-core": "1:4.5.3-1",
    "linux-image-6.8.0-90-generic": "6.8.0-90.91",
}


def upgrading(
    node: Any,
    packages: dict[str, str],
    origins: list[str],
    blacklist: tuple[str, ...] = (),
    held: bool = False,
) -> Any:
    """Return the document of a node with these packages, upgraded at night from these origins."""
    node["system"]["packages"] = {
        name: {"version": version, "held": held}
        for name, version in {**packages, "unattended-upgrades": "2.9.1"}.items()
    }
    node["system"]["unattended_upgrades"] = {
        "enabled": True,
        "origins": origins,
        "blacklist": list(blacklist),
    }
    return node


@each_row(
    ("packages", "origins", "fires"),
    [
        (BRANCHED, UBUNTU, True),
        (NVIDIAS, UBUNTU, False),  # Ubuntu's archive has no package of that name
        (NVIDIAS, [*UBUNTU, "NVIDIA:"], True),
        (NVIDIAS, ["*:*"], True),
        (NVIDIAS, ["site=developer.download.nvidia.com"], True),
        (NVIDIAS, ["origin=*"], True),
        (DEBIANS, ["origin=Debian,codename=bookworm,label=Debian"], True),
        (BRANCHED, [], False),
        (OTHERS, ["*:*"], False),
        ({}, ["*:*"], False),  # a driver from NVIDIA's .run file
    ],
)
def test_a_driver_that_may_be_upgraded_at_night_is_told(
    document: Document, judged: Judge, packages: dict[str, str], origins: list[str], fires: bool
) -> None:
    found = judged(upgrading(document("h100x8"), packages, origins))
    wanted = {("unattended-upgrades", "warn", None)} if fires else set()
    assert {one for one in found.troubles if one[0] in WITHOUT_DRIVER} == wanted
    if fires:
        assert min(packages) in found.worst("unattended-upgrades").found
        assert f"apt-mark hold {' '.join(sorted(packages))}" in found.text("unattended-upgrades")


@each_row(
    ("blacklist", "held", "fires"),
    [
        (("nvidia-", "libnvidia-"), False, False),
        (("nvidia-",), False, True),  # the libraries alone are what breaks
        (("(lib)?nvidia-.*",), False, False),
        (("*nvidia*",), False, False),  # a glob, as dnf has them, and no regular expression
        (("(",), False, True),
        ((), True, False),
    ],
)
def test_what_is_held_or_blacklisted_stays(
    document: Document, judged: Judge, blacklist: tuple[str, ...], held: bool, fires: bool
) -> None:
    node = upgrading(document("h100x8"), BRANCHED, UBUNTU, blacklist, held)
    assert bool(judged(node).worst("unattended-upgrades").severity) == fires


def test_many_packages_are_counted(document: Document, judged: Judge) -> None:
    node = upgrading(document("h100x8"), {f"nvidia-x{n}-570": "1" for n in range(9)}, UBUNTU)
    assert "nvidia-x3-570 and 5 more" in judged(node).worst("unattended-upgrades").found


def test_dnf_takes_every_repository(document: Document, judged: Judge) -> None:
    node = upgrading(document("h100x8"), {"kmod-nvidia-open-dkms": "570.124.06-1.el9"}, [])
    assert judged(node).worst("unattended-upgrades").severity.word == "ok"
    node["os_release"] = {"id": "rocky", "version_id": "9.5"}
    assert judged(node).worst("unattended-upgrades").severity.word == "warn"


@each_row(
    ("upgrades", "packages", "severity"),
    [
        (ABSENT, None, "ok"),
        ({"enabled": False, "origins": ["*:*"], "blacklist": []}, None, "ok"),
        ({"missing": "timeout", "seconds": 10}, None, "unknown"),
        ({"enabled": UNREAD, "origins": [], "blacklist": []}, None, "unknown"),
        (None, {"missing": "timeout", "seconds": 10}, "unknown"),
        ({"missing": "no_program", "detail": "apt-config"}, None, "info"),
        ({"enabled": {"missing": "no_program"}, "origins": [], "blacklist": []}, None, "info"),
        (None, {"missing": "no_program", "detail": "rpm"}, "info"),
        (None, ABSENT, "ok"),  # neither dpkg nor rpm
    ],
)
def test_upgrades_that_cannot_be_read_are_unknown_unless_nobody_could_tell(
    document: Document, judged: Judge, upgrades: Any, packages: Any, severity: str
) -> None:
    node = upgrading(document("h100x8"), BRANCHED, UBUNTU)
    node["system"]["unattended_upgrades"] = upgrades or node["system"]["unattended_upgrades"]
    node["system"]["packages"] = packages or node["system"]["packages"]
    assert judged(node).worst("unattended-upgrades").severity.word == severity
