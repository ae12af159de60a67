"""What an index sends instead of a wheel is never built: its build backend would run as root."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from uv import find_uv_bin

from gpufleet.artifacts.release import Program, Release, build_script, release
from gpufleet.settings.serving_settings import Vllm

BACKEND = """
from pathlib import Path
Path({ran!r}).write_text("the build backend ran")
def get_requires_for_build_wheel(config_settings=None): return []
def prepare_metadata_for_build_wheel(folder, config_settings=None): raise SystemExit(3)
def build_wheel(folder, config_settings=None, metadata_directory=None): raise SystemExit(3)
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def sdist(index: Path, name: str, version: str, ran: Path) -> bytes:
    """Write a source distribution whose build writes `ran`; return a lock of it, by its hash."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "backend.py": BACKEND.format(ran=str(ran)),
        "pyproject.toml": PYPROJECT,
    }
    index.mkdir(exist_ok=True)
    path = index / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{inner}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n".encode()


def wanted(tmp_path: Path, lock: bytes, uv_lock: bytes) -> Release:
    source = Vllm.model_validate(
        {
            "version": "0.32.0",
            "lock": "vllm.txt",
            "listen": "127.0.0.1",
            "python": sys.executable,
            "find_links": [str(tmp_path / "index")],
            "no_index": True,
        }
    )
    (tmp_path / "home/locks").mkdir(parents=True)
    program = Program("vllm", str(tmp_path / "home"), str(tmp_path / "cache"), ("vllm",))
    made = release(source, lock, uv_lock, program)
    Path(made.lock_path).write_bytes(lock)
    Path(made.uv_lock_path).write_bytes(uv_lock)
    return made


def build(made: Release) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", build_script(made)], capture_output=True, text=True, timeout=120, check=False
    )


def uv_is_there(made: Release) -> None:
    """Put this environment's uv where a build has installed it."""
    script = build_script(made)
    tool = Path(script.split("uv=")[1].splitlines()[0]).parents[1]
    (tool / "bin").mkdir(parents=True)
    (tool / "bin/uv").symlink_to(find_uv_bin())
    (tool / ".complete").touch()


@pytest.mark.slow  # it installs what nodes do
@pytest.mark.parametrize("what", ["the release", "uv"])
def test_a_locked_package_that_an_index_has_as_source_only_is_not_built(
    what: str, tmp_path: Path
) -> None:
    """The lock has the hash of the source distribution, so nothing but the build is in question."""
    ran = tmp_path / "ran"
    uv_lock = sdist(tmp_path / "index", "uv", "0.13.9", ran)
    made = wanted(tmp_path, sdist(tmp_path / "index", "vllm", "0.32.0", ran), uv_lock)
    if what == "the release":
        uv_is_there(made)

    done = build(made)

    assert done.returncode != 0
    assert not ran.exists(), ran.read_text()
    assert not Path(made.mark).exists()
    needed = "building from source is disabled" if what == "the release" else "No matching"
    assert needed in done.stderr
