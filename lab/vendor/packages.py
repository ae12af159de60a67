"""Define the packages of the simulated vendor repository, with NVIDIA's names and versions.

Contract: all properties that can make a role fail are as in the vendor's repository. Examples are a
newer toolkit and driver than the requested ones, exact dependencies between DCGM's packages, units
that need a drop-in, and a pin above the distribution's packages. Programs that would need a GPU are
replaced by small programs from `on_node/`. The versions are real versions of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.vendor import driver
from lab.vendor.deb import File, Package
from lab.vendor.templates import RELOAD, UNITS, data, program, stop

KEYRING = "cuda-keyring_1.1-1_all.deb"
VENDOR_URL = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"
DRIVER_PINS = ("580", "595", "580.95.05")
DCGM = ("1:4.5.3-1", "1:4.6.0-1")
EXPORTER = "4.8.2-1"
ENGINE = "/usr/bin/nv-hostengine"
FIELDS = "/usr/share/gpufleet-lab/dcgm-fields.txt"


def packages(key: bytes, library: bytes) -> Iterator[Package]:
    """Yield every package; `key` is the repository's public key, `library` the simulated NVML."""
    yield keyring(key)
    yield from _toolkit("13-0", ("13.0.2-1", "13.0.3-1"), compiler="13.0.88")
    yield from _toolkit("13-4", ("13.4.2-1",), compiler="13.4.92")
    newest = {"Depends": "cuda-toolkit-13-4 (>= 13.4.2)"}
    # the package name without a branch follows the newest branch
    yield Package("cuda-toolkit", "13.4.2-1", fields=newest)
    yield from driver.packages(library)
    for branch in DRIVER_PINS:
        yield _driver_pin(branch)
    for version in DCGM:
        yield from _dcgm(version)
    yield _exporter()


def keyring(key: bytes) -> Package:
    """Return the package with the repository's key, source and pin, like NVIDIA's."""
    signed_by = "/usr/share/keyrings/cuda-archive-keyring.gpg"
    # As in NVIDIA's package, the source is the vendor's own address, which lab nodes cannot reach.
    # So every package from the mirror was installed through gpufleet's source.
    source = f"deb [signed-by={signed_by}] {VENDOR_URL} /\n"
    pin = "".join(
        f"Package: {package}\nPin: {pin}\nPin-Priority: {priority}\n\n"
        for package, pin, priority in (
            ("nsight-compute", "origin *ubuntu.com*", -1),
            ("nsight-systems", "origin *ubuntu.com*", -1),
            ("*", "release l=NVIDIA CUDA", 600),
        )
    )
    files = {
        signed_by: File(key),
        "/etc/apt/sources.list.d/cuda-lab.list": File(source, conffile=True),
        "/etc/apt/preferences.d/cuda-repository-pin-600": File(pin, conffile=True),
    }
    return Package("cuda-keyring", "1.1-1", "all", files=files)


def _toolkit(branch: str, versions: tuple[str, ...], compiler: str) -> Iterator[Package]:
    """Yield a branch of the toolkit: the metapackage in `versions`, and its dependencies."""
    dotted = branch.replace("-", ".")
    home = f"/usr/local/cuda-{dotted}"
    common = f"cuda-toolkit-{branch}-config-common"
    link = f"update-alternatives --install /usr/local/cuda cuda {home} {branch.replace('-', '')}\n"
    unlink = f'if [ "$1" = remove ]; then update-alternatives --remove cuda {home}; fi\n'
    yield Package(common, f"{compiler}-1", "all", scripts={"postinst": link, "prerm": unlink})

    parts = [
        *(f"cuda-{part}-{branch}" for part in ("crt", "cudart", "cudart-dev", "cccl")),
        *(f"lib{part}-{branch}" for part in ("nvvm", "cublas", "cublas-dev", "curand-dev")),
    ]
    for part in parts:
        yield Package(part, f"{compiler}-1", fields={"Depends": common})
    nvcc = program("nvcc", BRANCH=dotted, COMPILER=compiler)
    needed = f"{common}, cuda-crt-{branch}, libnvvm-{branch}"
    yield Package(
        f"cuda-nvcc-{branch}",
        f"{compiler}-1",
        fields={"Depends": needed},
        files={f"{home}/bin/nvcc": nvcc},
    )
    depends = ", ".join([f"cuda-nvcc-{branch}", *parts])
    for version in versions:
        yield Package(f"cuda-toolkit-{branch}", version, fields={"Depends": depends})


def _driver_pin(branch: str) -> Package:
    """Return a package whose only content is an apt pin to a branch ("580") or a version."""
    exact = "." in branch
    pin = (
        f"Package: {' '.join(driver.PARTS)}\n"
        f"Pin: version {branch}{'-*' if exact else '.*'}\n"
        "Pin-Priority: 1000\n"
    )
    # apt ignores files in preferences.d with an extension, and ".05" would be one
    path = f"/etc/apt/preferences.d/nvidia-driver-pinning-{branch.replace('.', '-')}"
    alone = "nvidia-driver-pinning"
    fields = {"Provides": alone, "Conflicts": alone, "Replaces": alone}
    return Package(
        f"nvidia-driver-pinning-{branch}", "1.0-1", "all", fields=fields, files={path: File(pin)}
    )


def _dcgm(version: str) -> Iterator[Package]:
    core = "datacenter-gpu-manager-4-core"
    account = (
        "getent passwd nvidia-dcgm > /dev/null || useradd --system --no-create-home"
        " --home-dir /nonexistent --shell /usr/sbin/nologin nvidia-dcgm\n"
        "install -d -o nvidia-dcgm -g nvidia-dcgm /var/log/nvidia-dcgm\n"
    )
    plain = version.partition(":")[2].partition("-")[0]
    yield Package(
        core,
        version,
        fields={
            "Depends": "python3, passwd",
            "Conflicts": "datacenter-gpu-manager",
            "Replaces": "datacenter-gpu-manager",
        },
        files={
            ENGINE: program("nv_hostengine.py", VERSION=plain),
            "/usr/bin/dcgmi": program("dcgmi.py", VERSION=plain),
            f"{UNITS}/nvidia-dcgm.service": data("nvidia-dcgm.service"),
        },
        scripts={"postinst": account + RELOAD, "prerm": stop("nvidia-dcgm"), "postrm": RELOAD},
    )
    for cuda in ("cuda12", "cuda13"):
        exact = {"Depends": f"{core} (= {version})"}
        yield Package(f"datacenter-gpu-manager-4-{cuda}", version, fields=exact)


def _exporter() -> Package:
    counters = data("default-counters.csv", conffile=True)
    return Package(
        "datacenter-gpu-manager-exporter",
        EXPORTER,
        fields={"Depends": "datacenter-gpu-manager-4-core, python3"},
        files={
            "/usr/bin/dcgm-exporter": program(
                "dcgm_exporter.py", VERSION=EXPORTER, ENGINE=ENGINE, FIELDS=FIELDS
            ),
            FIELDS: data("dcgm-fields.txt"),
            "/etc/dcgm-exporter/default-counters.csv": counters,
            f"{UNITS}/nvidia-dcgm-exporter.service": data("nvidia-dcgm-exporter.service"),
        },
        scripts={"postinst": RELOAD, "prerm": stop("nvidia-dcgm-exporter"), "postrm": RELOAD},
    )
