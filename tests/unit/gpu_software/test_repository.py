"""Which repository is for which system stands in a table; nothing is derived."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from gpufleet.errors import FleetError
from gpufleet.gpu_software.package_names import package_names
from gpufleet.gpu_software.repository import (
    VENDOR,
    address_mistake,
    fingerprint,
    key_path,
    package_source,
    repository_path,
    stored_key_path,
    vendor_repository,
)
from gpufleet.node.machine import System
from gpufleet.settings.cuda_settings import Repository
from gpufleet.settings.gpu_lock import GpuLock
from tests.support.checkout import ROOT
from tests.support.rows import each_row

SYSTEMS = {
    "ubuntu2204/x86_64": System("ubuntu", "22.04", "x86_64"),
    "ubuntu2404/sbsa": System("ubuntu", "24.04", "aarch64"),
    "ubuntu2604/x86_64": System("ubuntu", "26.04", "x86_64"),
    "debian12/x86_64": System("debian", "12", "x86_64"),
    "debian13/x86_64": System("debian", "13", "x86_64"),
    "rhel9/x86_64": System("rocky", "9.6", "x86_64"),
    "rhel9/sbsa": System("almalinux", "9.4", "aarch64"),
    "rhel10/x86_64": System("rhel", "10.1", "x86_64"),
}


@each_row("folder", SYSTEMS)
def test_every_system_has_its_own_repository(folder: str) -> None:
    assert repository_path(SYSTEMS[folder]) == folder
    assert address_mistake(f"{VENDOR}/{folder}", SYSTEMS[folder]) is None


@each_row("folder", SYSTEMS)
def test_another_systems_repository_is_told(folder: str) -> None:
    """Debian 13 refuses the key of Debian 12's, and packages of one do not install on another."""
    for other in set(SYSTEMS) - {folder}:
        said = address_mistake(f"https://mirror.example/nvidia/{other}/", SYSTEMS[folder])
        assert said is not None
        assert f"ends in {other}" in said
        assert folder in said


def test_a_mirror_may_call_its_folders_anything() -> None:
    assert address_mistake("https://mirror.example/gpu", SYSTEMS["debian12/x86_64"]) is None


@pytest.mark.parametrize(("name", "version"), [("debian", "11"), ("sles", "15"), ("rocky", "8.9")])
def test_a_system_without_a_row_is_refused(name: str, version: str) -> None:
    with pytest.raises(FleetError, match=f"{name} {version}"):
        vendor_repository(System(name, version, "x86_64"))


def test_keyring_packages_differ_though_they_have_one_name() -> None:
    hashes = [vendor_repository(system).keyring_sha256 for system in SYSTEMS.values()]
    known = [each for each in hashes if each]
    assert len(known) == 5
    assert len(set(known)) == 5


def test_a_keys_fingerprint_is_known_by_its_file_name_where_it_is_known_at_all() -> None:
    assert (fingerprint("D42D0685.pub") or "").endswith("D42D0685")
    assert fingerprint("CDF6BA43.pub") is None  # RHEL 10's: only the file name is published
    assert fingerprint("cuda-keyring_1.1-1_all.deb") is None


@pytest.mark.parametrize(
    ("keyring", "key"), [("cuda-keyring_1.1-1_all.deb", "gpg"), ("D42D0685.pub", "asc")]
)
def test_a_source_names_the_key_that_the_repository_role_puts_there(keyring: str, key: str) -> None:
    """apt takes a file that ends in .asc for armoured and any other for binary."""
    repository = Repository(
        url="https://mirror.example/cuda", keyring=keyring, keyring_sha256="0" * 64
    )
    assert (
        package_source(repository).key
        == key_path(repository)
        == f"/etc/gpufleet/keys/nvidia-cuda.{key}"
    )
    assert stored_key_path(repository).endswith(keyring[-4:])


def test_a_source_may_bring_the_drivers_packages_and_not_the_systems() -> None:
    found = package_source(Repository(url="https://mirror.example/cuda", keyring_sha256="0" * 64))

    def comes(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in found.packages)

    for name in ("nvidia-driver-cuda", "libcuda1", "cuda-toolkit-13-0", "kmod-nvidia-open-dkms"):
        assert comes(name), name
    for name in ("dkms", "linux-headers-amd64", "mft", "libc6", "openssl", "kernel-devel"):
        assert not comes(name), name


def test_the_documentations_table_is_the_codes() -> None:
    """Each row of docs/gpu-nodes/supported-systems.md, against what a node of that system gets."""
    page = (ROOT / "docs/gpu-nodes/supported-systems.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.endswith("` |")]
    rows = [row for row in rows if len(row) == 5 and row[3] in {"yes", "no", "not known"}]
    assert len(rows) == 7
    for names, folder, packaging, dcgm, keyring in rows:
        *ids, version = names.replace(",", "").split()
        for each in ids:
            system = System(each, version, "x86_64")
            found = vendor_repository(system)
            assert repository_path(system) == f"{folder}/x86_64"
            assert {True: "yes", False: "no", None: "not known"}[found.dcgm] == dcgm
            assert package_names(system, GpuLock(driver="580.95.05")).packaging.split()[0].strip(
                ","
            ) == packaging.split()[0].strip(",")
            assert keyring.strip("`") == ("cuda-keyring_1.1-1_all.deb" if found.keyring_sha256
                                          else found.key)  # fmt: skip
