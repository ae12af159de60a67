"""The lab's release with what reads pictures and sound: torchvision, and vLLM's extra `audio`.

Of torchvision, whose published wheels are for CUDA's torch, everything but its compiled operators:
processors of pictures call none of them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from lab import provisioning_sources, wheelhouse
from lab.progress import silent
from lab.state import CACHE, exclusive
from tests.lab import made_release

TORCHVISION = "0.28.0"  # the one for the lab's torch, 2.13.0
SOUND = ("av==18.1.0", "scipy==1.17.1", "soundfile==0.14.0", "soxr==1.1.0")
"""What vLLM's extra `audio` names, and the lab's wheels lack."""
_NO_OPERATORS = """\
from torchvision import transforms
from torchvision.version import __version__


def get_image_backend():
    return "PIL"
"""


def make(folder: Path) -> tuple[list[Path], Path]:
    """Return the wheels that nodes need besides the lab's, and the lock, in `folder`."""
    there = CACHE / "media"
    for each in (there, folder):
        each.mkdir(parents=True, exist_ok=True)
    with exclusive("media", CACHE, limit=600):
        for each in (f"torchvision=={TORCHVISION}", *SOUND):
            if not list(there.glob(each.replace("==", "-") + "-*.whl")):
                wheelhouse.download(each, there, silent, "--no-deps")
    (published,) = there.glob("torchvision-*.whl")
    made = [
        without_operators(published, folder),
        *(wheel for wheel in there.glob("*.whl") if wheel != published),
    ]
    version = provisioning_sources.VLLM
    wanted = [f"vllm=={version}", f"torchvision=={TORCHVISION}+lab", *SOUND]
    lock = wheelhouse.lock(
        "\n".join([*wanted, *wheelhouse.release_companions()]),
        made_release.with_the_labs(folder, made),
        folder / f"vllm-{version}.txt",
    )
    return made, lock


def without_operators(whole: Path, folder: Path) -> Path:
    """Write torchvision's Python files as a wheel, with an entrance that loads no operator."""
    with zipfile.ZipFile(whole) as archive:
        files = {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith("torchvision/") and name.endswith(".py")
        }
    files["torchvision/__init__.py"] = _NO_OPERATORS
    return wheelhouse.write_wheel(
        folder, "torchvision", f"{TORCHVISION}+lab", requires=["pillow"], files=files
    )
