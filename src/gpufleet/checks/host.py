"""
Check the machine around the GPUs: its boot settings, PCIe and network, clock, disk space and
memory. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations

from gpufleet.artifacts.model_files import MODELS
from gpufleet.artifacts.release import CACHE, RELEASES, engine_version
from gpufleet.checks import rdma_ports
from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, Reading, Unread
from gpufleet.formatting import join_names

GIB = 1024  # in MiB, which is the unit of all sizes in this file

# The disk space for one release, and for two releases (a new one beside the one that serves).
# vLLM's CUDA build has about 5 GB of wheels (release.py). They unpack to about 10 GB, and need
# some more space while they are unpacked. vLLM's CPU build has 3.5 GB (measured with 0.32.0).
RELEASE = {"cuda": (12 * GIB, 30 * GIB), "cpu": (5 * GIB, 10 * GIB)}
# With less free space, few models fit: 8 billion parameters in 16 bits take about 15 GB.
MODELS_ROOM = 30 * GIB

# The ranks of a replica exchange their work through one ring buffer in shared memory: 10 chunks of
# 16 MiB (vLLM 0.32, VLLM_MQ_MAX_CHUNK_BYTES_MB in envs.py, MessageQueue). vLLM does not start if
# less is free.
SHM_RING = 160
# NCCL's user guide recommends --shm-size=1g for a container with one replica.
SHM_EACH_GPU = 1 * GIB

# The processes of one replica take 1.4 GiB without a model (measured with vLLM's CPU build, 0.32).
# The CUDA context and the pinned buffers of each rank are added to that.
MEMORY_BASE = 4 * GIB
MEMORY_EACH_GPU = 2 * GIB

# Values of nvmlGpuP2PStatus_t in nvml.h. The other values (2, 5) mean that the GPU itself does not
# support P2P, as on GeForce.
P2P_OK = 0
P2P_OFF = 4
P2P_BETWEEN = {1: "the chipset", 3: "the path between their host bridges"}

# The kernel's messages when it rejects a module (kernel/module/signing.c, security/lockdown).
_REFUSED = re.compile(
    r"Loading of (unsigned )?module.*(rejected|restricted)|Lockdown: .*unsigned module"
    r"|PKCS#7 signature not signed with a trusted key"
)


def _driver_is_loaded(node: Reading) -> bool:
    return "nvidia" in node.get("system", "modules")


def secure_boot(node: Reading) -> Iterator[Problem]:
    """
    Check that Secure Boot does not reject the driver's module.

    If the module is loaded, Secure Boot accepted it. The check reboot-signature checks the next
    boot.
    """
    if not node.get("system", "secure_boot", absent=False) or _driver_is_loaded(node):
        return
    version = node.get("driver", "disk", "version", absent=None)
    if version is None:
        raise DoesNotApply("no NVIDIA module is on the disk: see driver-loaded")
    signer = node.get("driver", "disk", "signer", absent=None)
    lines = node.known("kernel_log", "lines", default=[])
    refusals = [text for _, text in lines if _REFUSED.search(text)]
    if signer is not None and not refusals:
        return
    why = "is not signed"
    if signer is not None:
        why = f"is signed by {signer}, whose key is apparently not enrolled in the firmware"
    said = f": {refusals[-1]}" if refusals else ""
    yield Problem(
        Severity.BLOCK,
        f"Secure Boot is on, module {version} {why} and is not loaded{said}",
        "a module signed with a key that is enrolled in the firmware",
        "the kernel's lockdown under Secure Boot",
        (
            Step(
                Action.CONFIGURE,
                "enrol the key that signs DKMS modules: mokutil --import MOK.der (the key is in "
                "/var/lib/shim-signed/mok on Ubuntu, in /var/lib/dkms on Debian and Red Hat), "
                "then reboot and confirm at the console",
            ),
            Step(
                Action.CONFIGURE,
                "or install the distribution's signed modules: linux-modules-nvidia-*-server-open-"
                "generic",
            ),
            Step(Action.CONFIGURE, "or turn off Secure Boot in the firmware"),
        ),
    )


def nouveau(node: Reading) -> Iterator[Problem]:
    """
    Check that nouveau is not loaded. It is the kernel's own driver for NVIDIA GPUs, and would
    occupy them.
    """
    if "nouveau" not in node.get("system", "modules"):
        return
    beside = _driver_is_loaded(node)
    yield Problem(
        Severity.WARN if beside else Severity.BLOCK,
        "nouveau is loaded"
        + (", beside NVIDIA's driver" if beside else " instead of NVIDIA's driver"),
        "nouveau not loaded, and on modprobe's blacklist",
        "NVIDIA's driver installation guide",
        (
            Step(
                Action.CONFIGURE,
                "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > "
                "/etc/modprobe.d/nouveau.conf; update-initramfs -u -k all (or dracut --force)",
            ),
            Step(Action.REBOOT, "systemctl reboot; then lsmod | grep nouveau prints nothing"),
        ),
    )


# --- paths between the GPUs


def iommu_acs(node: Reading) -> Iterator[Problem]:
    """
    Check that PCIe traffic between GPUs is neither redirected nor blocked.

    According to NCCL's user guide, P2P is slow or hangs if ACS redirects it to the root complex, or
    if an IOMMU translates its addresses. If NVLink connects every pair of GPUs, or if the GPUs have
    no P2P over PCIe (GeForce), only network cards are affected.
    """
    if _gpu_count(node) < 2:
        raise DoesNotApply("there is no second GPU")
    over_pcie = _pairs_over_pcie(node)
    if over_pcie or not node.gpus:
        yield from _acs(node, Severity.WARN, "GPUs that communicate over PCIe")
    elif node.known("system", "acs"):
        yield from _acs(node, Severity.INFO, "network cards that write into GPU memory")
    yield from _refused(over_pcie)
    types = node.known("system", "iommu", "types", default={})
    if over_pcie and (translated := sum(n for name, n in types.items() if name.startswith("DMA"))):
        yield Problem(
            Severity.INFO,
            f"the IOMMU translates addresses for {translated} groups of devices",
            "no translation (passthrough mode): iommu=pt on the kernel's command line",
            "NCCL's user guide",
        )


def _acs(node: Reading, severity: Severity, whom: str) -> Iterator[Problem]:
    bridges = node.get("system", "acs", absent=[])
    redirecting = [bridge["bus_id"] for bridge in bridges if bridge["redirect"] is True]
    if redirecting:
        yield Problem(
            severity,
            f"{len(redirecting)} of {len(bridges)} PCI bridges above GPUs redirect P2P traffic "
            f"(ACS): {join_names(redirecting)}",
            f"no redirection, because it slows down or hangs {whom}",
            "NCCL's user guide, on PCI access control services",
            (
                Step(
                    Action.CONFIGURE,
                    "to disable it until the next boot, for each bridge: setpci -s BRIDGE "
                    "ECAP_ACS+0x6.w=0000",
                ),
                Step(
                    Action.CONFIGURE,
                    "to disable it permanently: turn off ACS or the IOMMU (VT-d, AMD-Vi) in the "
                    "firmware, then reboot; do not do this if the machine passes GPUs through to "
                    "virtual machines, because they need ACS",
                ),
                Step(
                    Action.LOOK,
                    "until then, set NCCL_P2P_DISABLE=1 in vllm.environment, so "
                    "that NCCL does not use P2P",
                ),
            ),
        )
    if severity >= Severity.WARN:
        for at, _ in enumerate(bridges):
            node.get("system", "acs", at, "redirect")  # raises if a bridge could not be read


def _pairs_over_pcie(node: Reading) -> dict[tuple[int, int], int]:
    """
    Return each pair of GPUs that may communicate over PCIe because no NVLink connects it.

    The keys are pairs of NVML's indices. The value is the driver's P2P status for reading and
    writing: 0, or an error.
    """
    found: dict[tuple[int, int], int] = {}
    for one, other in permutations(node.gpus, 2):
        place = (one.at, other.at)
        if node.known("p2p", "nvlink", *place, default=P2P_OK) == P2P_OK:
            continue
        status = max(node.known("p2p", way, *place, default=0) for way in ("read", "write"))
        if status in {P2P_OK, P2P_OFF, *P2P_BETWEEN}:
            pair = (min(one.index, other.index), max(one.index, other.index))
            found[pair] = max(status, found.get(pair, 0))
    return found


def _refused(pairs: dict[tuple[int, int], int]) -> Iterator[Problem]:
    by_status = defaultdict(list)
    for (one, other), status in sorted(pairs.items()):
        by_status[status].append(f"{one}-{other}")
    if off := by_status.get(P2P_OFF):
        yield Problem(
            Severity.WARN,
            "an option of the driver's module disables P2P between GPUs: " + join_names(off),
            "P2P over PCIe, or NCCL_P2P_DISABLE=1 set on purpose",
            "the driver",
            (
                Step(
                    Action.CONFIGURE,
                    "grep -r NVreg /etc/modprobe.d; /proc/driver/nvidia/params shows the options "
                    "that are set",
                ),
            ),
        )
    for status, what in P2P_BETWEEN.items():
        if refused := by_status.get(status):
            yield Problem(
                Severity.INFO,
                f"{what} does not support P2P between GPUs {join_names(refused)}: their traffic "
                "goes through host memory",
                "P2P over PCIe",
                "the driver",
            )


def _gpu_count(node: Reading) -> int:
    """Return the number of GPUs, even if the driver does not answer."""
    on_bus = [at for at in node.known("pci", default=[]) if str(at["class"]).startswith("0x03")]
    return max(len(node.document["gpus"]), len(on_bus))


# --- space


def disk_space(node: Reading) -> Iterator[Problem]:
    """
    Check that the disk has space for two releases and for the models that will be downloaded.

    A problem is `block` if a deploy would fail halfway. Servers that already run are not affected.
    If the release of the declared version is complete, no release will be built, so a problem is
    only a warning.
    """
    whole = node.get("system", "releases", absent=[])
    to_build = any(
        not any(engine_version(name) == (each.engine, each.version) for name in whole)
        for each in node.settings.used_engines
    )
    device = node.settings.servers.device if node.settings.servers else "cuda"
    least, wanted = RELEASE[device]
    key = _nearest(node, RELEASES)
    free = node.get("system", "disks", key, "free_mib")
    releases = node.get("system", "disks", key, "mount")
    if free < wanted:
        yield _full(
            RELEASES,
            releases,
            free,
            Severity.BLOCK if free < least and to_build else Severity.WARN,
            f"{least // GIB} GiB for one release, {wanted // GIB} GiB for two",
        )
    mounts = {releases}
    downloads = any(model.hub_sources for model in node.settings.serving.values())
    serves = node.settings.servers is not None
    for path, used, room in ((CACHE, serves, least), (MODELS, downloads, MODELS_ROOM)):
        key = _nearest(node, path)
        mount = node.get("system", "disks", key, "mount")
        if not used or mount in mounts:
            continue
        mounts.add(mount)
        if (free := node.get("system", "disks", key, "free_mib")) < room:
            yield _full(path, mount, free, Severity.WARN, f"{room // GIB} GiB")


def _nearest(node: Reading, path: str) -> str:
    """
    Return the longest path with a measured free space that contains `path`. Raises `Unread` if
    there is no such path.
    """
    asked = node.get("system", "disks")
    above = [one for one in asked if f"{path}/".startswith(f"{one.rstrip('/')}/")]
    if not above:
        raise Unread(f"the probe did not measure the free space at {path}")
    return str(max(above, key=len))


def _full(path: str, mount: str, free: int, severity: Severity, expected: str) -> Problem:
    return Problem(
        severity,
        f"{free / GIB:.1f} GiB are free on {mount}, where {path} is",
        expected,
        "the unpacked size of vLLM's wheels"
        if path != MODELS
        else "the size of a small model's files",
        (
            Step(Action.LOOK, f"du -xh --max-depth=2 {mount} | sort -h | tail -20"),
            Step(
                Action.CONFIGURE,
                f"remove releases that no unit uses (systemctl cat 'vllm-*' | grep {RELEASES}), "
                f"uv's cache ({CACHE}), models that are not served ({MODELS})",
            ),
            Step(Action.CONFIGURE, "or mount a larger disk at this path"),
        ),
    )


def clock(node: Reading) -> Iterator[Problem]:
    """Check that the kernel's clock is synchronised (the flag STA_UNSYNC of adjtimex is off)."""
    if not node.get("system", "clock", "synchronized"):
        yield Problem(
            Severity.WARN,
            "the clock is not synchronised",
            "a clock synchronised by NTP or PTP",
            "adjtimex(2)",
            (
                Step(Action.LOOK, "timedatectl; systemctl status systemd-timesyncd chrony"),
                Step(
                    Action.CONFIGURE,
                    "timedatectl set-ntp true; if your network has its own time server, set this "
                    "server in /etc/systemd/timesyncd.conf",
                ),
            ),
        )


