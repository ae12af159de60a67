"""Install nvitop, a third-party NVML program, unmodified on a lab node.

nvitop shows whether third-party programs work with the simulated library, and whether they get the
same values as gpufleet's probe. Its packages are those in this environment's lock file: packages
without compiled parts, and psutil, whose wheel fits every Python 3 on this machine's architecture.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

PACKAGES = ("nvitop", "nvidia-ml-py", "psutil")
PLACE = Path("opt/monitors")

RUN = f"env PYTHONPATH=/{PLACE} PYTHONDONTWRITEBYTECODE=1 TERM=dumb python3 -m"
"""Command prefix in a node's shell: `{RUN} nvitop -1`."""


def install(root: Path) -> None:
    """Copy nvitop's packages below a node's root, replacing existing files."""
    for package in PACKAGES:
        for file in metadata.files(package) or ():
            if ".." in file.parts or file.suffix == ".pyc":
                continue  # scripts for bin/, and what Python rebuilds
            to = root / PLACE / file
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), to)
