"""Define NVIDIA's container toolkit: its packages, and the links that keep containers' GPUs. Pure.

A container engine with systemd cgroups grants a container's devices without systemd's knowledge,
unless they have links in /dev/char. When systemd reloads its units (`systemctl daemon-reload`, part
of any deploy) it restores its own device list: containers without those links lose their GPUs, and
NVML says "Unknown Error" in them.
"""

from __future__ import annotations

from collections.abc import Collection

from gpufleet import node_paths
from gpufleet.converge.desired import DesiredState, File, Lockstep, Package, PackageSource
from gpufleet.converge.snapshot import Snapshot, UnitState
from gpufleet.settings.gpu_settings import ContainerToolkit

SOURCE = "nvidia-container-toolkit"
KEYS = node_paths.KEYS
RULE = "/etc/udev/rules.d/71-gpufleet-nvidia-dev-char.rules"
# All four must have one version; apt does not change packages that are not named.
PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
ENGINES = ("docker.service", "containerd.service", "podman.service")
LINKS = "/dev/char"
# The major number of NVIDIA's devices (Documentation/admin-guide/devices.txt, 195 char).
MAJOR = "195:"
LINK = "nvidia-ctk system create-dev-char-symlinks --create-all >/dev/null"
_RULE = """\
# Written by gpufleet; the next deploy overwrites what is changed here.
ACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia", \
RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks --create-all"
"""


def desired_toolkit(setting: ContainerToolkit, key: bytes) -> DesiredState:
    """Return the held packages and the repository that the public key `key` signs."""
    armoured = key.lstrip().startswith(b"-----BEGIN PGP PUBLIC KEY BLOCK-----")
    # apt distinguishes the two forms of a key by the file's name (sources.list(5), Signed-By).
    path = f"{KEYS}/{SOURCE}.{'asc' if armoured else 'gpg'}"
    return DesiredState(
        File(path, key),
        File(RULE, _RULE.encode()),
        PackageSource(
            SOURCE, setting.repository, path, ("nvidia-container-toolkit*", "libnvidia-container*")
        ),
        *(Package(name, setting.version, hold=True) for name in PACKAGES),
        Lockstep(PACKAGES),
    )


def has_device_links(names: Collection[str]) -> bool:
    """Return whether /dev/char has NVIDIA's devices."""
    return any(name.startswith(MAJOR) for name in names)


def running_engines(seen: Snapshot) -> tuple[str, ...]:
    """Return the container engines that run on a node."""
    states = {name: seen.unit(name) for name in ENGINES}
    return tuple(
        name
        for name, state in states.items()
        if isinstance(state, UnitState) and state.active == "active"
    )


def engine_warning(engine: str) -> str:
    """Return the warning about a running engine's containers."""
    return (
        f"{engine} runs. Containers with GPUs that started before the links in {LINKS} existed "
        "lose their GPUs when systemd reloads its units: restart these containers after this run"
    )
