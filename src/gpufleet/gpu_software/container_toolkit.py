"""Define NVIDIA's container toolkit: its packages, and the links that keep containers' GPUs. Pure.

A container engine with systemd cgroups gives devices to a container. systemd does not know these
devices unless they have links in /dev/char. Each deploy makes systemd reload its units
(`systemctl daemon-reload`), and then systemd restores its own list of devices. So containers whose
devices have no links lose their GPUs, and NVML reports "Unknown Error" in them.
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
# All four packages must have the same version, and apt does not change packages that are not in its
# command.
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
    """
    Return the packages, which are held, and their repository, which is signed by `key`.
    """
    armoured = key.lstrip().startswith(b"-----BEGIN PGP PUBLIC KEY BLOCK-----")
    # apt distinguishes armoured and binary keys by the file's name (sources.list(5), Signed-By).
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
