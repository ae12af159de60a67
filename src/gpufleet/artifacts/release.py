"""Define a release on a node: name, directory and build script. Pure.

A release is one immutable virtual environment under `/opt/vllm/releases/` (for LiteLLM, under
`/opt/litellm/`). uv builds it from a lock in which every package has a hash. A unit contains the
path of one release. So a rollback only writes the unit again and installs nothing. A release
without its `.complete` mark is built again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from shlex import join, quote
from typing import Protocol
from urllib.parse import unquote

from gpufleet import node_paths
from gpufleet.errors import FleetError
from gpufleet.remote import payload, sandbox

RELEASES = node_paths.RELEASES
CACHE = node_paths.UV_CACHE
# A build without any cached wheels downloads and unpacks about 5 GB of wheels for vLLM with CUDA.
# From a slow mirror this takes an hour.
BUILD_SECONDS = 3600
# Importing torch and vLLM takes 20 s if no file is in the page cache. A slow disk needs more time.
IMPORT_SECONDS = 600
# Compiling vLLM's 40,000 files takes six minutes on one core. uv's own compilation needed 5 m 39 s
# for 1,513 files on a machine with a load of 20.
COMPILE_SECONDS = 1800
# A build continues after its controller has ended. The next build waits for it.
WAIT_SECONDS = 1800
# Lines of uv's output that an error shows. The reasons are at the end of the output.
_SAID_LINES = 40

# The packages with CUDA's runtime. The first two numbers of their version are CUDA's. Since CUDA 13
# the package has no suffix, and before it had one.
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
# The first line of a requirement in a lock of uv or pip: `name[extras]==version` or
# `name[extras] @ url`.
_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?"
    r"(?:\s*==\s*(?P<version>[^\s;\\]+)|\s*@\s*(?P<url>\S+))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Program:
    """
    A program that is installed as releases.

    Attributes:
        package: the program's name in a lock, and its section in the settings (`vllm.version`).
        home: the directory with the program's releases, their locks and uv.
        cache: uv's cache of unpacked wheels. Each program has its own, because two programs may be
            built at the same time.
        imports: the modules that can be imported from a complete release.
        prefix: the beginning of the releases' ids, if a different program has the same home.
    """

    package: str
    home: str
    cache: str
    imports: tuple[str, ...]
    prefix: str = ""

    @property
    def releases(self) -> str:
        """The directory of the program's releases on nodes."""
        return f"{self.home}/releases"


VLLM = Program("vllm", node_paths.VLLM, CACHE, ("torch", "vllm"))
# SGLang's releases are in the same directory as vLLM's. So the code that removes, counts and copies
# releases finds them too, and files that both have, such as torch's, are on the disk only once.
SGLANG = Program("sglang", node_paths.VLLM, CACHE, ("torch", "sglang"), prefix="sglang-")
PROGRAMS = {each.package: each for each in (VLLM, SGLANG)}
"""The programs of the engines, by the engine's name."""


class Source(Protocol):
    """A release in the settings: its version, and the source of its packages."""

    @property
    def version(self) -> str: ...
    @property
    def lock(self) -> str: ...
    @property
    def uv_lock(self) -> str: ...
    @property
    def python(self) -> str: ...
    @property
    def index_url(self) -> str | None: ...
    @property
    def find_links(self) -> tuple[str, ...]: ...
    @property
    def no_index(self) -> bool: ...


@dataclass(frozen=True)
class Release:
    """The state that one release must have on a node."""

    id: str
    lock: bytes
    uv_lock: bytes
    source: Source
    program: Program = VLLM

    @property
    def directory(self) -> str:
        """The directory of this release on the node."""
        return f"{self.program.releases}/{self.id}"

    @property
    def mark(self) -> str:
        """The file that marks the release as complete."""
        return f"{self.directory}/.complete"

    @property
    def build_log(self) -> str:
        """The file with uv's output during a build (on_node/transfer/build_progress.py)."""
        return f"{self.program.home}/.said"

    @property
    def lock_path(self) -> str:
        """The path of the release's lock on the node."""
        return f"{self.program.home}/locks/{self.id}.txt"

    @property
    def uv_lock_path(self) -> str:
        """The path of uv's own lock on the node."""
        return f"{self.program.home}/locks/uv-{_short(self.uv_lock)}.txt"


