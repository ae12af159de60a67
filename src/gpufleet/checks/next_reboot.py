"""Find what will break at the next reboot, while everything still runs. Pure.

The next boot starts the newest installed kernel, which is the boot loaders' default, and loads the
NVIDIA module on disk for that kernel. No problem stops work now, so every one is a `WARN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, Reading, is_missing

# Packages whose upgrade changes the driver, or parts that must have its version. Packages that fit
# every driver are not listed: the container toolkit, CUDA's compilers, DCGM.
_DRIVER = re.compile(
    r"nvidia-(?!container|cuda-|docker|settings|prime|detect|vaapi)|libnvidia-(?!container)"
    r"|cuda-drivers|kmod-nvidia|linux-(modules|objects|signatures)-nvidia|libnvsdm|nvlsm"
)
# A name with the driver's branch, nvidia-utils-570: Ubuntu's archive has packages of that name,
# however it is packaged. NVIDIA dropped the branch with R590.
_BRANCH = re.compile(r"-\d{3}(-|$)")
# Versions that Debian and Ubuntu give: 535.183.01-1~deb12u1, 570.133.20-0ubuntu0.24.04.1.
_OF_DISTRIBUTION = re.compile(r"[~+](deb|bpo)\d|ubuntu\d+\.\d\d\.\d\d")
# Patterns of origins that match NVIDIA's repository, by name or because they match everything.
_NVIDIA = re.compile(r"nvidia|cuda|(^|=|:)\*", re.IGNORECASE)

NEWEST = "the newest installed kernel boots next"
NAMED = 4  # how many packages are named; the rest is counted


@dataclass(frozen=True)
class NextBoot:
    """The kernel of the next boot, and the NVIDIA module on disk for it, or None."""

    kernel: str
    running: bool
    module: str | None
    signer: str | None


def next_boot(node: Reading) -> NextBoot:
    """Return the kernel that boots next. Raises `DoesNotApply` if none is installed."""
    kernels = node.get("driver", "kernels", absent=[])
    if not kernels:
        raise DoesNotApply("no kernel below /lib/modules, as in a container")
    at = next((at for at, kernel in enumerate(kernels) if kernel["newest"]), len(kernels) - 1)
    module = node.get("driver", "kernels", at, "nvidia", absent=None)
    return NextBoot(
        kernel=kernels[at]["kernel"],
        running=kernels[at]["running"],
        module=module,
        signer=node.get("driver", "kernels", at, "signer", absent=None) if module else None,
    )


def loaded_module(node: Reading) -> str:
    """Return the loaded module's version. Raises `DoesNotApply` if none is loaded."""
    loaded = node.get("driver", "module", absent=None)
    if loaded is None:
        raise DoesNotApply("no NVIDIA module is loaded: see the check driver-loaded")
    return str(loaded)


def reboot_module(node: Reading) -> Iterator[Problem]:
    """Check that the module on disk has the loaded module's version (modinfo, /sys/module)."""
    loaded, boot = loaded_module(node), next_boot(node)
    if boot.module is None and boot.running:
        yield Problem(
            Severity.WARN,
            f"module {loaded} is loaded, but kernel {boot.kernel} no longer has an NVIDIA module "
            f"on disk: the node will have no driver after the next reboot{_urgent(node)}",
            f"module {loaded} for {boot.kernel}",
            NEWEST,
            _build(boot.kernel),
        )
    elif boot.module not in {None, loaded}:
        yield Problem(
            Severity.WARN,
            f"module {loaded} is loaded, but {boot.module} is on disk for {boot.kernel}: the next "
            f"reboot changes the driver{_urgent(node)}",
            f"module {loaded}",
            NEWEST,
            (
                Step(
                    Action.LOOK,
                    "find out who upgraded the module, and whether the libraries and the fabric "
                    "manager also have the new version: dpkg -l '*nvidia*' (rpm -qa '*nvidia*')",
                ),
                Step(
                    Action.DRAIN,
                    "reboot when it suits you, before an unplanned reboot does: "
                    "systemctl stop 'vllm-*'",
                ),
                Step(Action.REBOOT, "systemctl reboot; then gpufleet check"),
            ),
        )


def reboot_kernel(node: Reading) -> Iterator[Problem]:
    """
    Check that the kernel of the next boot has an NVIDIA module.

    reboot-module reports a missing module of the running kernel.
    """
    boot = next_boot(node)
    loaded_module(node)
    if boot.module is None and not boot.running:
        yield Problem(
            Severity.WARN,
            f"kernel {boot.kernel} is installed but has no NVIDIA module: the node will have no "
            f"driver after the next reboot{_urgent(node)}",
            "an NVIDIA module for this kernel",
            NEWEST,
            _build(boot.kernel),
        )


