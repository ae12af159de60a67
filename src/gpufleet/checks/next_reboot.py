"""
Find what the next reboot will break, while the node still works. Pure.

The next boot starts the newest installed kernel, which is the default of boot loaders, and loads
the NVIDIA module that is on the disk for that kernel. None of these problems stops work now, so all
of them are `WARN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, Reading, is_missing

# The packages whose upgrade changes the driver, or parts that must have the driver's version.
# Packages that work with every driver are not matched: the container toolkit, CUDA's compilers,
# DCGM.
_DRIVER = re.compile(
    r"nvidia-(?!container|cuda-|docker|settings|prime|detect|vaapi)|libnvidia-(?!container)"
    r"|cuda-drivers|kmod-nvidia|linux-(modules|objects|signatures)-nvidia|libnvsdm|nvlsm"
)
# The name of a package with the driver's branch, such as nvidia-utils-570. Ubuntu's archive has
# packages with the same names as NVIDIA's. NVIDIA's names have no branch since R590.
_BRANCH = re.compile(r"-\d{3}(-|$)")
# Versions that Debian and Ubuntu assign: 535.183.01-1~deb12u1, 570.133.20-0ubuntu0.24.04.1.
_OF_DISTRIBUTION = re.compile(r"[~+](deb|bpo)\d|ubuntu\d+\.\d\d\.\d\d")
# Patterns of origins that match NVIDIA's repository, by name or because they match everything.
_NVIDIA = re.compile(r"nvidia|cuda|(^|=|:)\*", re.IGNORECASE)

NEWEST = "the newest installed kernel boots next"
NAMED = 4  # the number of packages in a message; of the others, only the number is given


@dataclass(frozen=True)
class NextBoot:
    """
    The kernel of the next boot, and the version of the NVIDIA module on the disk for it, or None.
    """

    kernel: str
    running: bool
    module: str | None
    signer: str | None


def next_boot(node: Reading) -> NextBoot:
    """Return the kernel that boots next. Raises `DoesNotApply` if no kernel is installed."""
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
    """Return the version of the loaded module. Raises `DoesNotApply` if no module is loaded."""
    loaded = node.get("driver", "module", absent=None)
    if loaded is None:
        raise DoesNotApply("no NVIDIA module is loaded: see the check driver-loaded")
    return str(loaded)


def reboot_module(node: Reading) -> Iterator[Problem]:
    """
    Check that the NVIDIA module on the disk for the next boot has the version of the loaded module.
    """
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
    Check that there is an NVIDIA module for the kernel of the next boot.

    If the next boot starts the running kernel again, reboot-module reports a missing module.
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
    Check that the module of the next boot is signed, if Secure Boot is on.

    For a node without a loaded module, the check secure-boot applies instead.

    The keys in the firmware are not read. As root, you can list them with `mokutil
    --list-enrolled`.
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

    After an upgrade, the new libraries do not work with the module that is still loaded (NVML:
    version mismatch) until the next reboot. docs/checks/unattended-upgrades.md lists the origins
    that contain the driver. If the node lacks the programs that report the settings, this is not
    checked, because a problem would only be a warning.
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
    Return whether a package's name matches a pattern of the blacklist.

    The patterns of unattended-upgrades are regular expressions that must match from the start of
    the name. The patterns of dnf are globs. An invalid pattern matches no package.
    """
    glob = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern))
    if re.fullmatch(glob, name):
        return True
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _reached(node: Reading, name: str, version: str, origins: list[str]) -> bool:
    """
    Return whether the allowed origins may contain the package. With dnf, which has no list of
    origins, the result is True.
    """
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