def release(source: Source, lock: bytes, uv_lock: bytes, program: Program = VLLM) -> Release:
    """
    Return the release that settings and the locks' contents define.

    The release's id has the version, so that people recognise it, and a hash of everything that
    determines the installed files. Raises `FleetError` if the lock has no hashes, or if it has a
    different version of the program.
    """
    problems = []
    for name, text in ((source.lock, lock), (source.uv_lock, uv_lock)):
        if b"--hash=sha256:" not in text:
            problems.append(
                f"{name}: has no hashes, but a lock needs a hash for every package: create the "
                "lock with `gpufleet packages lock` (locks/README.md)"
            )
    package = program.package
    pinned = f"{package}=={source.version}"
    pins = _pins(lock)
    if pinned not in pins:
        other = next(
            (line for line in pins if line.startswith(f"{package}==")), f"no {package} at all"
        )
        problems.append(
            f"{source.lock}: {package}.version is {source.version}, but the lock has {other}"
        )
    if problems:
        raise FleetError(*problems)
    name = f"{program.prefix}{source.version}-{_short(lock, source.python.encode())}"
    return Release(name, lock, uv_lock, source, program)


def engine_version(release_id: str) -> tuple[str, str]:
    """
    Return the engine's name and the version in a release's id. The version is "" if unknown.

    >>> engine_version("0.32.0-1f2e3d4c5b"), engine_version("sglang-0.5.23-1f2e3d4c5b")
    (('vllm', '0.32.0'), ('sglang', '0.5.23'))
    """
    engine, _, version = release_id.rpartition("-")[0].rpartition("-")
    return engine or VLLM.package, version


# All nodes of a run have the same few locks, of some thousand lines each.
@lru_cache(maxsize=16)
def _pins(lock: bytes) -> dict[str, None]:
    """Return the first word of each line of a lock in order, without local versions."""
    lines = (line for line in lock.decode().splitlines() if line.strip())
    return dict.fromkeys(line.split()[0].split("+")[0] for line in lines)


def pinned(lock: bytes, package: str) -> str | None:
    """
    Return a package's version in a lock, or None if the lock does not have the package.

    The package's name may have any spelling. If a package comes from a URL, its version is in the
    URL's file name. If the URL has no version (a git URL), the result is "".

    >>> pinned(b"ray[default]==2.60.0 --hash=sha256:...", "ray")
    '2.60.0'
    >>> pinned(b"deep_ep @ https://wheels.example/deep_ep-1.2.1-cp312-linux_x86_64.whl", "deep-ep")
    '1.2.1'
    """
    wanted = _normal(package)
    for found in _REQUIREMENT.finditer(lock.decode(errors="replace")):
        if _normal(found["name"]) != wanted:
            continue
        if found["version"]:
            return found["version"]
        file = unquote(found["url"].partition("#")[0]).rstrip("/").rpartition("/")[2]
        wheel = re.match(r"[^-]+-(\d[^-]*)(?:-|$)", file)
        return wheel[1].removesuffix(".tar.gz").removesuffix(".zip") if wheel else ""
    return None


def cuda_release(lock: bytes) -> tuple[int, int] | None:
    """
    Return the CUDA release of the runtime in a lock's wheels, or None if they have no runtime.

    >>> cuda_release(b"nvidia-cuda-runtime==13.0.96 --hash=sha256:...")
    (13, 0)
    """
    for package in _RUNTIMES:
        if version := pinned(lock, package):
            major, minor = version.split(".")[:2]
            return int(major), int(minor)
    return None


@dataclass(frozen=True)
class Wheels:
    """What a release's wheels require of the driver. `source` is the path of their lock."""

    cuda: tuple[int, int] | None
    source: str


def wheels(lock: bytes, source: str) -> Wheels:
    """Return what the wheels in a lock require of the driver."""
    return Wheels(cuda_release(lock), source)


