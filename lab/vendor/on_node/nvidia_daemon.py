#!/usr/bin/python3 -I
"""A stand-in for the driver's daemons: nvidia-persistenced, nv-fabricmanager, nvidia-imex.

Runs on the node: standard library only, Python 3.8. By which name it is called says which of them
it is. Each refuses to run without a driver of its own version, holds the GPUs' device while it
runs, and tells the simulated NVML what it has set up, as the real ones tell the driver.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

VERSION = "@VERSION@"
LOADED = Path("/sys/module/nvidia/version")
NVML_STATE = Path("/etc/gpufleet-lab/nvml.conf.state")  # later lines win
DEVICE = "/dev/nvidiactl"


def driver() -> str:
    """Return the loaded driver's version, or end like the daemon if there is none."""
    try:
        return LOADED.read_text().strip()
    except FileNotFoundError:
        sys.exit("Failed to query NVIDIA devices: the NVIDIA kernel driver is not loaded.")


def set_up(setting: str) -> None:
    """Make every GPU report `setting` until the driver is reloaded."""
    with NVML_STATE.open("a") as file:
        file.write(f"gpu.*.{setting}\n")


def has_switches() -> bool:
    """Return whether there are NVSwitches, on the PCI bus or behind a NIC (NVLink 5)."""
    for function in Path("/sys/bus/pci/devices").glob("*"):
        kind, vendor = ((function / name).read_text().strip() for name in ("class", "vendor"))
        if vendor == "0x10de" and kind == "0x068000":
            return True
    found = Path("/sys/class/infiniband").glob("*/device/vpd")
    return any(b"SW_MNG" in vpd.read_bytes() for vpd in found)


def fabric_manager() -> None:
    """Join the GPUs' fabric; end without a fabric or with another driver version."""
    if not has_switches():
        sys.exit("NV_WARN_NOTHING_TO_DO: no NVSwitch was found on this system.")
    if driver() != VERSION:
        sys.exit(
            f"fabric manager NVIDIA GPU driver interface version {VERSION} don't match with "
            f"driver version {driver()}. Please update with matching NVIDIA driver package."
        )
    set_up("fabric.state = 3")


def persistenced() -> None:
    """Set the GPUs' persistence mode, or clear it with --no-persistence-mode."""
    driver()
    set_up(f"persistence = {int('--no-persistence-mode' not in sys.argv)}")


def imex() -> None:
    """Join the memory of a rack's nodes."""
    if driver() != VERSION:
        sys.exit(f"IMEX version {VERSION} does not match the driver's, {driver()}.")


def main() -> int | None:
    """Run until terminated."""
    daemons = {"nv-fabricmanager": fabric_manager, "nvidia-imex": imex}
    if "--version" in sys.argv or "-v" in sys.argv:
        print(f"version is : {VERSION}")  # noqa: T201
        return 0
    daemons.get(Path(sys.argv[0]).name, persistenced)()
    os.open(DEVICE, os.O_RDWR | os.O_CREAT, 0o666)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
