"""Two NVML programs of others, nvitop and gpustat, unmodified on a lab node.

They show whether the simulated library is one that strangers can live with, and whether they see
what our probe sees. Their packages are those of this environment's lock: Python without compiled
parts, and psutil, whose wheel fits every Python 3 on this machine's architecture.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

PACKAGES = ("nvitop", "gpustat", "nvidia-ml-py", "psutil", "blessed", "jinxed", "wcwidth")
PLACE = Path("opt/monitors")

RUN = f"env PYTHONPATH=/{PLACE} PYTHONDONTWRITEBYTECODE=1 TERM=dumb python3 -m"
"""How a node's shell runs them: `{RUN} gpustat --json`, `{RUN} nvitop -1`."""


def install(root: Path) -> None:
    """Copy them below a node's root; what lies there already is replaced."""
    for package in PACKAGES:
        for file in metadata.files(package) or ():
            if ".." in file.parts or file.suffix == ".pyc":
                continue  # scripts for bin/, and what Python makes anew
            to = root / PLACE / file
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), to)