def build_script(wanted: Release) -> str:
    """
    Return the shell script that builds the release on the node. It can be run again at any time.

    If a build was killed, its files are deleted and not completed, because uv trusts a package's
    metadata without checking the package's files. Unpacked wheels stay in uv's cache, so that the
    next build takes only seconds. After a reboot the cache is deleted too, because a power cut may
    have left empty files in it. A release is complete when all locked packages are installed, when
    they are compatible with each other and with this Python, and when the program can be imported.

    Nothing is built from source. A lock has the hash of a source distribution, but not the hashes
    of its build requirements. A package index could choose these, and root would run them.

    No code of a wheel runs as root. As root, uv only unpacks wheels. An unprivileged user checks
    their requirements and imports them. The bytecode is compiled without the wheels' start-up hooks
    (on_node/transfer/compile_bytecode.py), in a unit that can write only to the release. The
    service cannot write to its release, so without bytecode it would compile it at every start.
    This would take 14 s each time (measured on two cores).
    """
    program, interpreter = wanted.program, quote(wanted.source.python)
    home, cache = program.home, program.cache
    tool = f"{home}/uv/{_short(wanted.uv_lock)}"
    sources = _sources(wanted.source)
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    pip += ["--require-hashes", "--only-binary", ":all:"]
    unprivileged = sandbox.sandbox_prefix(IMPORT_SECONDS)
    compiler = sandbox.writing_to(wanted.directory, COMPILE_SECONDS)
    # If a deploy is interrupted, its build continues. An index that sends only a byte now and then
    # would let it run for days.
    bound = f"timeout -k 30 {BUILD_SECONDS}"
    return f"""set -eu
umask 022
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
exec 9>{home}/.building
flock -w {WAIT_SECONDS} 9 || {{ echo 'another build has run on this node for {WAIT_SECONDS} s: '\
'wait for it (pgrep -af uv), or end it, and run the deploy again' >&2; exit 1; }}
rm -f {wanted.build_log}
if ! test -e {tool}/.complete; then
    rm -rf {tool}
    {interpreter} -m venv {tool}
    {bound} {tool}/bin/python {join(pip)} {join(sources)} -r {wanted.uv_lock_path}
    sync -f {tool}
    touch {tool}/.complete
fi
if ! test -e {wanted.mark}; then
    boot=$(cat /proc/sys/kernel/random/boot_id)
    if test -e {cache}.boot && test "$(cat {cache}.boot)" != "$boot"; then
        rm -rf {cache}
    fi
    echo "$boot" > {cache}.boot
    sync {cache}.boot
    export UV_CACHE_DIR={cache} UV_NO_CONFIG=1 UV_HTTP_TIMEOUT=120 UV_PYTHON_DOWNLOADS=never
    uv={tool}/bin/uv
    python={wanted.directory}/bin/python
    rm -rf {wanted.directory}
    $uv venv --quiet --python {interpreter} {wanted.directory}
    (umask 077; : > {wanted.build_log})
    {bound} $uv pip sync --require-hashes --no-build --link-mode hardlink \\
        --python $python {join(sources)} {wanted.lock_path} 2> {wanted.build_log} \\
        || {{ tail -n {_SAID_LINES} {wanted.build_log} >&2; exit 1; }}
    {compiler} {interpreter} -ISB - {wanted.directory}/lib >> {wanted.build_log} <<'END OF PROGRAM'
{payload.source("transfer/compile_bytecode")}END OF PROGRAM
    said=$({unprivileged} $uv pip check --no-config --no-cache --python $python 2>&1) || :
    case "$said" in *'Checked '*) ;; *) echo "uv pip check: $said" >&2; exit 1 ;; esac
    # Of uv's findings, those about what a package requires (others, a needed Python): it also calls
    # wheels with unusual platform tags wrong, which were just installed and are imported next.
    if echo "$said" | grep ' requires '; then
        echo 'the packages of the lock do not fit together, or the lock is for a different' \
            'Python: see locks/README.md' >&2
        exit 1
    fi
    {unprivileged} $python -IB -c 'import {", ".join(program.imports)}'
    sync -f {wanted.directory}
    sync -f {cache}
    rm -f {cache}.boot {wanted.build_log}
    touch {wanted.mark}
fi
"""


def _sources(source: Source) -> Sequence[str]:
    """Return the package source as arguments for pip and uv."""
    sources = [f"--find-links={link}" for link in source.find_links]
    if source.no_index:
        sources.append("--no-index")
    elif source.index_url:
        sources.append(f"--index-url={source.index_url}")
    # pip refuses plain http unless its host is given. Wheels may come over http, because each is
    # checked against its hash in the lock, and nothing else that an index sends is run.
    sources += [
        f"--trusted-host={url.split('/')[2]}"
        for url in (*source.find_links, source.index_url or "")
        if url.startswith("http://")
    ]
    return tuple(dict.fromkeys(sources))


def _normal(name: str) -> str:
    """Return a package's normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _short(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:10]
