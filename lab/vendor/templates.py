"""Define contents of the simulated vendor packages: programs, units, scripts."""

from __future__ import annotations

from pathlib import Path

from lab.vendor.deb import File

UNITS = "/usr/lib/systemd/system"
# No systemd (a chroot): nothing to tell.
RELOAD = "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"

_ON_NODE = Path(__file__).parent / "on_node"


def stop(unit: str) -> str:
    """
    Return shell lines that stop a unit before its files are removed; upgrades leave it running.
    """
    return (
        'if [ "$1" = remove ] && [ -d /run/systemd/system ]; then\n'
        f"    systemctl disable --now {unit}.service || true\n"
        "fi\n"
    )


def program(name: str, **values: str) -> File:
    """Return a program from `on_node/` with each @NAME@ replaced by its value."""
    text = (_ON_NODE / name).read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return File(text, 0o755)


def data(name: str, *, conffile: bool = False) -> File:
    return File((_ON_NODE / name).read_text(), conffile=conffile)
