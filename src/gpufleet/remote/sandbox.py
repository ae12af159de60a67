"""Sandbox untrusted programs on a node. Pure."""

from __future__ import annotations

from shlex import quote

RUN = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect")
"""Command that runs a program in a transient unit with its input, outputs and status."""

# Not ProtectHome=yes: a release's interpreter may lie in a home. None that systemd 239 (RHEL 8)
# does not know: systemd-run refuses what a unit's file may have.
PROPERTIES = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "LockPersonality=yes",
    "PrivateDevices=yes",
    "PrivateMounts=yes",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHome=read-only",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectSystem=strict",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "SystemCallArchitectures=native",
)
"""Properties of a unit that can write only to given paths and read no secrets."""


def sandbox_prefix(seconds: float) -> str:
    """
    Return the shell prefix that sandboxes a command of a release's own files.

    The command runs as a temporary user without network, which can read world-readable files and
    write to its own temporary folder. It is ended after `seconds`.
    """
    return _unit(seconds, "DynamicUser=yes")


def writing_to(folder: str, seconds: float) -> str:
    """
    Return the shell prefix for a command that writes to one folder as root.

    The command has no capabilities and no network, and all other folders are read-only.
    """
    return _unit(seconds, f"ReadWritePaths={folder}")


def _unit(seconds: float, own: str) -> str:
    properties = (own, "PrivateNetwork=yes", f"RuntimeMaxSec={seconds:g}")
    words = (*RUN, "-E HOME=/tmp", "-E LOGNAME=nobody")
    return " ".join([*words, *(f"-p {quote(each)}" for each in (*properties, *PROPERTIES)), "--"])
