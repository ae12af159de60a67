"""Build command prefixes that run untrusted programs on a node in a sandbox. Pure."""

from __future__ import annotations

from shlex import quote

RUN = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect")
"""
The command that runs a program in a transient unit, and passes its input, outputs and status on.
"""

# ProtectHome=yes is not used, because the interpreter of a release may be in a home directory. All
# properties are known to systemd 239 (RHEL 8), because systemd-run refuses unknown properties.
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
"""The properties of a unit that can write only to given paths and cannot read secrets."""


def sandbox_prefix(seconds: float) -> str:
    """
    Return the shell prefix that sandboxes a command of a release's own files.

    The command runs without network, as a temporary user. This user can only read files that all
    users may read, and write to its own temporary folder. After `seconds`, the command is ended.
    """
    return _unit(seconds, "DynamicUser=yes")


def writing_to(folder: str, seconds: float) -> str:
    """
    Return the shell prefix for a command that may write to one folder as root.

    The command has no capabilities and no network, and all other folders are read-only.
    """
    return _unit(seconds, f"ReadWritePaths={folder}")


def _unit(seconds: float, own: str) -> str:
    properties = (own, "PrivateNetwork=yes", f"RuntimeMaxSec={seconds:g}")
    words = (*RUN, "-E HOME=/tmp", "-E LOGNAME=nobody")
    return " ".join([*words, *(f"-p {quote(each)}" for each in (*properties, *PROPERTIES)), "--"])
