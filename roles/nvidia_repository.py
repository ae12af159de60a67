"""Install the key of NVIDIA's repository, for gpufleet's own package runs only."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.converge.desired import Absent, DesiredState, Directory, NoOtherFiles, Package
from gpufleet.gpu_software.repository import KEYS, key_path, stored_key_path
from gpufleet.operations.converge import Converge
from gpufleet.operations.trust_repository_key import KEY_SECONDS, trust_repository_key
from gpufleet.settings.cuda_settings import Repository

# Files that the node's own apt and dnf read: those of earlier releases of gpufleet, and the source
# and the pin of the vendor's keyring package. apt refuses two keys for one address.
FORMER = (
    "/etc/apt/sources.list.d/gpufleet-cuda.sources",
    "/etc/apt/preferences.d/00-gpufleet-cuda.pref",
    "/etc/apt/preferences.d/cuda-repository-pin-600",
    f"{node_paths.STATE}/cuda-keyring.deb",
)

PACKAGED = ("/etc/apt/sources.list.d/cuda-*.list", "/etc/yum.repos.d/cuda-*.repo")


@deploy("NVIDIA's repository")
def nvidia_repository(repository: Repository) -> None:
    """
    Converge the repository's key, for the roles that declare its `PackageSource`.

    The vendor's keyring package is not installed, because it would add the vendor's repository to
    the node's own apt, with a pin above the distribution's packages.
    """
    former = Converge(DesiredState(*map(Absent, FORMER), *map(NoOtherFiles, PACKAGED)))
    former.files(name="remove the vendor's files from the node's own package manager")
    tools = Converge(DesiredState(Package("ca-certificates")))
    tools.packages(name="certificates of certificate authorities")
    folders = Converge(
        DesiredState(
            Directory(node_paths.CONFIGURATION),
            Directory(KEYS),
            Directory(node_paths.KEPT_KEYS),
        ),
        watch=(key_path(repository), stored_key_path(repository)),
    )
    folders.files(name="folder of keys")
    trust_repository_key(folders, repository, name="key", _timeout=KEY_SECONDS)
