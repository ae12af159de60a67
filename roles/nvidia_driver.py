"""NVIDIA's driver: its packages, the settings of its modules, and a module for every kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, deploy, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge.desired import Absent, File, Value, Wanted
from gpufleet.gpu_software import kernel_modules
from gpufleet.gpu_software.driver_packages import driver_packages
from gpufleet.gpu_software.repository import source
from gpufleet.operations.converge import Converge, refuse
from gpufleet.remote import payload
from gpufleet.remote.query import ask
from gpufleet.sanitize import printable
from roles.driver_in_force import guarded, marked, settled

if TYPE_CHECKING:
    from gpufleet.fleet.run import Bare

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

MODPROBE = "/etc/modprobe.d/gpufleet-nvidia.conf"
LOADED_AT_BOOT = "/etc/modules-load.d/gpufleet-nvidia.conf"
UNATTENDED = "/etc/apt/apt.conf.d/52gpufleet-unattended-upgrades"
# Says of which MODPROBE every initramfs was made, while nouveau is still loaded from one.
INITRAMFS = "/var/lib/gpufleet/initramfs"

# modinfo unpacks a module of each kernel: seconds; a node that swaps gets a margin.
LOOK_SECONDS = 120
# on_node/gpu_software/kernel_modules.py gives DKMS 1800 s a kernel; as many kernels as an operator
# forgets.
BUILD_SECONDS = 4 * 1800
# One image takes 10 to 30 s to be made.
INITRAMFS_SECONDS = 600


@deploy("NVIDIA's driver")
def nvidia_driver(node: Bare) -> None:
    """
    Converge the driver on the disk; `driver_in_force` loads it afterwards.

    The node is marked before its packages change, so that nothing starts to serve on a driver that
    nobody has checked. The modules' settings come first: the packages put them into the initramfs.
    """
    settings = Converge(Wanted(*files(node)), watch=(INITRAMFS,))
    settings.files(name="settings of its modules")
    if node.machine.nouveau:
        without_nouveau(settings, name="initramfs without nouveau", _timeout=INITRAMFS_SECONDS)
    guarded()
    packages = Converge(wanted(node))
    marked(packages, "its driver's packages were changed", name="mark the node as unchecked")
    packages.packages(name="packages", _ignore_errors=True)
    settled(packages, node, name="what became of them")
    built(node.lock.driver, name="a module for every kernel")


def wanted(node: Bare) -> Wanted:
    """Return the driver's packages, and where they come from."""
    packages = driver_packages(node.system, node.lock, node.machine)
    return Wanted(source(node.repository), *packages.wanted)


def files(node: Bare) -> tuple[Value, ...]:
    """Return the files that the driver's modules and those who would upgrade them go by."""
    modprobe = (
        "# Written by gpufleet: gpu.module_options in group_vars.\n"
        "# The kernel's own driver; NVIDIA's cannot have a GPU beside it.\n"
        "blacklist nouveau\noptions nouveau modeset=0\n"
    )
    options = dict(node.settings.gpu.module_options)
    if node.machine.imex:
        options.setdefault("NVreg_CreateImexChannel0", "1")
    if options:
        words = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
        modprobe += f"options nvidia {words}\n"
    # nvidia-uvm: CUDA loads it by a setuid program, which our units forbid.
    loaded = "# Written by gpufleet.\nnvidia\nnvidia-uvm\n"
    return (
        File(MODPROBE, modprobe.encode()),
        File(LOADED_AT_BOOT, loaded.encode()),
        # dnf-automatic heeds the version locks that hold the packages.
        Absent(UNATTENDED) if node.system.red_hat else File(UNATTENDED, unattended(node).encode()),
    )


def unattended(node: Bare) -> str:
    """
    Return what unattended-upgrades must leave alone: its own list, beside apt's holds.

    A hold is lost when somebody upgrades by hand; this stays.
    """
    patterns = ["nvidia-", "libnv", "libcuda1", "nvlsm", "datacenter-gpu-manager", "cuda-"]
    if node.lock.kernel == "held":
        patterns.append("linux-(image|headers|modules|generic)")
    rows = "".join(f'    "^{pattern}";\n' for pattern in patterns)
    return (
        "// Written by gpufleet: these are upgraded by deploys/node.py alone.\n"
        f"Unattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"
    )


@operation()
def without_nouveau(settings: Converge) -> Commands:
    """Make every initramfs anew, once: nouveau is loaded from there before the root is mounted."""
    wanted_file = next(file for file in settings.wanted.of(File) if file.path == MODPROBE)
    done = wanted_file.sha256
    if settings.snapshot().file(INITRAMFS).sha256 == hashlib.sha256(done.encode()).hexdigest():
        host.noop("no initramfs has nouveau; the next boot goes without")
        return
    _say("make every initramfs anew, without nouveau")
    if ctx_state.get().is_executing:
        settings.forget()
    yield StringCommand(
        "sh",
        "-c",
        QuoteString(
            "set -e; if command -v update-initramfs >/dev/null; then update-initramfs -u -k all; "
            "elif command -v dracut >/dev/null; then dracut --regenerate-all --force; "
            # Neither: the kernel boots without an initramfs.
            "fi >&2; "
            f"mkdir -p {INITRAMFS.rpartition('/')[0]}; printf %s {done} > {INITRAMFS}"
        ),
    )


@operation()
def built(driver: str) -> Commands:
    """Have DKMS build what lacks, after packages have; what then lies on the disk is the proof."""
    seen = _ask("look")
    if seen["error"]:
        yield from refuse((seen["error"],))
        return
    lacks = kernel_modules.lacking(seen, driver)
    if lacks:
        _say(f"build driver {driver} for kernel {', '.join(lacks)}")
        yield FunctionCommand(_build, (driver, lacks), {})
    elif found := kernel_modules.problems(seen, driver):
        yield from refuse(found)
    else:
        host.noop(f"every kernel has a module of driver {driver}")


def _build(state: State, host: Host, driver: str, kernels: tuple[str, ...]) -> bool:  # noqa: ARG001
    seen = _ask("build", kernels=list(kernels), version=driver)
    found = (seen["error"],) if seen["error"] else kernel_modules.problems(seen, driver)
    for problem in found:
        logger.error("%s%s", host.print_prefix, printable(problem))
    return not found


def _ask(action: str, **parameters: Any) -> Mapping[str, Any]:
    """Return on_node/gpu_software/kernel_modules.py's document; `error` says why there is none."""
    program = payload.program(
        "gpu_software/kernel_modules", action=action, sysroot="", **parameters
    )
    limit = LOOK_SECONDS if action == "look" else BUILD_SECONDS
    node = ctx_host.get()
    answer = ask(ctx_state.get(), [node], lambda _: program, limit, "the look at its modules")
    found = answer[node.name]
    return {"error": found} if isinstance(found, str) else found


def _say(what: str) -> None:
    would = "" if ctx_state.get().is_executing else "would "
    logger.info("%s%s%s", host.print_prefix, would, printable(what))
