"""The driver itself: does it answer, in one version, and new enough for vLLM?  Pure.

What differs between the running driver and the one on the disk is `reboot.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.reading import CannotTell, GpuReading, Reading, Unread, is_missing, reason

# CUDA's majors, and the oldest driver on which the wheels of any of their minors run: "minor
# version compatibility" in NVIDIA's CUDA compatibility guide.
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}

# nvmlBrandType_t, nvml.h: Tesla, and what it was renamed to. CUDA's forward compatibility packages
# run on data-centre boards alone (CUDA compatibility guide); on GeForce CUDA ends with error 804.
DATA_CENTRE_BRANDS = {2, 14}
FORWARD_COMPATIBILITY = "VLLM_ENABLE_CUDA_COMPATIBILITY"  # vLLM reads it; off without it

# The oldest GPUs that vLLM's CUDA wheels have kernels for. CUDA 13 compiles nothing older than
# Turing (its release notes), CUDA 12's wheels begin with Volta (vLLM's installation guide).
OLDEST_CAPABILITY = {12: (7, 0), 13: (7, 5)}
# The first CUDA that compiles for a GPU generation (CUDA's release notes).
FIRST_CUDA = {(10, 0): (12, 8), (10, 3): (12, 9), (11, 0): (13, 0), (12, 0): (12, 8)}

# How kernels say that they refuse a module which nobody signed whom they know.
_REFUSED = re.compile(r"module.*(is rejected|unavailable key|verification failed)|Lockdown", re.I)

_SEE_LOG = Step(Action.LOOK, "`dmesg | grep -E 'NVRM|nvidia' | tail -30` on the node")
_REBOOT = Step(Action.REBOOT, "stop what uses the GPUs (`systemctl stop 'vllm-*'`), then `reboot`")
_RELOAD = Step(
    Action.RESTART_SERVICE,
    "stop all that holds the GPUs (`systemctl stop 'vllm-*' nvidia-dcgm nvidia-persistenced "
    "nvidia-fabricmanager`; `fuser -v /dev/nvidia*` must be empty), then `modprobe -r "
    "nvidia_peermem nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia nvidia_uvm`",
)


def driver_loaded(node: Reading) -> Iterator[Problem]:
    """NVML can be initialised. Whatever keeps it from that keeps CUDA from it too."""
    init = node.document["driver"]["init"]
    if init == "ok":
        return
    severity = Severity.BLOCK
    why = init["missing"]
    if why in {"no_ctypes", "no_permission"}:
        severity = Severity.UNKNOWN  # it may well answer others
    said, remedy = _silence(node, why)
    yield Problem(severity, f"{said} ({reason(init)})", "NVML starts", "the device", remedy)


def _silence(node: Reading, why: str) -> tuple[str, tuple[Step, ...]]:
    """Return what a silent driver's reason means, and the ladder out of it."""
    if why == "driver_not_loaded":
        return _not_loaded(node)
    if why == "version_mismatch":
        return (
            "the driver's libraries and the loaded kernel module are of different versions, so no "
            "program can use a GPU",
            (_RELOAD, _REBOOT),
        )
    if why == "library_not_found":
        loaded = loaded_version(node)
        version = f"version {loaded}, the loaded module's" if loaded else "its module's version"
        return (
            "libnvidia-ml.so.1 is not there, so nothing can ask the driver",
            (
                Step(Action.LOOK, "`ldconfig -p | grep libnvidia-ml` on the node shows none"),
                Step(Action.CONFIGURE, f"install the driver's libraries (libnvidia-ml1, libnvidia-"
                     f"compute or nvidia-driver-cuda, as the distribution has it) in {version}"),
            ),
        )  # fmt: skip
    if why == "no_permission":
        return (
            "the SSH user may not open the GPUs' device files, so what they are is not known",
            (
                Step(Action.LOOK, "`ls -l /dev/nvidia*` on the node; 0666 is the driver's default"),
                Step(Action.CONFIGURE, "let the SSH user's group use them (NVreg_DeviceFileGID), "
                     "or probe as root"),
            ),
        )  # fmt: skip
    if why == "no_ctypes":
        return (
            "its python3 has no ctypes, without which the driver cannot be asked",
            (Step(Action.CONFIGURE, "install the distribution's full python3 (`apt install "
                  "python3`; python3-minimal lacks it)"),),
        )  # fmt: skip
    if why == "timeout":
        return (
            "the driver did not answer in time: whatever asks it hangs, vLLM too",
            (_SEE_LOG, _REBOOT, _power_cycle("processes in state D keep it from going down")),
        )
    if why == "crashed":
        return (
            "the driver's library crashed when asked",
            (
                _SEE_LOG,
                Step(Action.CONFIGURE, "reinstall the driver's libraries: a half-finished upgrade "
                     "looks like this (`dpkg --audit`, `dpkg -V libnvidia-compute*`)"),
                _REBOOT,
            ),
        )  # fmt: skip
    return "NVML does not start", (_SEE_LOG, _RELOAD, _REBOOT)


