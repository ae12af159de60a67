"""Build the wheels of SGLang's release for the lab's nodes, and its lock.

Contract: the wheels are in the folder and the manifest of `wheelhouse`. A node installs
`sglang==VERSION` from this folder without a GPU and without an index.

SGLang's own wheel is repacked as a build for CPUs, `VERSION+cpu`. It has the same files, but its
metadata requires the lab's torch and no package that only GPUs use. `lab/sglang_cpu` replaces those
of these packages that SGLang imports nevertheless.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.on_node.flags import placeholder
from lab import wheelhouse
from lab.progress import Say, silent
from lab.state import CACHE, exclusive

VERSION = "0.5.23"
# The torch of the lab's vLLM, so that the wheelhouse has only one torch. SGLang requires 2.14.1,
# but also runs on this version (measured with 0.5.23).
TORCH = "2.13.0+cpu"

CPU_PACKAGE = "gpufleet-lab-sglang"
CPU_PACKAGE_VERSION = "1"

# Packages that SGLang 0.5.23 requires for GPUs: kernels, compilers of kernels, bindings of CUDA.
GPU_PACKAGES = frozenset(
    {
        "apache-tvm-ffi",
        "cuda-python",
        "flash-attn-4",
        "flashinfer-python",
        "humming-kernels",
        "kernels",
        "nvidia-cutlass-dsl",
        "nvidia-mathdx",
        "nvshmem4py-cu13",
        "quack-kernels",
        "sgl-deep-ep",
        "sgl-deep-gemm",
        "sgl-flash-mla",
        "sglang-kernel",
        "tilelang",
        "torch-memory-saver",
    }
)
# SGLang checks by name whether these packages exist. Their real wheels need CUDA's torch.
STUBS = (*wheelhouse.STUBS, "timm")

_REQUIRES = re.compile(r"Requires-Dist: ([A-Za-z0-9._-]+)")


def sglang_wheels(cache: Path = CACHE, report: Say = silent) -> Path:
    """
    Return the folder `cache`/wheels, with missing wheels of SGLang downloaded.

    Raises FleetError when this machine cannot choose or reach the wheels.
    """
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    with exclusive("wheels", cache, limit=wheelhouse.DOWNLOAD_S):
        if wheelhouse.is_complete(wheels, requirements()):
            return wheels
        write_cpu_build(wheels, report)
        write_cpu_package(wheels)
        for name in STUBS:
            wheelhouse.write_wheel(wheels, name, wheelhouse.STUB_VERSION)
        for requirement in requirements():
            wheelhouse.download(requirement, wheels, report)
        wheelhouse.write_manifest(wheels, requirements())
    return wheels


def requirements() -> tuple[str, ...]:
    """Return the requirements of an SGLang release."""
    return f"sglang=={VERSION}+cpu", f"{CPU_PACKAGE}=={CPU_PACKAGE_VERSION}"


def write_lock(state: Path, cache: Path = CACHE) -> Path:
    """Write `state`/locks/sglang-VERSION.txt from the wheelhouse, and return its path."""
    out = state / "locks" / f"sglang-{VERSION}.txt"
    return wheelhouse.lock("\n".join(requirements()), cache / "wheels", out)


def write_cpu_package(wheels: Path) -> Path:
    """Write the wheel of `lab/sglang_cpu`, with the same bytes every time."""
    package = CPU_PACKAGE.replace("-", "_")
    files = {
        f"{package}/__init__.py": (Path(__file__).parent / "sglang_cpu/__init__.py").read_text(),
        f"{package}/placeholder.py": Path(placeholder.__file__).read_text(),
        f"{package}.pth": f"import {package}\n",
    }
    return wheelhouse.write_wheel(wheels, package, CPU_PACKAGE_VERSION, files=files)


def write_cpu_build(wheels: Path, report: Say = silent) -> Path:
    """Download SGLang's own wheel, and write its CPU build to `wheels`."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-sglang-") as folder:
        wheelhouse.download(f"sglang=={VERSION}", Path(folder), report, "--no-deps")
        return repack(next(Path(folder).glob("sglang-*.whl")), wheels)


def repack(wheel: Path, wheels: Path) -> Path:
    """Write `wheel` with the requirements of a CPU build and its version; return the new wheel."""
    name, version, *tags = wheel.stem.split("-")
    new = f"{version}+cpu"
    old_info, info = f"{name}-{version}.dist-info", f"{name}-{new}.dist-info"
    path = wheels / "-".join((name, new, *tags))
    path = path.with_name(path.name + ".whl")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w") as target:
        record: list[tuple[str, str, str]] = []
        for entry in sorted(source.namelist()):
            if entry.endswith("/") or entry == f"{old_info}/RECORD":
                continue
            body = source.read(entry)
            if entry == f"{old_info}/METADATA":
                body = cpu_metadata(body.decode(), version, new).encode()
            inner = entry.replace(old_info, info, 1)
            record.append((inner, f"sha256={_digest(body)}", str(len(body))))
            _write(target, inner, body)
        listed = io.StringIO()
        writer = csv.writer(listed, lineterminator="\n")  # some names have commas
        writer.writerows([*record, (f"{info}/RECORD", "", "")])
        _write(target, f"{info}/RECORD", listed.getvalue().encode())
    return path


def cpu_metadata(text: str, version: str, new: str) -> str:
    """
    Return a wheel's METADATA for its CPU build.

    Raises FleetError if a package for GPUs is no longer required. In this case the list of packages
    belongs to an older release, and the lab's replacements may too.
    """
    head, blank, body = text.partition("\n\n")
    dropped: set[str] = set()
    lines = list(_cpu_lines(head.splitlines(), dropped))
    if gone := sorted(GPU_PACKAGES - dropped):
        raise FleetError(
            f"SGLang {version} does not require {', '.join(gone)}: look at its METADATA, and write "
            "its packages for GPUs into GPU_PACKAGES (lab/sglang_wheels.py)"
        )
    head = "\n".join(lines).replace(f"\nVersion: {version}\n", f"\nVersion: {new}\n", 1)
    return head + blank + body


def _cpu_lines(lines: Iterable[str], dropped: set[str]) -> Iterator[str]:
    """Yield the lines of a header without packages for GPUs, which are added to `dropped`."""
    for line in lines:
        match = _REQUIRES.match(line)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        if name in GPU_PACKAGES:
            dropped.add(name)
        elif name == "torch":
            yield f"Requires-Dist: torch=={TORCH}"
        elif name in STUBS:
            yield f"Requires-Dist: {name}"
        else:
            yield line


def _digest(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def _write(archive: zipfile.ZipFile, name: str, body: bytes) -> None:
    # Stored, with one date: the same bytes from every machine's zlib, as a lock's hash wants it.
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o100644 << 16
    archive.writestr(entry, body)