def shared_memory(node: Reading) -> Iterator[Problem]:
    """
    Check that the shared memory is large enough for vLLM's ranks and NCCL, which communicate
    through it.
    """
    size = node.get("system", "shm", "size_mib")
    free = node.get("system", "shm", "free_mib")
    gpus = max(_gpu_count(node), 1)
    models = node.settings.serving.values()
    alone = gpus == 1 or (models and all(model.tensor_parallel == 1 for model in models))
    if free > SHM_RING and size >= gpus * SHM_EACH_GPU:
        return
    yield Problem(
        Severity.BLOCK if free <= SHM_RING and not alone else Severity.WARN,
        f"{free} of {size} MiB of shared memory (/dev/shm) are free",
        f"{gpus} GiB (1 GiB per GPU); a replica on several GPUs needs at least {SHM_RING} MiB to "
        f"start",
        "vLLM's message queue, and NCCL's user guide",
        (
            Step(
                Action.LOOK,
                "df -h /dev/shm; ls -la /dev/shm: remove files that ended processes left there",
            ),
            Step(Action.CONFIGURE, "mount -o remount,size=50% /dev/shm; and in /etc/fstab"),
        ),
    )


def host_memory(node: Reading) -> Iterator[Problem]:
    """
    Check that there is enough memory for vLLM's processes. Memory that the page cache uses counts
    as available.
    """
    available = node.get("system", "memory_available_mib")
    needed = MEMORY_BASE + MEMORY_EACH_GPU * _gpu_count(node)
    if available >= needed:
        return
    pages = node.known("system", "hugepages", default={"free": 0, "size_kib": 0})
    aside = pages["free"] * pages["size_kib"] // 1024
    remark = f"; {aside / GIB:.1f} GiB are reserved as huge pages" if aside >= GIB else ""
    yield Problem(
        Severity.WARN,
        f"{available / GIB:.1f} GiB of memory are available{remark}",
        f"{needed // GIB} GiB: {MEMORY_BASE // GIB} GiB, plus {MEMORY_EACH_GPU // GIB} GiB per GPU",
        "the memory that vLLM's processes need",
        (
            Step(Action.LOOK, "ps -eo rss,unit,args --sort=-rss | head; free -g; ls -la /dev/shm"),
            Step(
                Action.CONFIGURE,
                "stop programs that should not run on this node; release huge "
                "pages: sysctl vm.nr_hugepages=0",
            ),
        ),
    )