def _not_loaded(node: Reading) -> tuple[str, tuple[Step, ...]]:
    """Return why NVIDIA's module is not loaded, as far as other facts tell."""
    load = Step(Action.RESTART_SERVICE, "`modprobe nvidia` on the node; on failure it says why")
    gpus = [at for at in node.known("pci", default=[]) if at["class"].startswith("0x03")]
    drivers = {at["driver"] for at in gpus if not is_missing(at["driver"])}
    kernel = node.known("kernel", default="the running kernel")
    if loaded := node.known("driver", "module"):
        return (
            f"the kernel module {loaded} is loaded, and NVML does not reach it",
            (
                Step(Action.CONFIGURE, "make the device files: `nvidia-modprobe -c0 -u`, then "
                     "`ls -l /dev/nvidia*`"),
                _RELOAD,
                _REBOOT,
            ),
        )  # fmt: skip
    if node.known("pci") == []:
        return (
            "the PCI bus has no NVIDIA device, and NVIDIA's kernel module is not loaded",
            (
                Step(Action.LOOK, "is it the right machine? `lspci -d 10de:` shows nothing"),
                _power_cycle("devices that fell off the bus come back only with their power"),
                Step(Action.SERVICE, "have the GPUs' seat and power cables looked at"),
            ),
        )
    if "nouveau" in (set(node.known("system", "modules", default=[])) | drivers):
        return (
            "nouveau has the GPUs, so NVIDIA's kernel module cannot be loaded",
            (
                Step(Action.CONFIGURE, "`printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' "
                     "> /etc/modprobe.d/nouveau-off.conf && update-initramfs -u -k all` "
                     "(`dracut --force` on RHEL)"),
                _REBOOT,
            ),
        )  # fmt: skip
    if drivers and drivers == {"vfio-pci"}:
        return (
            "vfio-pci has every GPU: they are given away to virtual machines",
            (Step(Action.CONFIGURE, "take `vfio-pci.ids=` off the kernel's command line, or this "
                  "node out of the inventory; then reboot"),),
        )  # fmt: skip
    if refusal := _refusal(node):
        return (
            f"Secure Boot keeps NVIDIA's kernel module from loading: {refusal}",
            (
                Step(Action.CONFIGURE, "enrol the key that signs it (`mokutil --import KEY.der`, "
                     "confirmed on the console at the next boot), or install the distribution's "
                     "signed modules"),
                _REBOOT,
            ),
        )  # fmt: skip
    if node.known("driver", "disk", default="unread") == "unread" and _absent(node, "disk"):
        return (
            f"NVIDIA's kernel module is not built for {kernel}",
            (
                Step(Action.CONFIGURE, "`dkms status`; then `apt install linux-headers-$(uname -r) "
                     "&& dkms autoinstall && modprobe nvidia`"),
                Step(Action.REBOOT, "into a kernel that has it, if the headers are gone"),
            ),
        )  # fmt: skip
    return "NVIDIA's kernel module is not loaded", (load, _SEE_LOG, _REBOOT)


