"""Build the lab's replacement of a distribution's kernel archive for the nodes' apt.

It has the running kernel and newer kernels. The newest kernel has no headers, so a node that
installs this kernel cannot build a driver for it. None of these kernels can be booted.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lab import fake_kernel_module
from lab.vendor import repository
from lab.vendor.deb import File, Package

FOLDER = "kernels"  # below the lab's state, and below the mirror's URL

# Linux' own modules that a node can load: for its GPUs, and for NVLink 5 switches.
IN_TREE = ("drivers/gpu/drm/nouveau/nouveau.ko", "drivers/infiniband/core/ib_umad.ko")


def releases() -> dict[str, bool]:
    """Return every kernel, the running one first, with whether it has headers."""
    running = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", running)
    major, minor = (int(numbers[1]), int(numbers[2])) if numbers else (6, 0)
    return {
        running: True,
        f"{major}.{minor + 1}.1-lab": True,
        f"{major}.{minor + 2}.1-lab": False,
    }


def build(state: Path) -> Path:
    """
    Build the archive below the lab's `state`, and return its directory.

    An archive with these packages is not changed.
    """
    target, new = state / FOLDER, state / f"{FOLDER}.new"
    wanted = list(packages())
    if target.is_dir() and all(package.path(target).exists() for package in wanted):
        return target
    for leftover in (target, new):
        shutil.rmtree(leftover, ignore_errors=True)
    repository.public_key(state / "vendor")  # the lab signs all its repositories with one key
    new.mkdir(parents=True)
    for package in wanted:
        package.build(new)
    repository.index(new, state / "vendor", origin="Debian", label="Debian")
    new.rename(target)
    return target


def packages() -> Iterator[Package]:
    """Yield every package of the archive."""
    for release, has_headers in releases().items():
        yield _image(release)
        if has_headers:
            yield _headers(release)


def image_files(release: str) -> dict[str, bytes]:
    """Return a kernel package's files below /lib/modules, as far as kmod and depmod read them."""
    files = {"modules.builtin": b"kernel/fs/ext4/ext4.ko\n", "modules.order": b""}
    for path in IN_TREE:
        fields = (("license", "GPL"), ("intree", "Y"), ("name", Path(path).stem))
        files[f"kernel/{path}"] = fake_kernel_module.image(fields, platform.machine())
    return {f"/lib/modules/{release}/{path}": content for path, content in files.items()}


def header_files(release: str) -> dict[str, str]:
    """Return a header package's files, without the link from its kernel."""
    return {f"{_sources(release)}/include/config/kernel.release": f"{release}\n"}


def header_link(release: str) -> tuple[str, str]:
    """Return the path and the target of a kernel's link to its headers."""
    return f"/lib/modules/{release}/build", _sources(release)


def _sources(release: str) -> str:
    return f"/usr/src/linux-headers-{release}"


def _image(release: str) -> Package:
    folder = f"/lib/modules/{release}"
    return Package(
        f"linux-image-{release}",
        f"{release}-1",
        fields={"Depends": "kmod"},
        files={path: File(content) for path, content in image_files(release).items()}
        | {f"/boot/vmlinuz-{release}": File("a kernel that nothing boots\n")},
        scripts={
            "postinst": f"depmod {release}\n" + _hooks("postinst.d", release),
            "postrm": f'if [ "$1" = remove ]; then rm -rf {folder}; fi\n',
        },
    )


def _headers(release: str) -> Package:
    at, to = header_link(release)
    return Package(
        f"linux-headers-{release}",
        f"{release}-1",
        files={path: File(text) for path, text in header_files(release).items()},
        scripts={
            "postinst": f"mkdir -p $(dirname {at})\nln -sfn {to} {at}\n"
            + _hooks("header_postinst.d", release),
            "prerm": f"rm -f {at}\n",
        },
    )


def _hooks(folder: str, release: str) -> str:
    """Return shell lines that run a new kernel's hooks, such as dkms."""
    at = f"/etc/kernel/{folder}"
    return f"if [ -d {at} ]; then run-parts --arg={release} {at}; fi\n"
