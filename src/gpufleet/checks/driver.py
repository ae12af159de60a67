"""
Check that the driver answers, that its parts have the same version, and that it is new enough for
vLLM. Pure.

`next_reboot.py` compares the running driver with the driver on the disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpufleet.catalog.driver_branches import FIRST_CUDA, OLDEST_DRIVER
from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    GpuReading,
    Needs,
    Reading,
    Unread,
    is_missing,
    reason,
)
from gpufleet.versions import numbers

# Values of nvmlBrandType_t in nvml.h: Tesla, and the brand that replaced Tesla. CUDA's forward
# compatibility packages run only on data-centre boards (CUDA compatibility guide). On GeForce
# boards, CUDA ends with error 804.
DATA_CENTRE_BRANDS = {2, 14}
# The CUDA version that is assumed if the lock file of a declared vLLM does not contain one. Every
# vLLM that the settings accept (0.18 and newer) comes with this CUDA version or a newer one.
OLDEST_VLLM_CUDA = (12, 0)
FORWARD_COMPATIBILITY = (
    "VLLM_ENABLE_CUDA_COMPATIBILITY"  # variable that vLLM reads; compatibility is off without it
)

# The oldest compute capability for which vLLM's wheels have kernels, by the major version of CUDA.
# CUDA 13 cannot compile for GPUs older than Turing (CUDA's release notes). The wheels for CUDA 12
# support Volta and newer GPUs (vLLM's installation guide).
OLDEST_CAPABILITY = {12: (7, 0), 13: (7, 5)}

# The kernel's message if Secure Boot is on and the kernel rejects a module with an unknown signer.
_REFUSED = re.compile(r"(module|key).* is rejected|Lockdown.* module", re.IGNORECASE)

_Ladder = tuple[str, tuple[Step, ...]]  # the problem, and the remedy

_SEE_LOG = Step(Action.LOOK, "`dmesg | grep -E 'NVRM|nvidia' | tail -30` on the node")
_LOAD = Step(
    Action.RESTART_SERVICE,
    "`modprobe nvidia` on the node; if the command fails, it prints the reason",
)
_RELOAD = Step(
    Action.RESTART_SERVICE,
    "stop all programs that use the GPUs (`systemctl stop 'vllm-*' nvidia-dcgm nvidia-persistenced "
    "nvidia-fabricmanager`; `fuser -v /dev/nvidia*` must be empty), then `modprobe -r "
    "nvidia_peermem nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia nvidia_uvm`",
)
_REBOOT = Step(Action.REBOOT, "stop what uses the GPUs (`systemctl stop 'vllm-*'`), then `reboot`")

# The reasons in a probe for a driver that does not answer (docs/reference/probe.md), with their
# remedies. `driver_not_loaded` is not here, because `_not_loaded` finds its cause in other facts.
_SILENCES: dict[str, _Ladder] = {
    "version_mismatch": (
        "the driver's libraries and the loaded kernel module have different versions, so no "
        "program can use a GPU",
        (_RELOAD, _REBOOT),
    ),
    "library_not_found": (
        "libnvidia-ml.so.1 is missing, so no program can query the driver",
        (
            Step(Action.LOOK, "`ldconfig -p | grep libnvidia-ml` on the node finds no library"),
            Step(
                Action.CONFIGURE,
                "install the driver's libraries (libnvidia-compute or nvidia-driver-cuda, by "
                "distribution) in the kernel module's version (`cat /sys/module/nvidia/version`)",
            ),
        ),
    ),
    "no_permission": (
        "the SSH user has no permission to open the GPUs' device files",
        (
            Step(Action.LOOK, "`ls -l /dev/nvidia*` on the node; the driver's default is 0666"),
            Step(Action.CONFIGURE, "let the SSH user open them, or probe as root"),
        ),
    ),
    "no_ctypes": (
        "the node's python3 has no ctypes module, which gpufleet needs to query the driver",
        (
            Step(
                Action.CONFIGURE, "`apt install python3` (python3-minimal does not contain ctypes)"
            ),
        ),
    ),
    "timeout": (
        "the driver did not answer in time: every program that calls the driver hangs, including "
        "vLLM",
        (
            _SEE_LOG,
            _REBOOT,
            Step(
                Action.POWER_CYCLE,
                "power-cycle the node over the BMC, if processes in state D prevent the reboot",
            ),
        ),
    ),
    "crashed": (
        "the driver's library crashed when gpufleet queried it",
        (
            _SEE_LOG,
            Step(
                Action.CONFIGURE,
                "complete an interrupted upgrade: `dpkg --audit; apt-get -f install`",
            ),
            _REBOOT,
        ),
    ),
}
_SILENCE: _Ladder = ("NVML does not start", (_SEE_LOG, _RELOAD, _REBOOT))

_INSTALL = "`gpufleet deploy node INVENTORY` (or `pyinfra INVENTORY deploys/node.py`)"
_OWN_DRIVER = Step(Action.CONFIGURE, "or install a driver yourself, and check again")
_NO_DEVICE_FILES = (
    Step(Action.CONFIGURE, "create the device files: `nvidia-modprobe -c0 -u; ls -l /dev/nvidia*`"),
    _RELOAD,
    _REBOOT,
)
_NO_DEVICES = (
    Step(
        Action.LOOK, "check that this is the right machine: `lspci -d 10de:` shows no NVIDIA device"
    ),
    Step(
        Action.POWER_CYCLE,
        "power-cycle the node over the BMC: a reboot does not bring back a lost device",
    ),
    Step(Action.SERVICE, "have the GPUs' seating and power cables inspected"),
)
_NOUVEAU = (
    Step(
        Action.CONFIGURE,
        "`printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > "
        "/etc/modprobe.d/nouveau-off.conf && update-initramfs -u -k all` (RHEL: `dracut --force`)",
    ),
    _REBOOT,
)
_GIVEN_AWAY = (
    Step(
        Action.CONFIGURE,
        "remove `vfio-pci.ids=` from the kernel's command line and reboot, or remove this node "
        "from the inventory",
    ),
)
_UNSIGNED = (
    Step(
        Action.CONFIGURE,
        "enrol the key that signs the module (`mokutil --import KEY.der`; the console asks at the "
        "next boot), or install the distribution's signed modules",
    ),
    _REBOOT,
)
_NOT_BUILT = (
    Step(
        Action.CONFIGURE,
        "`dkms status`; then `apt install linux-headers-$(uname -r) && dkms autoinstall && "
        "modprobe nvidia`",
    ),
    Step(
        Action.REBOOT,
        "if these headers are no longer available, reboot into a kernel that has the module",
    ),
)


def driver_loaded(node: Reading) -> Iterator[Problem]:
    """Check that NVML can be initialised. If NVML cannot start, CUDA cannot start either."""
    init = node.document["driver"]["init"]
    if init == "ok":
        return
    why = init["missing"]
    # In these two cases the driver may work, so the state of the node is unknown.
    severity = Severity.UNKNOWN if why in {"no_ctypes", "no_permission"} else Severity.BLOCK
    if why == "library_not_found" and _has_no_driver(node):
        yield Problem(severity, "no NVIDIA driver is installed", "", "", _provision(node))
        return
    if why == "driver_not_loaded":
        said, remedy = _not_loaded(node)
    else:
        said, remedy = _SILENCES.get(why, _SILENCE)
    yield Problem(severity, f"{said} ({reason(init)})", "NVML starts", "the device", remedy)


def _has_no_driver(node: Reading) -> bool:
    """Return whether the kernel module is neither loaded nor on disk, as on a bare node."""
    disk = node.document["driver"].get("disk", {})
    absent = is_missing(disk) and disk["missing"] == "absent"
    return absent and not node.known("driver", "module")


def _provision(node: Reading) -> tuple[Step, ...]:
    """
    Return the steps that install a driver on a bare node. If the node has no lock of a driver
    version, the first step writes one.
    """
    if lock := node.settings.gpu_lock:
        return (Step(Action.CONFIGURE, f"install driver {lock.driver} of gpu_lock: {_INSTALL}"),)
    first = (
        f"lock a driver version: `gpufleet lock INVENTORY --set r580-lts`; then install this "
        f"driver: {_INSTALL}"
    )
    return (Step(Action.CONFIGURE, first), _OWN_DRIVER)


def _not_loaded(node: Reading) -> _Ladder:
    """
    Return why NVML finds no kernel module, and the remedy. Of several possible causes, the most
    certain one is returned.
    """
    gpus = [at for at in node.known("pci", default=[]) if at["class"].startswith("0x03")]
    drivers = {at["driver"] for at in gpus if not is_missing(at["driver"])}
    if loaded := node.known("driver", "module"):
        return f"the kernel module {loaded} is loaded, but NVML cannot reach it", _NO_DEVICE_FILES
    if node.known("pci") == []:
        return "the PCI bus has no NVIDIA device", _NO_DEVICES
    if "nouveau" in drivers | set(node.known("system", "modules", default=[])):
        return (
            "the driver nouveau uses the GPUs, so NVIDIA's kernel module cannot be loaded"
        ), _NOUVEAU
    if drivers == {"vfio-pci"}:
        return "every GPU is bound to vfio-pci, for virtual machines", _GIVEN_AWAY
    if refusal := _refusal(node):
        return f"Secure Boot rejects NVIDIA's kernel module: {refusal}", _UNSIGNED
    disk = node.document["driver"].get("disk", {})
    if is_missing(disk) and disk["missing"] == "absent":
        kernel = node.known("kernel", default="the running kernel")
        return f"NVIDIA's kernel module is not built for {kernel}", _NOT_BUILT
    return "NVIDIA's kernel module is not loaded", (_LOAD, _SEE_LOG, _REBOOT)


def _refusal(node: Reading) -> str | None:
    """Return the evidence that Secure Boot rejected the module, or None."""
    if not node.known("system", "secure_boot"):
        return None
    lines = [text for _, text in node.known("kernel_log", "lines", default=[])]
    if refused := [text for text in lines if _REFUSED.search(text)]:
        return f"{refused[-1]!r}"
    signer = node.known("driver", "disk", default={}).get("signer")
    return "the module on the disk is not signed" if is_missing(signer) else None


def loaded_version(node: Reading) -> str | None:
    """Return the version of the loaded kernel module, from the first source that has it."""
    told = node.known("driver", "module") or _number(node.known("driver", "proc"))
    return told or node.known("driver", "version")


def library_version(node: Reading) -> str | None:
    """Return the version of the driver libraries that a program on the node would load."""
    return node.known("driver", "library", "version") or _number(node.known("driver", "nvml"))


def _number(text: str | None) -> str | None:
    """
    Return the driver's version in the text of /proc, or in NVML's version, where it follows the
    major version of CUDA.

    >>> _number("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release")
    '570.124.06'
    >>> _number("12.570.124.06")
    '570.124.06'
    """
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text or "")
    return found[1] if found else None


def driver_versions(node: Reading) -> Iterator[Problem]:
    """
    Check that the loaded kernel module and the driver's libraries have the same version. Otherwise
    NVML fails with error 18.
    """
    init = node.document["driver"]["init"]
    silent = "" if init == "ok" else str(init["missing"])
    if silent in {"driver_not_loaded", "library_not_found"}:
        raise CannotTell(
            "the driver's library or its kernel module is missing (see the finding "
            "of driver-loaded)"
        )
    loaded, library = loaded_version(node), library_version(node)
    if silent != "version_mismatch" and loaded == library is not None:
        return
    if silent != "version_mismatch" and (loaded is None or library is None):
        raise Unread(f"the {'library' if loaded else 'module'}'s version could not be read")
    # If NVML starts, both versions fit, and only the name of a library's file is misleading.
    yield Problem(
        Severity.WARN if init == "ok" else Severity.BLOCK,
        f"the loaded kernel module is {loaded or 'of another version'}, the libraries are "
        f"{library or 'of another version'}",
        "one version",
        "NVML",
        (
            Step(
                Action.LOOK,
                "`cat /proc/driver/nvidia/version; ldconfig -p | grep libnvidia-ml`; "
                "an unattended upgrade is in /var/log/apt/history.log",
            ),
            _RELOAD,
            _REBOOT,
        ),
    )


def driver_minimum(node: Reading) -> Iterator[Problem]:
    """
    Check that the driver supports the CUDA version of vLLM's wheels.

    The driver's CUDA version must be at least as new as the wheels' version, or have the same major
    version. If no `vllm` is declared, this is not checked.
    """
    vllm = node.settings.vllm
    needs, source = node.needs.cuda, node.needs.source
    if needs is None and vllm is not None:
        needs = OLDEST_VLLM_CUDA
        source = f"the lock of vLLM {vllm.version} does not contain the CUDA version"
    if needs is None or _on_cpu(node):
        return
    version = node.get("driver", "cuda")
    has = (version // 1000, version % 1000 // 10)  # NVML has 12080 for CUDA 12.8
    if has >= needs:
        return
    driver = node.known("driver", "version", default="?")
    bring = f"{node.needs.title}'s wheels bring {_dotted(needs)}"
    said = f"driver {driver} runs CUDA {_dotted(has)}, {bring}"
    if has[0] != needs[0]:
        yield _too_old(node, said, has, Needs(needs, source))
        return
    yield Problem(
        Severity.INFO,
        f"{said}: the wheels run, except for kernels that are shipped as PTX",
        f"CUDA {_dotted(needs)}",
        source,
        (Step(Action.LOOK, "upgrade the driver when it is convenient"),),
    )


def _too_old(node: Reading, said: str, has: tuple[int, int], needs: Needs) -> Problem:
    """
    Return the problem that the driver's CUDA has an older major version than the CUDA of the
    wheels.
    """
    cuda = needs.cuda or has
    wanted = f"driver {_oldest(cuda[0])}"
    locked = node.settings.gpu_lock
    if locked and int(locked.branch) >= numbers(OLDEST_DRIVER.get(cuda[0], "0"))[0]:
        install = Step(Action.CONFIGURE, f"install driver {locked.driver} of gpu_lock: {_INSTALL}")
        return Problem(
            Severity.BLOCK,
            f"{said}: {node.needs.title} ends with `CUDA driver version is insufficient`",
            wanted,
            needs.source,
            (install,),
        )
    upgrade = Step(
        Action.CONFIGURE,
        f"upgrade the driver to {_oldest(cuda[0])}: set this version in a lock file (`gpufleet "
        f"lock INVENTORY "
        "--set NAME`), then `gpufleet deploy node INVENTORY`; or upgrade the driver by hand, "
        "then reboot",
    )
    package = f"cuda-compat-{cuda[0]}-{cuda[1]}"
    boards = {gpu.known("brand") for gpu in node.gpus}
    forward = bool(boards) and boards <= DATA_CENTRE_BRANDS
    if forward and _forward_compatible(node):
        return Problem(
            Severity.WARN,
            f"{said}: {node.needs.title} relies on the package {package}, which the probe did "
            f"not query",
            wanted,
            f"{FORWARD_COMPATIBILITY} in vllm.environment",
            (Step(Action.LOOK, f"`dpkg -l '{package}'` on the node"), upgrade),
        )
    older = Step(
        Action.CONFIGURE,
        f"deploy a {node.needs.title} whose wheels are built with CUDA {has[0]} "
        f"(`{node.needs.engine}.lock`)",
    )
    compatible = Step(
        Action.CONFIGURE,
        f"on these data-centre boards: install {package} and set vllm.environment."
        f"{FORWARD_COMPATIBILITY}: '1' (CUDA's forward compatibility, which does not support "
        f"every old driver branch)",
    )
    return Problem(
        Severity.BLOCK,
        f"{said}: {node.needs.title} ends with `CUDA driver version is insufficient`",
        wanted,
        needs.source,
        (older, *((compatible,) if forward else ()), upgrade),
    )


def _oldest(major: int) -> str:
    version = OLDEST_DRIVER.get(major)
    return f"{version} or newer" if version else f"of a driver release that runs CUDA {major}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _on_cpu(node: Reading) -> bool:
    return node.settings.servers is not None and node.settings.servers.device == "cpu"


def _forward_compatible(node: Reading) -> bool:
    engines = node.settings.engines.values()
    return any(each.environment.get(FORWARD_COMPATIBILITY) in {"1", "true"} for each in engines)


def compute_capability(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that vLLM's wheels have kernels for the GPU, which may be too old or too new for them.
    """
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
            f"{name} has compute capability {major}.{minor}: {gpu.node.needs.title} ends with "
            "`no kernel image is "
            "available for execution on the device`",
            f"{_dotted(oldest)} or newer",
            source,
            (
                Step(
                    Action.CONFIGURE,
                    "remove the node from the inventory, or hide the GPU from the driver "
                    "(NVreg_ExcludedGpus)",
                ),
                Step(Action.SERVICE, "or install a newer GPU"),
            ),
            gpu.index,
        )
        return
    known = [cuda for first, cuda in FIRST_CUDA.items() if first <= (major, minor)]
    first = FIRST_CUDA.get((major, minor), max(known, default=(0, 0)))
    if needs and needs < first:
        yield Problem(
            Severity.BLOCK,
            f"{name} has compute capability {major}.{minor}, for which CUDA {_dotted(needs)} of "
            f"{gpu.node.needs.title}'s wheels has no kernels",
            f"CUDA {_dotted(first)} or newer",
            source,
            (
                Step(
                    Action.CONFIGURE,
                    f"deploy a newer {gpu.node.needs.title} (`{gpu.node.needs.engine}.version`, "
                    f"`{gpu.node.needs.engine}.lock`)",
                ),
            ),
            gpu.index,
        )