def _absent(node: Reading, fact: str) -> bool:
    value = node.document["driver"].get(fact, {})
    return is_missing(value) and value["missing"] == "absent"


def _refusal(node: Reading) -> str | None:
    """Return the kernel's words when it refused a module, or that it will; None: it did not."""
    lines = [text for _, text in node.known("kernel_log", "lines", default=[])]
    refused = [text for text in lines if _REFUSED.search(text)]
    if not node.known("system", "secure_boot"):
        return None
    if refused:
        return f"the kernel says {refused[-1]!r}"
    disk = node.known("driver", "disk", default={})
    signer = disk.get("signer")
    return "the module on the disk is not signed" if is_missing(signer) else None


def _power_cycle(why: str) -> Step:
    return Step(Action.POWER_CYCLE, f"power off and on over the BMC: {why}")


def loaded_version(node: Reading) -> str | None:
    """Return the version of the kernel module that runs, from wherever it is known."""
    told = node.known("driver", "module") or _number(node.known("driver", "proc"))
    return told or node.known("driver", "version")


def library_version(node: Reading) -> str | None:
    """Return the version of the driver's libraries that a program on the node would load."""
    return node.known("driver", "library", "version") or _number(node.known("driver", "nvml"))


def _number(text: str | None) -> str | None:
    """
    Return the driver's version in the text of /proc, or in NVML's own (after CUDA's major).

    >>> _number("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release")
    '570.124.06'
    >>> _number("12.570.124.06")
    '570.124.06'
    """
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text or "")
    return found[1] if found else None


def driver_versions(node: Reading) -> Iterator[Problem]:
    """Loaded module and libraries are of one version; NVML demands exactly that (error 18)."""
    init = node.document["driver"]["init"]
    silent = "" if init == "ok" else str(init["missing"])
    if silent in {"driver_not_loaded", "library_not_found"}:
        raise CannotTell("one of the two is not there (driver-loaded says which)")
    loaded, library = loaded_version(node), library_version(node)
    if silent != "version_mismatch" and loaded == library is not None:
        return
    if silent != "version_mismatch" and (loaded is None or library is None):
        raise Unread(f"the {'library' if loaded else 'module'}'s version could not be read")
    # NVML that starts proves that the two fit: then some library's file name lies, no more.
    yield Problem(
        Severity.WARN if init == "ok" else Severity.BLOCK,
        f"the loaded kernel module is {loaded or 'of another version'}, the libraries are "
        f"{library or 'not of its version'}",
        "one version",
        "NVML",
        (
            Step(Action.LOOK, "`cat /proc/driver/nvidia/version; ldconfig -p | grep libnvidia-ml`; "
                 "an upgrade that nobody ordered is in /var/log/apt/history.log"),
            _RELOAD,
            _REBOOT,
        ),
    )  # fmt: skip