def reboot_signature(node: Reading) -> Iterator[Problem]:
    """
    Check that the module of the next boot is signed if Secure Boot is on.

    secure-boot judges a node without a loaded module.

    The firmware's keys are not read; as root, `mokutil --list-enrolled` prints them.
    """
    if not node.get("system", "secure_boot", absent=False):
        return
    loaded_module(node)
    boot = next_boot(node)
    if boot.module is not None and boot.signer is None:
        yield Problem(
            Severity.WARN,
            f"Secure Boot is on and the NVIDIA module for {boot.kernel} is not signed: the next "
            f"boot will reject the module{_urgent(node)}",
            "a module signed with a key that is enrolled in the firmware",
            "the kernel's lockdown under Secure Boot",
            (
                Step(
                    Action.CONFIGURE,
                    "build the module again, signed with the machine's key: dkms install "
                    f"nvidia/{boot.module} -k {boot.kernel} --force; or install the "
                    "distribution's signed modules (linux-modules-nvidia-*)",
                ),
                Step(
                    Action.CONFIGURE,
                    "if the key is not enrolled in the firmware: run mokutil --import with the "
                    "key's .der file, and confirm at the console during the next boot",
                ),
                Step(
                    Action.LOOK,
                    f"modinfo -k {boot.kernel} -F signer nvidia shows the name of the key",
                ),
            ),
        )


def unattended_upgrades(node: Reading) -> Iterator[Problem]:
    """
    Check that driver packages are held, or excluded from unattended upgrades.

    Upgraded libraries refuse the module that is still loaded (NVML: version mismatch) until the
    next reboot. docs/checks/unattended-upgrades.md has the origins that reach the driver. Without
    the programs that report the settings this is not checked, because a problem would only be a
    warning.
    """
    _can_be_told(node)
    upgrades = node.get("system", "unattended_upgrades", absent=None)
    if upgrades is None or not node.get("system", "unattended_upgrades", "enabled", absent=False):
        return
    packages = node.get("system", "packages", absent={})
    exposed = sorted(
        name
        for name, package in packages.items()
        if _DRIVER.match(name)
        and not package["held"]
        and not any(_fits(pattern, name) for pattern in upgrades["blacklist"])
        and _reached(node, name, package["version"], upgrades["origins"])
    )
    if not exposed:
        return
    more = f" and {len(exposed) - NAMED} more" if len(exposed) > NAMED else ""
    names = " ".join(exposed)
    yield Problem(
        Severity.WARN,
        f"unattended upgrades may change the driver: {', '.join(exposed[:NAMED])}{more}",
        "driver packages that are held, or are in the blacklist of unattended upgrades",
        "the node's apt or dnf settings",
        (
            Step(
                Action.CONFIGURE,
                f"apt-mark hold {names} (with dnf: dnf versionlock add {names})",
            ),
            Step(
                Action.CONFIGURE,
                'Unattended-Upgrade::Package-Blacklist { "nvidia-"; "libnvidia-"; }; in a file of '
                "/etc/apt/apt.conf.d (with dnf: excludepkgs in /etc/dnf/dnf.conf)",
            ),
        ),
    )


def _can_be_told(node: Reading) -> None:
    """Raise `CannotTell` if the node's upgrade settings cannot be read."""
    system = node.document["system"]
    upgrades, packages = system["unattended_upgrades"], system["packages"]
    told: list[Any] = [upgrades, packages]
    if not is_missing(upgrades):
        told.append(upgrades["enabled"])
    for fact in told:
        if is_missing(fact) and fact["missing"] == "no_program":
            raise CannotTell(f"the node has no {fact.get('detail', 'program')} that can be queried")


def _fits(pattern: str, name: str) -> bool:
    """
    Return whether a name matches a blacklist's pattern.

    unattended-upgrades' patterns are regular expressions that must match from the name's start, and
    dnf's are globs. An invalid pattern protects nothing.
    """
    glob = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern))
    if re.fullmatch(glob, name):
        return True
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _reached(node: Reading, name: str, version: str, origins: list[str]) -> bool:
    """Return whether the allowed origins have a package; dnf has no list of origins."""
    if node.known("os_release", "id") not in {"debian", "ubuntu"}:
        return True
    if any(map(_NVIDIA.search, origins)):
        return True
    return bool(origins) and bool(_BRANCH.search(name) or _OF_DISTRIBUTION.search(version))


def _urgent(node: Reading) -> str:
    wanted = node.known("system", "reboot_required", default=False)
    return ", and the system requires a reboot (/run/reboot-required)" if wanted else ""


def _build(kernel: str) -> tuple[Step, ...]:
    return (
        Step(
            Action.CONFIGURE,
            f"install its headers (linux-headers-{kernel}, or kernel-devel) and build the module: "
            f"dkms autoinstall -k {kernel}; dkms status",
        ),
        Step(Action.CONFIGURE, f"or boot a kernel that has a module, and remove {kernel}"),
        Step(Action.LOOK, f"modinfo -k {kernel} -F version nvidia shows whether the module exists"),
    )


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "reboot-module": reboot_module,
    "reboot-kernel": reboot_kernel,
    "reboot-signature": reboot_signature,
    "unattended-upgrades": unattended_upgrades,
}