# uvm-device

UVM = "nvidia-uvm"


def uvm_device(node: Reading) -> Iterator[Problem]:
    """
    Check that /dev/nvidia-uvm exists. Without it, CUDA does not start.

    CUDA creates the device file with a setuid program (nvidia-modprobe), but gpufleet's units
    forbid setuid programs (NoNewPrivileges). deploys/node.py therefore configures the node to
    create the device file at each boot, even if gpufleet did not install the driver.
    """
    servers = node.settings.servers
    if servers is not None and servers.device != "cuda":
        raise DoesNotApply("the CPU build of the engine uses no GPU")
    if "devices" not in node.document["driver"]:
        raise CannotTell("the probe is from an older gpufleet, which did not query this")
    if UVM in node.get("driver", "devices"):
        return
    loaded = "nvidia_uvm" in node.known("system", "modules", default=[])
    yield Problem(
        Severity.BLOCK if servers is not None else Severity.INFO,
        f"/dev/{UVM} is missing, and "
        + ("its module nvidia_uvm is loaded" if loaded else "its module nvidia_uvm is not loaded")
        + ": the servers' units have no permission to create it, so CUDA cannot start",
        f"/dev/{UVM}",
        "CUDA, and NoNewPrivileges in the servers' units",
        (
            Step(Action.CONFIGURE, "now: `nvidia-modprobe -c0 -u`; then `ls -l /dev/nvidia-uvm`"),
            Step(
                Action.CONFIGURE,
                "at each boot: run deploys/node.py, even if you install the driver yourself; or "
                "`echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf` and your own unit "
                "that runs `nvidia-modprobe -c0 -u` before vllm-*",
            ),
        ),
    )


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "driver-loaded": driver_loaded,
    "driver-versions": driver_versions,
}

OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "driver-minimum": driver_minimum,
    "uvm-device": uvm_device,
}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "compute-capability": compute_capability,
}