def driver_minimum(node: Reading) -> Iterator[Problem]:
    """
    The driver runs the CUDA of vLLM's wheels: its own is as new, or at least of the same major.

    Nothing to check where no vLLM is declared.
    """
    if node.needs.cuda is None or _on_cpu(node):
        return
    version = node.get("driver", "cuda")
    has = (version // 1000, version % 1000 // 10)  # NVML has 12080 for CUDA 12.8
    if has >= node.needs.cuda:
        return
    driver = f"driver {node.known('driver', 'version', default='?')} runs CUDA {_dotted(has)}"
    brings = f"vLLM's wheels bring {_dotted(node.needs.cuda)}"
    major = node.needs.cuda[0]
    if has[0] == major:
        yield Problem(
            Severity.INFO,
            f"{driver}, {brings}: they run, but nothing that compiles PTX of that version does",
            f"CUDA {_dotted(node.needs.cuda)}",
            node.needs.source,
            (Step(Action.LOOK, "upgrade the driver when it is convenient"),),
        )
        return
    upgrade = Step(Action.CONFIGURE, f"upgrade the driver to {_oldest(major)}, then reboot")
    older = Step(Action.CONFIGURE, "or deploy a vLLM whose wheels are built with CUDA "
                 f"{has[0]} (`vllm.lock`)")  # fmt: skip
    boards = [gpu.known("brand") for gpu in node.gpus]
    forward = bool(boards) and set(boards) <= DATA_CENTRE_BRANDS
    package = f"cuda-compat-{node.needs.cuda[0]}-{node.needs.cuda[1]}"
    if forward and _forward_compatible(node):
        yield Problem(
            Severity.WARN,
            f"{driver}, {brings}: vLLM relies on the package {package}, which was not looked for",
            f"driver {_oldest(major)}",
            f"{FORWARD_COMPATIBILITY} in vllm.environment",
            (Step(Action.LOOK, f"`dpkg -l '{package}'` on the node"), upgrade),
        )
        return
    compatible = Step(
        Action.CONFIGURE,
        f"or, on these data-centre boards, install {package} and set vllm.environment."
        f"{FORWARD_COMPATIBILITY}: '1' (CUDA's forward compatibility; not for every old branch)",
    )
    yield Problem(
        Severity.BLOCK,
        f"{driver}, {brings}: vLLM ends with `CUDA driver version is insufficient`",
        f"driver {_oldest(major)}",
        node.needs.source,
        (older, *((compatible,) if forward else ()), upgrade),
    )


def _oldest(major: int) -> str:
    version = OLDEST_DRIVER.get(major)
    return f"{version} or newer" if version else f"of a release that runs CUDA {major}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _on_cpu(node: Reading) -> bool:
    return node.settings.vllm is not None and node.settings.vllm.device == "cpu"


def _forward_compatible(node: Reading) -> bool:
    vllm = node.settings.vllm
    return vllm is not None and vllm.environment.get(FORWARD_COMPATIBILITY) in {"1", "true"}


def compute_capability(gpu: GpuReading) -> Iterator[Problem]:
    """vLLM's wheels have kernels for the GPU: it is neither older nor newer than their CUDA."""
    if _on_cpu(gpu.node):
        return
    major, minor = gpu.get("compute_capability")
    needs = gpu.node.needs.cuda
    oldest = OLDEST_CAPABILITY.get(needs[0] if needs else 12, max(OLDEST_CAPABILITY.values()))
    source = gpu.node.needs.source or "vLLM's installation guide"
    name = gpu.known("name", default="the GPU")
    if (major, minor) < oldest:
        yield Problem(
            Severity.BLOCK,
            f"{name} has compute capability {major}.{minor}: vLLM ends with `no kernel image is "
            "available for execution on the device`",
            f"{_dotted(oldest)} or newer",
            source,
            (
                Step(Action.CONFIGURE, "take the node out of the inventory, or hide the GPU from "
                     "the driver (NVreg_ExcludedGpus)"),
                Step(Action.SERVICE, "or put a newer GPU in"),
            ),
            gpu.index,
        )  # fmt: skip
        return
    known = [cuda for first, cuda in FIRST_CUDA.items() if first <= (major, minor)]
    first = FIRST_CUDA.get((major, minor), max(known, default=(0, 0)))
    if needs and needs < first:
        yield Problem(
            Severity.BLOCK,
            f"{name} has compute capability {major}.{minor}, for which CUDA {_dotted(needs)} of "
            "vLLM's wheels has no kernels",
            f"CUDA {_dotted(first)} or newer",
            source,
            (Step(Action.CONFIGURE, "deploy a newer vLLM (`vllm.version`, `vllm.lock`)"),),
            gpu.index,
        )


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "driver-loaded": driver_loaded,
    "driver-versions": driver_versions,
}

OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {"driver-minimum": driver_minimum}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "compute-capability": compute_capability,
}
