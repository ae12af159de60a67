"""Define the simulated NVIDIA driver for Debian 12: packages, dependencies, units.

Each version has all packages, except the proprietary module, which ends with the branch that
removed it. The library is the lab's simulated NVML with the driver's file name. The lab's dkms
(lab/driver/dkms.py) builds the sources of the modules. The daemons start and fail under the same
conditions as the real daemons.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

from lab.vendor.deb import File, Package
from lab.vendor.templates import RELOAD, UNITS, data, program, stop

VERSIONS = ("580.95.05", "580.178.04", "595.91.07", "615.71.09")
# From this branch on there is no proprietary module: release notes of 615.71.09.
OPEN_ONLY = 615
NVLSM = ("2025.06.11-1", "2026.02.17-1")

# Packages with the driver's version, which a pin to a driver version must list.
PARTS = (
    "libcuda1",
    "libnvidia-ml1",
    "libnvidia-nscq",
    "libnvsdm",
    "nvidia-driver-cuda",
    "nvidia-fabricmanager",
    "nvidia-imex",
    "nvidia-kernel-dkms",
    "nvidia-kernel-open-dkms",
    "nvidia-modprobe",
    "nvidia-open",
    "nvidia-persistenced",
    "nvidia-smi",
)

_LIBRARIES = f"/usr/lib/{platform.machine()}-linux-gnu"
_MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
_LICENCES = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}


def packages(library: bytes) -> Iterator[Package]:
    """Yield every package of every version; `library` is the simulated NVML."""
    for version in VERSIONS:
        yield _ml(version, library)
        yield from modules(version)
        yield from _tools(version)
        yield from _daemons(version)
        yield from _meta(version)
    for own in NVLSM:
        manager = program("nvlsm", VERSION=own)
        yield Package("nvlsm", own, files={"/opt/nvidia/nvlsm/sbin/nvlsm": manager})


def _ml(version: str, library: bytes) -> Package:
    """
    Return the library's package, whose link replaces ldconfig's, so that it exists in one step.
    """
    path = f"{_LIBRARIES}/libnvidia-ml.so"
    link = f"ln -sfn libnvidia-ml.so.{version} {path}.1\n"
    gone = f'if [ "$1" = remove ]; then rm -f {path}.1; fi\n'
    return Package(
        "libnvidia-ml1",
        f"{version}-1",
        files={f"{path}.{version}": File(library)},
        scripts={"postinst": link, "postrm": gone},
    )


def modules(version: str, *, broken: bool = False) -> Iterator[Package]:
    """
    Yield the modules' sources: open and, if the version has them, proprietary.

    With `broken`, the sources cannot be compiled.
    """
    kinds = {"open": "nvidia-kernel-open-dkms", "proprietary": "nvidia-kernel-dkms"}
    if int(version.partition(".")[0]) >= OPEN_ONLY:
        del kinds["proprietary"]
    rows = [f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n']
    for number, name in enumerate(_MODULES):
        rows.append(f'BUILT_MODULE_NAME[{number}]="{name}"\n')
        rows.append(f'DEST_MODULE_LOCATION[{number}]="/updates/dkms"\n')
    source = f"/usr/src/nvidia-{version}"
    for kind, name in kinds.items():
        others = ", ".join(sorted(set(kinds.values()) - {name}))
        yield Package(
            name,
            f"{version}-1",
            fields={
                "Depends": "dkms",
                "Provides": f"nvidia-kernel-{version}",
                **({"Conflicts": others, "Replaces": others} if others else {}),
            },
            files={
                f"{source}/dkms.conf": File("".join(rows)),
                f"{source}/LICENCE": File(f"{_LICENCES[kind]}\n"),
                **({f"{source}/broken": File("")} if broken else {}),
            },
            scripts={
                "postinst": 'if [ "$1" = configure ]; then\n'
                f"    /usr/lib/dkms/common.postinst nvidia {version}\nfi\n",
                "prerm": f"dkms remove -m nvidia -v {version} --all || true\n",
            },
        )


def _tools(version: str) -> Iterator[Package]:
    """Yield the programs for users and for other packages."""
    needs = {"Depends": f"python3, libnvidia-ml1 (= {version}-1)"}
    smi = {"/usr/bin/nvidia-smi": program("nvidia_smi.py", VERSION=version)}
    yield Package("nvidia-smi", f"{version}-1", fields=needs, files=smi)
    modprobe = {"/usr/bin/nvidia-modprobe": program("nvidia-modprobe")}
    yield Package("nvidia-modprobe", f"{version}-1", files=modprobe)
    yield Package("libcuda1", f"{version}-1")
    yield Package("libnvidia-nscq", f"{version}-1")
    yield Package("libnvsdm", f"{version}-1")


def _daemons(version: str) -> Iterator[Package]:
    """
    Yield the driver's daemons, of which only the persistence daemon's package enables its unit.
    """
    for name, file, fields, at_once in (
        ("nvidia-persistenced", "nvidia-persistenced", {"Depends": "nvidia-modprobe"}, True),
        ("nvidia-fabricmanager", "nv-fabricmanager", {}, False),
        ("nvidia-imex", "nvidia-imex", {}, False),
    ):
        files = {
            f"/usr/bin/{file}": program("nvidia_daemon.py", VERSION=version),
            f"{UNITS}/{name}.service": data(f"{name}.service"),
        }
        if name == "nvidia-fabricmanager":
            settings = File("FABRIC_MODE=0\n", conffile=True)
            files["/usr/share/nvidia/nvswitch/fabricmanager.cfg"] = settings
        if name == "nvidia-imex":
            files["/etc/nvidia-imex/nodes_config.cfg"] = File("", conffile=True)
        start = (
            'if [ "$1" = configure ] && [ -z "$2" ] && [ -d /run/systemd/system ]; then\n'
            f"    systemctl enable --quiet --now {name}.service || true\nfi\n"
        )
        yield Package(
            name,
            f"{version}-1",
            fields={**fields, "Depends": ", ".join(["python3", *fields.values()])},
            files=files,
            scripts={
                "postinst": RELOAD + (start if at_once else ""),
                "prerm": stop(name),
                "postrm": RELOAD,
            },
        )


def _meta(version: str) -> Iterator[Package]:
    """Yield the metapackages, which depend on the other packages in exactly their version."""
    own = f"(= {version}-1)"
    parts = ("libcuda1", "libnvidia-ml1", "nvidia-modprobe", "nvidia-persistenced", "nvidia-smi")
    kernel = f"nvidia-kernel-open-dkms {own} | nvidia-kernel-{version}"
    yield Package(
        "nvidia-driver-cuda",
        f"{version}-1",
        fields={"Depends": ", ".join([*(f"{part} {own}" for part in parts), kernel])},
    )
    needs = f"nvidia-driver-cuda {own}, nvidia-kernel-open-dkms {own}"
    yield Package("nvidia-open", f"{version}-1", fields={"Depends": needs})
