"""Choose NVIDIA's repository for a system, and verify it by its key. Pure.

The module has a table, because the names follow no rule. The repository of each distribution has
its own key, and the key's file name is irregular. Unknown values are None. Callers report that a
value is unknown and do not guess it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufleet import node_paths
from gpufleet.converge.desired import PackageSource
from gpufleet.errors import FleetError
from gpufleet.node.machine import Architecture, System

if TYPE_CHECKING:  # settings know locks, which know systems
    from gpufleet.settings.cuda_settings import Repository

VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos"

# Directory on nodes for keys of vendors that the node's own apt or dnf does not use.
KEYS = node_paths.KEYS

# Packages that may come from the vendor's repository: the driver, CUDA, DCGM and dependencies of
# these. Other packages in it are not used. It has also had dkms and Mellanox' tools.
VENDOR_PACKAGES = (
    "cuda-*",
    "libcu*",
    "libnccl*",
    "libnpp*",
    "libnv*",
    "gds-tools-*",
    "nsight-*",
    "nvidia-*",
    "firmware-nvidia-*",
    "kmod-nvidia-*",
    "nvlsm",
    "datacenter-gpu-manager*",
)


@dataclass(frozen=True)
class VendorRepository:
    """
    NVIDIA's repository for one system.

    Attributes:
        folder: the repository's folder below VENDOR; it has a folder for each processor.
        key: the file name of the repository's public key; None if unknown.
        fingerprint: the fingerprint of this key, 40 hexadecimal digits; None if unknown.
        keyring_sha256: the SHA-256 of the repository's cuda-keyring_1.1-1_all.deb; None if there is
            no such file or its hash is unknown.
        dcgm: whether the repository has DCGM; None if unknown.
    """

    folder: str
    key: str | None = None
    fingerprint: str | None = None
    keyring_sha256: str | None = None
    dcgm: bool | None = None


_UBUNTU_KEY = ("3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
_RED_HAT_KEY = ("D42D0685.pub", "610C7B14E068A878070DA4E99CD0A493D42D0685")

# Sources:
# - folders and keys: NVIDIA's CUDA installation guide and its repositories
# - hashes of keyring packages: Google's GPU driver installer 1.9.1, which pins them
# - DCGM: NVIDIA's DCGM guide 4.x, and for Debian 13 NVIDIA/cuda-repo-management, issue 41
_PUBLISHED: Mapping[tuple[str, str], VendorRepository] = {
    ("ubuntu", "22.04"): VendorRepository(
        "ubuntu2204",
        *_UBUNTU_KEY,
        "d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df",
        dcgm=True,
    ),
    ("ubuntu", "24.04"): VendorRepository(
        "ubuntu2404",
        *_UBUNTU_KEY,
        "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba",
        dcgm=True,
    ),
    ("ubuntu", "26.04"): VendorRepository(
        "ubuntu2604",
        keyring_sha256="f7f474b5f6a4adf987aa587920df00e713285958ef6a913dda1945a544a3099e",
    ),
    ("debian", "12"): VendorRepository(
        "debian12",
        *_UBUNTU_KEY,
        "e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
        dcgm=True,
    ),
    ("debian", "13"): VendorRepository(
        "debian13",
        "8793F200.pub",
        "02182E60104FCDC26EAE1B8597A5D4CB8793F200",
        "dd28f1f6ba0038180d6b23f846cefca1e3de4c9327751665241370bacea452a1",
        dcgm=False,
    ),
    ("rhel", "9"): VendorRepository("rhel9", *_RED_HAT_KEY, dcgm=True),
    ("rhel", "10"): VendorRepository("rhel10", "CDF6BA43.pub", dcgm=True),
}
# Distributions that are built from RHEL's sources. NVIDIA's repositories for RHEL also serve them.
_AS_RHEL = frozenset({"rocky", "almalinux"})
_ARCHITECTURES: Mapping[Architecture, str] = {"x86_64": "x86_64", "aarch64": "sbsa"}

_FOLDER = re.compile(r"/((?:ubuntu|debian|rhel|sles|amzn|fedora)\d+)/(x86_64|sbsa|aarch64)/?$")


def vendor_repository(system: System) -> VendorRepository:
    """Return NVIDIA's repository for a system. Raises `FleetError` if there is none."""
    family = "rhel" if system.id in _AS_RHEL else system.id
    found = _PUBLISHED.get((family, system.major))
    if found is None:
        raise FleetError(
            f"no NVIDIA repository is known for {system}: "
            "docs/gpu-nodes/supported-systems.md lists the supported systems"
        )
    return found


def repository_path(system: System) -> str:
    """
    Return the path of a system's repository below VENDOR.

    >>> repository_path(System("rocky", "9.6", "aarch64"))
    'rhel9/sbsa'
    """
    return f"{vendor_repository(system).folder}/{_ARCHITECTURES[system.arch]}"


def fingerprint(keyring: str) -> str | None:
    """
    Return the fingerprint of the key that NVIDIA publishes under a file name, or None if unknown.

    >>> fingerprint("8793F200.pub")
    '02182E60104FCDC26EAE1B8597A5D4CB8793F200'
    """
    return next((each.fingerprint for each in _PUBLISHED.values() if each.key == keyring), None)


def package_source(repository: Repository) -> PackageSource:
    """
    Return a repository (the vendor's or a mirror) as a source for gpufleet's transactions.
    """
    return PackageSource("nvidia-cuda", repository.url, key_path(repository), VENDOR_PACKAGES)


def key_path(repository: Repository) -> str:
    """
    Return the path of the key on a node.

    apt distinguishes armoured keys (.asc) from binary keys by the name.
    """
    binary = repository.keyring.endswith((".deb", ".gpg"))
    return f"{KEYS}/nvidia-cuda.{'gpg' if binary else 'asc'}"


def stored_key_path(repository: Repository) -> str:
    """Return the path on a node of the downloaded file from which the key was extracted."""
    return f"{node_paths.KEPT_KEYS}/nvidia-cuda{repository.keyring[-4:]}"


def address_mistake(url: str, system: System) -> str | None:
    """
    Return the mistake if an address is clearly the repository of a different system, or None.

    A mirror may have any folder names, so only NVIDIA's own folder names are judged.
    """
    found = _FOLDER.search(url)
    if found is None or f"{found[1]}/{found[2]}" == repository_path(system):
        return None
    return (
        f"cuda.repository.url ends in {found[1]}/{found[2]}, but the node runs {system}, whose "
        f"repository is {repository_path(system)}: correct the URL, or put the node into a "
        "separate group"
    )