# From this number of corrected errors per day, on average since boot, the check warns. The number
# is gpufleet's own, because no limit is published.
CORRECTED_A_DAY = 100


def host_ecc(node: Reading) -> Iterator[Problem]:
    """
    Check that the host memory had no uncorrected errors, and only few corrected errors.

    A problem is only a warning, because after an uncorrectable error the kernel ends only the
    program that used the memory.
    """
    if "memory_errors" not in node.document["system"]:
        raise CannotTell("the probe's document is from an older gpufleet, which did not query this")
    counted = node.get("system", "memory_errors", absent=None)
    if counted is None:
        raise DoesNotApply(
            "no memory controller reports errors (EDAC): this is a virtual machine, or its "
            "memory has no ECC"
        )
    days = max(node.known("system", "uptime_seconds", default=0.0) / 86400, 1.0)
    corrected, uncorrected = counted["corrected"], counted["uncorrected"]
    if corrected < 0 or uncorrected < 0:
        raise Unread(f"{corrected} corrected and {uncorrected} uncorrected errors are not counts")
    if not uncorrected and corrected / days < CORRECTED_A_DAY:
        return
    yield Problem(
        Severity.WARN,
        f"the machine's memory had {uncorrected} uncorrected and {corrected} corrected errors in "
        f"{days:.0f} days",
        f"no uncorrected errors, and fewer than {CORRECTED_A_DAY} corrected errors a day",
        "the kernel's memory controllers (EDAC)",
        (
            Step(
                Action.LOOK,
                "`grep . /sys/devices/system/edac/mc/mc*/dimm*/dimm_{label,ce_count,ue_count}` "
                "shows which DIMM had errors",
            ),
            Step(
                Action.SERVICE,
                "in the next maintenance window, have this DIMM reseated; if errors continue, "
                "have it replaced",
            ),
        ),
    )


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "secure-boot": secure_boot,
    "nouveau": nouveau,
    "iommu-acs": iommu_acs,
    "disk-space": disk_space,
    "clock": clock,
    "shared-memory": shared_memory,
    "host-memory": host_memory,
    "host-ecc": host_ecc,
    **rdma_ports.WITHOUT_DRIVER,
}
