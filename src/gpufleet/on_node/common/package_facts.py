"""RUNS ON THE NODE: read the installed driver and kernel packages and unattended upgrades."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import path_of, refusal_of, run
from gpufleet.on_node.common.linux_facts import line

SECONDS = 10

# Patterns for dpkg. The regular expression matches the same packages by their names in rpm, and
# also rpm's kernel packages.
DPKG_PATTERNS = (
    "*nvidia*", "cuda-drivers*", "nvlsm*", "datacenter-gpu-manager*", "linux-image*",
    "linux-headers*", "cuda-toolkit-*", "cuda-nvcc-*", "unattended-upgrades",
)  # fmt: skip
RPM_NAMES = re.compile(
    r".*nvidia.*|cuda-(drivers|toolkit|nvcc).*|nvlsm.*|datacenter-gpu-manager.*"
    r"|kernel(-core|-devel|-headers)?|dnf-automatic"
)
VERSIONLOCK = "/etc/dnf/plugins/versionlock.list"


def packages() -> dict[str, Any]:
    """Return the relevant installed packages: {name: {"version": ..., "held": ...}}."""
    found = read(debian)
    if is_missing(found) and found["missing"] == "no_program":
        return red_hat()
    if is_missing(found):
        raise CannotRead(**{"reason": found.pop("missing"), **found})
    return dict(found)


def debian() -> dict[str, Any]:
    """Return the relevant packages from dpkg."""
    output = run(
        "dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Abbrev}\n", *DPKG_PATTERNS,
        seconds=SECONDS,
    )  # fmt: skip
    # The status is also 1 if one of the patterns matched no package.
    if output.status not in (0, 1) or (output.status and "no packages found" not in output.err):
        raise refusal_of("dpkg-query", output)
    found: dict[str, Any] = {}
    for row in output.out.splitlines():
        name, version, status = row.split("\t")
        # dpkg(1): the first letter is the wanted state, the second is the state. "n" is not
        # installed; "c" has only configuration files left.
        if status[1:2] not in {"n", "c"}:
            found.setdefault(name, {"version": version, "held": status.startswith("h")})
    return dict(sorted(found.items()))


def red_hat() -> dict[str, Any]:
    """
    Return the relevant packages from rpm.

    If several versions of a kernel package are installed, return the last one that rpm lists.
    """
    form = "%{NAME}\t%{VERSION}-%{RELEASE}\t%{ARCH}\n"
    output = run("rpm", "-qa", "--qf", form, seconds=SECONDS)
    if output.status:
        raise refusal_of("rpm", output)
    rows = sorted(row.split("\t") for row in output.out.splitlines())
    locks = version_locks()
    return {
        name: {"version": version, "held": is_locked("%s-%s" % (name, version), arch, locks)}
        for name, version, arch in rows
        if RPM_NAMES.fullmatch(name)
    }


def is_locked(package: str, arch: str, locks: list[str]) -> bool:
    """
    Return whether dnf locks a package. A lock is a pattern, with or without the architecture.
    """
    names = (package, package + "." + arch)
    return any(fnmatch.fnmatch(name, lock) for name in names for lock in locks)


def version_locks() -> list[str]:
    """
    Return dnf's version locks as patterns of NAME-VERSION-RELEASE, without epoch or exclusions.
    """
    rows = [row.strip() for row in text(VERSIONLOCK).splitlines()]
    locks = [row for row in rows if row and not row.startswith(("#", "!"))]
    return [re.sub(r"-\d+:", "-", re.sub(r"^\d+:", "", lock)) for lock in locks]


# --- unattended upgrades


def upgrades() -> dict[str, Any]:
    """Return the settings of unattended upgrades, even if their package is not installed."""
    found = read(apt)
    if is_missing(found) and found["missing"] == "no_program":
        return dnf()
    if is_missing(found):
        raise CannotRead(**{"reason": found.pop("missing"), **found})
    return dict(found)


def apt() -> dict[str, Any]:
    """
    Return apt's settings. `enabled` is true if apt's timer starts unattended upgrades.
    """
    # If the architectures are given, apt does not query dpkg for them. That saves half of the time.
    output = run("apt-config", "-o", "APT::Architectures=none", "dump", seconds=SECONDS)
    if output.status:
        raise refusal_of("apt-config", output)
    pairs = re.findall(r'^([\w:-]+?)(?:::)? "(.*)";$', output.out, re.MULTILINE)

    def values(*keys: str) -> list[str]:
        return [value for key, value in pairs if key in keys and value]

    every = values("APT::Periodic::Unattended-Upgrade") or ["0"]
    return {
        "enabled": every[-1] != "0",
        "origins": values(
            "Unattended-Upgrade::Allowed-Origins", "Unattended-Upgrade::Origins-Pattern"
        ),
        "blacklist": values("Unattended-Upgrade::Package-Blacklist"),
    }


def dnf() -> dict[str, Any]:
    """
    Return dnf-automatic's settings. `enabled` is true if its default timer would install updates.
    """
    import configparser

    path_of("rpm")  # without apt and rpm, nothing is known
    automatic, main = (
        configparser.ConfigParser(interpolation=None, strict=False) for _ in range(2)
    )
    automatic.read_string(text("/etc/dnf/automatic.conf"))
    main.read_string(text("/etc/dnf/dnf.conf"))
    excluded = " ".join(
        settings.get(section, key, fallback="")
        for settings, section in ((automatic, "base"), (main, "main"))
        for key in ("exclude", "excludepkgs")
    )
    apply = automatic.get("commands", "apply_updates", fallback="no").lower()
    return {
        "enabled": apply in {"yes", "true", "1", "on"},
        "origins": [],
        "blacklist": re.split(r"[\s,]+", excluded.strip()) if excluded.strip() else [],
    }


def text(path: str) -> str:
    """Return a file's text, or "" if it does not exist."""
    try:
        return line(path)
    except FileNotFoundError:
        return ""


def unattended_upgrade_settings(settings: Any, installed: Any, units: Any) -> Any:
    """
    Return the settings of unattended upgrades, with `enabled` computed from all three sources.

    On Debian, `enabled` is true if the package is installed and apt's timer is set to start it. On
    Red Hat, it is true if a timer of dnf-automatic is enabled and installs updates. If a required
    source cannot be read, `enabled` is unknown.
    """
    if is_missing(settings):
        return settings
    if is_missing(installed):
        enabled = installed
    elif "unattended-upgrades" in installed:
        enabled = settings["enabled"]
    elif "dnf-automatic" not in installed:
        enabled = False
    elif is_missing(units):
        enabled = units
    else:
        plain, installing = (
            not is_missing(units[timer]) and units[timer]["enabled"] == "enabled"
            for timer in ("dnf-automatic.timer", "dnf-automatic-install.timer")
        )
        enabled = installing or (plain and settings["enabled"])
    return {**settings, "enabled": enabled}
